"""Create: take a full snapshot, an increment or a restore point, from the checks to the commit.

All checks run before anything is changed. Nothing counts until the commit is stored: a create that ends before that
leaves no snapshot behind. A chain's WAL can be archived ahead between its increments.
"""
