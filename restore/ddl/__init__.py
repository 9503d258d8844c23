"""Restore DDL: run the statements of a shard's archive in sections on the target.

A section runs before the rows, after them, or at the end. For a role that is not a superuser the statements are
adapted. Statements that a server refuses are collected, and everything else is restored.
"""
