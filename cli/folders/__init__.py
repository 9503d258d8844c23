"""Folders: where a command keeps its temporary files and its caches, so that no other user of the machine changes them.

And how it replaces a file of the user's, whole or not at all.

Imports `fleet`, `embedded` and `storage`.
"""
