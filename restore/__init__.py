"""Restore: plan, load, swap; or fill existing tables (`--data-only`).

No database gets its real name until all databases are loaded and checked.
"""
