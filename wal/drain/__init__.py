"""Drain: manage a chain's replication slots, and extend a node's archive by reading its slot.

A slot is never advanced past the end of the archive. If a drain dies, any later drain can resume, because positions
show how much is already archived.
"""
