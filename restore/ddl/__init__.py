"""DDL at a restore: the statements of a shard's archive, run in sections on the target.

A section runs before the rows, after them, or at the end. A role that is not a superuser runs the statements in a form
that is adapted to it. A statement that a server refuses is collected, and keeps nothing else from being restored.
"""
