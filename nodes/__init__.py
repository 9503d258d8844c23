"""Nodes: sessions with the fleet's servers, their identities, and their databases as the catalogs describe them.

A *session* is one connection to one node. The *baseline* identifies every node: system identifier, timeline,
database, version, encoding. The *fleet lock* is an advisory lock on every primary; it ends with its session. Every wait
for a server is bounded: a node that stops answering ends the command.

A *group* is one table under one definition; its number identifies that definition in stored rows. A table's *state* is
everything else that decides whether older rows and later changes fit together.
"""
