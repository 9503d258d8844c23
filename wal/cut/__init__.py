"""Cut: the markers in the WAL, the events between them, and the rule that resolves them into one consistent cut.

A *cut* is one WAL position per primary and the set of global transactions committed at it. A *marker* is a logical
message in a node's WAL: `start` or `finish` of one cut. docs/consistency.md has the rule and its proof.

Imports `columns`, `fleet`, `wal.segments` and `storage`.
"""
