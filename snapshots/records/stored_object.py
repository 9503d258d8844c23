"""The entries of stored objects in commits: objects of base copies and DDL, and lists of such objects."""

from __future__ import annotations

from typing import TypeAlias

import zstandard

from cutline.fleet.record import Count, Record, from_json

LIST_FORMAT = "cutline/objects/1"
BASE = "base"
# The DDL of a shard: one archive of pg_dump.
DDL = "archive"
# What a shard's server has besides its databases (snapshots/records/server_globals.py).
GLOBALS = "globals"
# The rows of extensions' configuration tables (snapshots/records/extension_rows.py).
EXTENSION_ROWS = "extension-rows"
# Few objects of these kinds belong to a commit, and no rows of groups to them.
WITHOUT_ROWS = (DDL, GLOBALS, EXTENSION_ROWS)
# In an object of this kind, `rows` counts under this number the large objects that begin in the object.
LARGE_OBJECTS, LARGE_OBJECTS_COUNT = "large_objects", 0


class StoredObject(Record, frozen=True):
    """An object of a base copy, or of what is read of a shard with it; `rows` counts rows by group number."""

    key: str
    kind: str
    node: str
    size: Count
    digest: str
    rows: dict[int, Count]


class ObjectList(Record, frozen=True):
    """A commit's entry for an object list.

    `size` and `digest` are the list's own; `objects`, `bytes` and `rows`, by group number, sum up what it lists, all of
    `kind` and `node`.
    """

    key: str
    kind: str
    node: str
    size: Count
    digest: str
    objects: Count
    bytes: Count
    rows: dict[int, Count]


class ReadList(ObjectList, frozen=True):
    """An entry with its list's document, compressed, as `read_lists` returns it. Never stored.

    As objects, what a large fleet's lists list would take ten times the memory.
    """

    content: bytes = b""


class LostList(ObjectList, frozen=True):
    """An entry whose list can't be read: what is wrong with it, as ObjectDamagedError says it. Never stored."""

    damage: str = ""
    detail: str = ""


class ListedObjects(Record, frozen=True, tag_field="schema", tag=LIST_FORMAT):
    """An object list: the document that an ObjectList names, stored by `operation`."""

    snapshot: str
    operation: str
    objects: tuple[StoredObject, ...]


NamedObject: TypeAlias = StoredObject | ObjectList


def compress_content(content: bytes) -> bytes:
    """What a ReadList holds of its list's document."""
    # The compressor's own bytes have room for what can't be compressed.
    return bytes(memoryview(zstandard.compress(content)))


def listed_objects(one: NamedObject) -> tuple[StoredObject, ...]:
    """The object itself, or what a list that was read lists, nothing if it is lost; raise RuntimeError if not read."""
    if isinstance(one, StoredObject):
        return (one,)
    if isinstance(one, ReadList):
        found: ListedObjects = from_json(zstandard.decompress(one.content), ListedObjects)
        return found.objects
    if isinstance(one, LostList):
        return ()
    raise RuntimeError(f"object list {one.key} was not read")
