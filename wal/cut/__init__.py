"""Cut: the markers in the WAL, the events between them, and the rule that resolves them into a consistent cut.

A *cut* is one WAL position per primary, with the set of global transactions committed before these positions. The cut
at an *exact time* is resolved later, from the events between two cuts that were made. A *marker* is a logical message
in a node's WAL: the `start` or `finish` of a cut. docs/consistency.md contains the rule and its proof.
"""
