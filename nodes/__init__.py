"""Nodes: sessions on the fleet's servers, the servers' identities, and the contents of their catalogs.

A *session* is one connection to one node. The *baseline* identifies every node: system identifier, timeline,
database, version, encoding. The *fleet lock* is an advisory lock on every primary; each is released when its session
ends. Every wait for a server is bounded: if a node stops answering, the command ends.

A *group* is one table under one definition; its number identifies that definition in stored rows. A table's *state* is
everything else that determines whether older rows and later changes fit together.
"""
