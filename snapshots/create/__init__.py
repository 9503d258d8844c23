"""Create: taking a full snapshot or an increment, from the checks to the commit.

Every check is made before anything is changed. Nothing that is made counts until the commit is stored; whatever ends a
create before that leaves no snapshot.

Imports every other part of `snapshots` but `fold`, `listing` and `removal`, and what they import.
"""
