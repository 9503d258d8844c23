"""Nodes: connections to the fleet's servers, what each server is, and the locks held on them.

A *session* is one connection to one node. The *baseline* is what identifies every node: system identifier, timeline,
database, version, encoding. The *fleet lock* is an advisory lock on every primary and ends with its session. Every wait
for a server is bounded: a node that falls silent ends the command.

Imports `fleet` (its values) and `storage`.
"""
