"""The stored large objects of a commit. Only full snapshots have them: increments do not follow large objects.

One object in the store holds parts of large objects, in the order in which a task read them
(snapshots/base_copy/large_objects.py). Beside the first part stands the large object's definition, JSON text. A restore
makes SQL of it, so it is read in one place, strictly.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

from cutline.fleet.record import Record, from_json
from cutline.fleet.tables.left_out import LeftOut, mark_large_objects
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.stored_object import LARGE_OBJECTS, LARGE_OBJECTS_COUNT, StoredObject, listed_objects

# PostgreSQL's text has no NUL.
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\0]*\Z")]
RoleName = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\0]+\Z")]


class Grant(Record, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A privilege on a large object, stored as an array; the grantee "" is PUBLIC."""

    grantor: RoleName
    grantee: Text
    privilege: Literal["SELECT", "UPDATE"]
    may_grant: bool


class LargeObjectDefinition(Record, frozen=True):
    """The owner, comment and grants of a large object. `grants` is None if it has the privileges of a new one."""

    owner: RoleName
    comment: Text | None
    grants: tuple[Grant, ...] | None


def parse_definition(text: str) -> LargeObjectDefinition:
    """The definition in `text`; raise ValueError if it is none."""
    try:
        definition: LargeObjectDefinition = from_json(text, LargeObjectDefinition)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"a definition is invalid: {shortened(str(error))}") from error
    return definition


def list_large_objects(commit: FullSnapshot) -> tuple[StoredObject, ...]:
    """The stored objects of a full snapshot that hold large objects."""
    entries = [one for one in commit.entries if one.kind == LARGE_OBJECTS]
    return tuple(stored for one in entries for stored in listed_objects(one))


def group_by_copy_task(objects: Iterable[StoredObject]) -> list[tuple[StoredObject, ...]]:
    """The objects of each copy task in their order: their keys share a prefix and end in their numbers."""
    by_prefix: dict[str, list[StoredObject]] = {}
    for one in sorted(objects, key=lambda stored: stored.key):
        by_prefix.setdefault(one.key.rsplit("-", 2)[0], []).append(one)
    return [tuple(together) for together in by_prefix.values()]


def count_by_node(commit: FullSnapshot) -> dict[str, int]:
    """The number of large objects of each node in a full snapshot; nodes without any are omitted."""
    counts: dict[str, int] = {}
    for one in commit.entries:
        if one.kind != LARGE_OBJECTS:
            continue
        counts[one.node] = counts.get(one.node, 0) + one.rows.get(LARGE_OBJECTS_COUNT, 0)
    return {node: count for node, count in counts.items() if count}


def with_large_object_counts(left_out: Iterable[LeftOut], full: FullSnapshot) -> tuple[LeftOut, ...]:
    """Add to `left_out` the large objects of a chain that begins with `full`: changes after it are not covered."""
    base = full.base
    return mark_large_objects(left_out, {n: (count, str(base[n])) for n, count in count_by_node(full).items()})
