"""The stored large objects of a commit. Only full snapshots have them: increments do not follow large objects.

One object in the store holds parts of large objects, in the order in which a task read them
(snapshots/base_copy/large_objects.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.tables.left_out import LeftOut, mark_large_objects
from snapshots.records.commit import LARGE_OBJECTS, LARGE_OBJECTS_COUNT, FullSnapshot, StoredObject


def list_large_objects(commit: FullSnapshot) -> tuple[StoredObject, ...]:
    """The stored objects of a full snapshot that hold large objects."""
    return tuple(one for one in commit.objects if one.kind == LARGE_OBJECTS)


def count_by_node(commit: FullSnapshot) -> dict[str, int]:
    """The number of large objects of each node in a full snapshot; nodes without any are omitted."""
    counts: dict[str, int] = {}
    for one in list_large_objects(commit):
        counts[one.node] = counts.get(one.node, 0) + one.rows.get(LARGE_OBJECTS_COUNT, 0)
    return {node: count for node, count in counts.items() if count}


def with_large_object_counts(left_out: Iterable[LeftOut], full: FullSnapshot) -> tuple[LeftOut, ...]:
    """Add to `left_out` the large objects of a chain that begins with `full`: changes after it are not covered."""
    base = full.base
    return mark_large_objects(left_out, {n: (count, str(base[n])) for n, count in count_by_node(full).items()})
