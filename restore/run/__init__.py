"""Run a restore: preview it, build the databases, load them, and end it.

A preview changes nothing. No database gets its real name until all databases are loaded and checked.
"""
