"""Folders: where a command keeps its temporary files and its caches, so that no other user of the machine changes them.

Imports `fleet`, `embedded` and `storage`.
"""
