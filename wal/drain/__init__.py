"""Drain: bring a node's archive up to a position by reading its slot; runs in an executor.

A slot is advanced only past what the archive holds. A drain that dies is repeated by anybody: positions tell what is
already archived.

Imports every other part of `wal`, and what they import.
"""
