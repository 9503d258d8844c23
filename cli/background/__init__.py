"""Background: a command that goes on in a process of its own when the prompt is back.

The process that was started tells the one that started it which operation it is, once others can see that operation.
Until then the first one shows what the second one says, and ends as it does.

Imports `cli.folders` and `storage`.
"""
