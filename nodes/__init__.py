"""Nodes: sessions on the fleet's servers, the servers' identities, and what the catalogs say about their databases.

A *session* is one connection to one node. The *baseline* identifies every node: system identifier, timeline,
database, version, encoding. The *fleet lock* is an advisory lock on every primary, which ends with its session. Every
wait for a server is bounded: a node that stops answering ends the command.

A *group* is one table under one definition; its number identifies that definition in stored rows. A table's *state* is
everything else that decides whether older rows and later changes fit together.
"""
