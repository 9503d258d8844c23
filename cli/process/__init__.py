"""The process of a command: its signals, its standard streams, and the process that runs it in the background.

The background process reports its operation to its starter as soon as others can see the operation. Until then the
starter shows the output of the background process. If the background process ends first, the starter exits with the
same code.
"""
