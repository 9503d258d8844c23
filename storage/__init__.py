"""The object store, and what Cutline needs of one.

An *object* is created whole under a *key* exactly once, by a conditional put, and never changed. The
package knows nothing of snapshots. It imports no other package of the project.
"""
