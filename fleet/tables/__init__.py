"""Tables: what a database holds, read from its catalogs, and how Cutline's publications follow it.

A *group* is one table under one definition; its number names that definition in stored rows. A table's *state* is
what besides the definition decides whether older rows and later changes fit together. Everything that a snapshot leaves
out is named.

Imports `fleet`, `fleet.nodes` and `storage`.
"""
