"""Tables: the contents of a database as its catalogs describe them, and Cutline's publications.

A *group* is one table under one definition; its number identifies that definition in stored rows. A table's *state* is
everything else that decides whether older rows and later changes fit together. Everything that a snapshot leaves out is
named.

Imports `fleet`, `fleet.nodes` and `storage`.
"""
