"""Create: take a full snapshot or an increment, from the checks to the commit.

Every check runs before anything is changed. Nothing counts until the commit is stored: a create that ends earlier
leaves no snapshot.

Imports every part of `snapshots` except `fold`, `listing` and `removal`, and what those parts import.
"""
