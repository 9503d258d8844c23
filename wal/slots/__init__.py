"""Slots: the replication slots of a chain, what they wait for, and how much WAL they retain.

Imports `fleet`, `fleet.nodes` and `storage`.
"""
