"""Snapshots and increments: how they are made, committed, listed, folded into a state, and removed.

A snapshot or increment exists exactly when its commit does.
"""
