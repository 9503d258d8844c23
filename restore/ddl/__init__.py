"""Restore DDL: run the statements in a shard's archive in sections on the target.

A section runs before the rows, after them, or at the end. If the restoring role is not a superuser, the statements are
adapted to it. Statements that a server refuses are collected, and everything else is restored.
"""
