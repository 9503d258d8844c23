"""Repairs: replace damaged objects of a snapshot by objects that are made from another copy or read from another store.

An object that is missing is *put back* under its own key if another store has the same bytes. Otherwise new objects
*supersede* the damaged ones: a repair document names both (snapshots/records/repair_records.py). The new objects have
the content of those in another store, or are *rebuilt* from the copy of another node of the shard. Nothing is ever
overwritten, and nothing is rebuilt from a copy that can't be trusted itself.
"""
