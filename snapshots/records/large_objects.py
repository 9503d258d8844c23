"""What a commit says of stored large objects. They are of the full snapshot alone: increments do not follow them.

One object of the store holds parts of large objects, in the order in which a task read them
(snapshots/base_copy/large_objects.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from fleet.tables.left_out import LeftOut, with_large_objects
from snapshots.records.commit import LARGE_OBJECTS, LARGE_OBJECTS_COUNT, FullSnapshot, StoredObject


def list_large_objects(commit: FullSnapshot) -> tuple[StoredObject, ...]:
    """The objects of a full snapshot that hold large objects."""
    return tuple(one for one in commit.objects if one.kind == LARGE_OBJECTS)


def count_by_node(commit: FullSnapshot) -> dict[str, int]:
    """How many large objects each node's part of a full snapshot has; nodes without any are left out."""
    found: dict[str, int] = {}
    for one in list_large_objects(commit):
        found[one.node] = found.get(one.node, 0) + one.rows.get(LARGE_OBJECTS_COUNT, 0)
    return {node: count for node, count in found.items() if count}


def with_large_object_counts(left_out: Iterable[LeftOut], full: FullSnapshot) -> tuple[LeftOut, ...]:
    """What is left out of a state of the chain that begins with `full`: of large objects what came after it."""
    base = full.base
    return with_large_objects(left_out, {n: (count, str(base[n])) for n, count in count_by_node(full).items()})
