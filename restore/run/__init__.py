"""Run a restore: preview it, build and load the databases, and end it.

A preview changes nothing. No database gets its real name until all databases are loaded and checked.
"""
