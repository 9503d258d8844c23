"""Restore: plan, load, swap; or fill tables that exist (`--data-only`).

No database gets its real name until all databases are loaded and checked.
"""
