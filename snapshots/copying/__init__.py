"""Copies of whole chains in a second store.

The *second store* belongs to the same fleet as the *first store* and has the same snapshots, but no increments are
added to its chains there: its fleet.json says that it is a *copy*. It contains the first store's objects under the same
keys. Their digests are those in the commits, so every command that reads a chain works in the second store. Its
tombstones and its marks of pruned increments are its own: a snapshot that is deleted in one store stays in the other.
"""
