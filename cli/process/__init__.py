"""The process of a command: its signals, its standard streams, and the process that continues it in the background.

The process in the background reports its operation to the one that started it, once others can see that operation.
Until then the first one shows the output of the second one, and ends with its exit code.
"""
