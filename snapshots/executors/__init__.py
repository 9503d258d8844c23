"""Executors: what those of a cluster must have, asked of each before anything is made, and once more of later ones.

Imports `fleet`, `fleet.nodes`, `snapshots.records` and `storage`.
"""
