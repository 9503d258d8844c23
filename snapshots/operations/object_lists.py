"""Object lists: documents that list the objects in base copies, so that the commit of a large copy stays small.

A task that has stored many objects lists them itself; the driver lists the rest before the commit. A list contains
objects of one kind from one node. A list that no commit names is garbage. Restore, check and removals read lists; a
create reads only the lists of its own tasks.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import TypeVar

from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Progress
from cutline.snapshots.operations.committing import ObjectsNotStoredError, check_stored
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    WITHOUT_ROWS,
    Commit,
    DefinitionChanges,
    FullSnapshot,
    ListedObjects,
    LostList,
    NamedObject,
    ObjectList,
    ReadList,
    StoredObject,
    compress_content,
    parts_of_entries,
    split_entries,
)
from cutline.snapshots.records.commit_rules import check_distinct, check_listed, operations_of
from cutline.snapshots.records.documents import (
    ManifestError,
    check_about,
    checking,
    content_of,
    list_prefix,
    parse_document,
    seal,
    unseal,
)
from cutline.snapshots.records.merge_records import Merge
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.repaired_chain import without_replaced
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

# The maximum number of base copy objects listed in the commit itself; they take about 250 KB.
OWN_OBJECTS_MAX = 1000
# A list of this many objects is 2.4 MB if each contains rows from one table, and 56 MB if each contains rows from 500
# tables; compressed, 0.5 MB and 3 MB.
LIST_OBJECTS_MAX = 10_000
THREADS_MAX = 8
C = TypeVar("C", bound=Commit)


def store_lists_above(
    store: ObjectStore, snapshot: str, operation: str, objects: Sequence[StoredObject], objects_max: int
) -> tuple[NamedObject, ...]:
    """Store lists of the objects in base copies if there are more than `objects_max`.

    Returns the lists and the objects without rows, such as DDL; if no lists are needed, returns the objects as given.
    """
    copies = [stored for stored in objects if stored.kind not in WITHOUT_ROWS]
    if len(copies) <= objects_max:
        return tuple(objects)
    copies.sort(key=lambda stored: (stored.node, stored.kind, stored.key))
    parts = [
        list(part)
        for _, one_kind in groupby(copies, lambda stored: (stored.node, stored.kind))
        for part in _parts(list(one_kind))
    ]
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        lists = threads.map(lambda part: _store_list(store, snapshot, operation, *part), enumerate(parts))
        return (*lists, *(stored for stored in objects if stored.kind in WITHOUT_ROWS))


def replace_by_lists(store: ObjectStore, commit: C, progress: Progress) -> C:
    """Move the base copy objects listed in the commit itself to object lists, if there are more than OWN_OBJECTS_MAX.

    Returns the changed commit, whose counts don't include the lists yet.
    """
    if sum(stored.kind not in WITHOUT_ROWS for stored in commit.own_objects) <= OWN_OBJECTS_MAX:
        return commit
    snapshot, operation = commit.snapshot, commit.operation
    if isinstance(commit, FullSnapshot):
        own, lists = split_entries(store_lists_above(store, snapshot, operation, commit.copied, 0))
        commit = structs.replace(commit, copied=own, lists=(*commit.lists, *lists))
    if changes := commit.definition_changes:
        own, lists = split_entries(store_lists_above(store, snapshot, operation, changes.objects, 0))
        changes = structs.replace(changes, objects=own, lists=(*changes.lists, *lists))
        commit = structs.replace(commit, definition_changes=changes)
    progress.reached(CrashPoint.LISTS_STORED)
    return commit


def _parts(objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
    return (objects[at : at + LIST_OBJECTS_MAX] for at in range(0, len(objects), LIST_OBJECTS_MAX))


def _store_list(
    store: ObjectStore, snapshot: str, operation: str, number: int, objects: Sequence[StoredObject]
) -> ObjectList:
    node, kind = objects[0].node, objects[0].kind
    # The random part distinguishes the lists of different tasks, and the lists of a task's attempts.
    key = f"{list_prefix(snapshot, node, operation)}/{kind}-{number:06d}-{secrets.token_hex(4)}.json"
    body = seal(ListedObjects(snapshot, operation, tuple(objects)))
    digest = create_or_find(store, key, body)
    entry = ObjectList(key, kind, node, len(body), digest, 0, 0, {})
    return _with_totals(entry, objects)


def check_commit_stored(store: ObjectStore, commit: Commit) -> None:
    """Raise ObjectsNotStoredError unless the store has every object in the commit and its lists, with the right size.

    Reads the lists of one node at a time; raises the errors of `read_lists`.
    """
    check_stored(store, {entry.key: entry.size for entry in commit.named})
    by_node = sorted(commit.object_lists, key=lambda object_list: object_list.node)
    for _, lists in groupby(by_node, lambda object_list: object_list.node):
        objects = [stored for object_list in lists for stored in _read_list(store, commit, object_list)[1].objects]
        check_stored(store, {part.key: part.size for stored in objects for part in stored.parts})


def are_stored(store: ObjectStore, entries: Iterable[NamedObject]) -> bool:
    """Whether the store has all of these objects, and those in the lists, with the right sizes."""
    sizes: dict[str, int] = {}
    try:
        for entry in parts_of_entries(entries):
            sizes[entry.key] = entry.size
            if isinstance(entry, ObjectList):
                body = read_listed(store, entry.node, entry.key, (entry.size, entry.digest))
                listed: ListedObjects = parse_document(entry.key, unseal(entry.key, body)[0], ListedObjects)
                sizes |= {part.key: part.size for stored in listed.objects for part in stored.parts}
        check_stored(store, sizes)
    except (ObjectDamagedError, ObjectsNotStoredError, ManifestError):
        return False
    return True


def read_chain_lists(store: ObjectStore, chain: Chain) -> Chain:
    """Return the chain with the contents of its object lists.

    In the place of a list that is missing or altered, the chain has a LostList, and the caller must do without the
    objects of its node and groups. Raises ManifestError if a list differs from its entry in the commit.
    """
    if not any(commit.object_lists for commit in chain.commits):
        return chain
    named: dict[str, int] = {}
    operations: list[str] = []
    for commit in chain.commits:
        keys, with_lists = [entry.key for entry in commit.named], [commit.operation] if commit.object_lists else []
        with checking(commit_key(chain.name, commit.increment)):
            check_distinct("objects", "key", [*(key for key in keys if key in named), *keys])
            # Keys name the operation, so lists of different operations can't contain the same objects.
            check_distinct("commits", "operation", [*operations, *with_lists])
        named |= dict.fromkeys(keys, commit.increment)
        operations += with_lists
    reading = _ListReading(store, named, chain.applied.listed, keeps_lost=True)
    full = _read_lists(reading, chain.full)
    increments = tuple(_read_lists(reading, commit) for commit in chain.increments)
    return replace(chain, full=full, increments=increments)


def read_lists(store: ObjectStore, commit: C) -> C:
    """Return the commit with the contents of its object lists.

    Raises ObjectDamagedError if a list is missing or altered, and ManifestError if it differs from its entry in the
    commit.
    """
    named = {entry.key: commit.increment for entry in commit.named}
    return _read_lists(_ListReading(store, named, {}, keeps_lost=False), commit)


class _ListReading(Struct, frozen=True):
    """How lists are read. They must not contain objects that a commit names (`named` maps keys to increments).

    `replaced` contains, by the key of the list, the objects that repairs have replaced. If `keeps_lost`, a LostList
    stands for a list that is missing or altered.
    """

    store: ObjectStore
    named: Mapping[str, int]
    replaced: Mapping[str, Mapping[str, str]]
    keeps_lost: bool


def _read_lists(reading: _ListReading, commit: C) -> C:
    by_key = {object_list.key: object_list for object_list in _read_each(reading, commit)}
    if isinstance(commit, FullSnapshot) and commit.lists:
        commit = structs.replace(commit, lists=tuple(by_key[object_list.key] for object_list in commit.lists))
    changes: DefinitionChanges | None = commit.definition_changes
    if changes and changes.lists:
        changes = structs.replace(changes, lists=tuple(by_key[object_list.key] for object_list in changes.lists))
        commit = structs.replace(commit, definition_changes=changes)
    return commit


def read_merge_lists(store: ObjectStore, merge: Merge) -> tuple[ReadList, ...]:
    """Return the object lists of a merge with their contents; raise ObjectDamagedError or ManifestError."""
    found: list[ReadList] = []
    for object_list in merge.lists:
        content, _ = _read_list(store, merge, object_list)
        found.append(ReadList(**structs.asdict(object_list), content=compress_content(content)))
    return tuple(found)


def lost_list_error(one: LostList) -> ObjectDamagedError:
    """Return the error for a list that is missing or altered."""
    return ObjectDamagedError(key=one.key, kind=one.damage, node=one.node, detail=one.detail)


def _read_each(reading: _ListReading, commit: Commit) -> Iterator[ObjectList]:
    """Yield the commit's lists, holding the object keys of one node at a time in memory."""
    named = reading.named

    def read(object_list: ObjectList) -> tuple[ObjectList, list[str]]:
        try:
            content, listed = _read_list(reading.store, commit, object_list)
        except ObjectDamagedError as error:
            if not reading.keeps_lost:
                raise
            return LostList(**structs.asdict(object_list), damage=error.kind, detail=error.detail), []
        if replaced := reading.replaced.get(object_list.key):
            with checking(object_list.key):
                listed = without_replaced(listed, replaced)
            content = content_of(listed)
            object_list = _with_totals(object_list, listed.objects)
        read = ReadList(**structs.asdict(object_list), content=compress_content(content))
        return read, [key for stored in listed.objects for key in stored.keys]

    by_node = sorted(commit.object_lists, key=lambda object_list: object_list.node)
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        # `check_listed` ensures that the keys of different nodes differ.
        for _, lists in groupby(threads.map(read, by_node), lambda read_list: read_list[0].node):
            seen: set[str] = set()
            for object_list, keys in lists:
                twice = [key for key in keys if key in seen or key in named]
                later = max([commit.increment, *(named.get(key, 0) for key in twice)])
                with checking(commit_key(commit.snapshot, later)):
                    check_distinct("objects", "key", [*twice, *keys])
                seen.update(keys)
                yield object_list


def _with_totals(object_list: ObjectList, objects: Sequence[StoredObject]) -> ObjectList:
    """Return the entry with the totals of these objects; its size and digest remain those of the stored list."""
    rows: Counter[int] = Counter()
    for stored in objects:
        rows.update(stored.rows)
    total, dead = sum(stored.stored_bytes for stored in objects), sum(stored.dead is not None for stored in objects)
    return structs.replace(object_list, objects=len(objects), bytes=total, rows=dict(rows), dead=dead)


def _read_list(store: ObjectStore, commit: Commit | Merge, object_list: ObjectList) -> tuple[bytes, ListedObjects]:
    body = read_listed(store, object_list.node, object_list.key, (object_list.size, object_list.digest))
    content, _ = unseal(object_list.key, body)
    listed: ListedObjects = parse_document(object_list.key, content, ListedObjects)
    # A merge, and the beginning of its chain, which is a full snapshot with a number, have objects of any operation.
    is_merged = isinstance(commit, Merge) or (isinstance(commit, FullSnapshot) and commit.increment > 0)
    is_possible = is_merged or listed.operation in operations_of(commit, object_list.node)
    operation = listed.operation if is_possible else commit.operation
    check_about(object_list.key, (listed.snapshot, listed.operation), (commit.snapshot, operation))
    with checking(object_list.key):
        check_listed(commit, object_list, listed.objects, allows_any_operation=is_merged)
    return content, listed
