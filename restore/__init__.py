"""Restore: plan, load, publish. No target is visible under its real name until all of it is loaded and checked.

Imports `snapshots` and what is below it.
"""
