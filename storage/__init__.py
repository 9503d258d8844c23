"""The object store: the interface that Cutline needs, and its implementations.

An *object* is created completely and exactly once under a *key*, by a conditional put, and is never changed. The
package knows nothing about snapshots and imports no other package of the project.
"""
