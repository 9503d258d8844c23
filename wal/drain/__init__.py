"""Drain: a chain's replication slots, and bringing a node's archive up to a position by reading its slot.

A slot is never advanced past the end of the archive. Any later drain can resume after a drain that died: positions show
how much is already archived.
"""
