"""The process of a command: its signals, its standard streams, and the process that continues it in the background.

The background process reports its operation to the process that started it, once others can see that operation. Until
then the starting process shows the output of the background process, and ends with its exit code.
"""
