"""Restore: plan, load, swap. No database gets its real name until all databases are loaded and checked.

Imports `snapshots` and what is below it.
"""
