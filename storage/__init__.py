"""The object store: the interface that Cutline needs, and its implementations.

An *object* is created complete under a *key* exactly once, by a conditional put, and never changed. The package knows
nothing about snapshots.

Imports nothing of the project.
"""
