"""Nodes: connections to the fleet's servers, their identities, and the locks held on them.

A *session* is one connection to one node. The *baseline* identifies every node: system identifier, timeline,
database, version, encoding. The *fleet lock* is an advisory lock on every primary; it ends with its session. Every wait
for a server is bounded: a node that stops answering ends the command.

Imports `fleet` and `storage`.
"""
