"""Snapshots and increments: how they are made, committed, listed, and folded into a state.

A snapshot or increment exists exactly when its commit file does. Imports only `wal`, `fleet`, `storage`.
"""
