"""Check: reads a chain back and proves it whole, or names what is not. It cannot pass on nothing.

Imports `snapshots` and what is below it.
"""
