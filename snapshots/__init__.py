"""Snapshots and increments: how they are created, committed, listed, folded into a state, and removed.

A snapshot or increment exists if and only if its commit does.
"""
