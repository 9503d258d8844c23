"""Marks of permanent removals: the tombstones of deleted snapshots, and the marks of pruned increments.

A mark is created before the first object is deleted, and is never removed. So a half-deleted snapshot is never listed,
and its name is never used again. Objects that arrive late under that name, such as a put whose answer was lost or the
writes of a suspended process, are garbage.

A mark is trusted only if every byte is as it was written. No other object in its place removes anything or ends a
chain. An operator must look at such an object, so commands that depend on the mark raise ManifestError. Commands that
only read commits do not depend on the mark of pruned increments: if it is damaged, they see the remaining increments.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from msgspec import field

from cutline.fleet.record import Count, Record, Time
from cutline.snapshots.records.documents import NEWER_HINT, ManifestError, check_about, read_sealed, seal
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

DAMAGED_HINT = "if nobody {done}, Cutline did not write this object: remove it from the store; {otherwise}"
GONE = "it can't be read any more; to see which snapshots there are: snapshot list"
ANOTHER_NAME = "choose a new name, such as 'nightly-{date}', because that of a deleted snapshot stays taken"
DELETED: Literal["cutline/deleted/1"] = "cutline/deleted/1"
ONLY_FULL: Literal["cutline/only-full/1"] = "cutline/only-full/1"


class SnapshotDeletedError(RefusedError):
    """The snapshot was deleted, or is being deleted."""


class RestorePoint(Record, frozen=True):
    """A restore point that was removed: a full snapshot (increment 0) or an increment.

    `created_at` is the time when its command started, and `cut_at` is the time of its cut.
    """

    increment: Count
    created_at: Time
    cut_at: Time


class Mark(Record, frozen=True):
    """The subject of a removal, and the data needed to resume it: the slots, and the nodes on which they may exist.

    `format`, stored as `schema`, says whether the snapshot was deleted or its increments pruned. `chain` and `points`
    are empty if the commits could not be read. `by` is the label of the command (fleet.own_process); `objects` and
    `bytes` count the planned deletions. `servers` holds the nodes' system identifiers at that time, if known: other
    servers may have replaced them since.
    """

    format: Literal["cutline/deleted/1", "cutline/only-full/1"] = field(name="schema")
    snapshot: str
    operation: str
    at: Time
    by: str
    chain: str
    slots: tuple[str, ...]
    nodes: tuple[str, ...]
    points: tuple[RestorePoint, ...]
    objects: Count
    bytes: Count
    servers: dict[str, str] = field(default_factory=dict)

    @property
    def nodes_on_servers(self) -> dict[str, str]:
        """The nodes, each with its system identifier at that time, or "" if unknown."""
        return {node: self.servers.get(node, "") for node in self.nodes}

    @property
    def key(self) -> str:
        """The key of the mark."""
        return tombstone_key(self.snapshot) if self.format == DELETED else only_full_key(self.snapshot)


def tombstone_key(name: str) -> str:
    """Return the key of a deleted snapshot's tombstone."""
    return f"deleted/{name}.json"


def only_full_key(name: str) -> str:
    """Return the key of the mark recording that a snapshot's increments were pruned."""
    return f"snapshots/{name}/only-full.json"


def is_deleted(store: ObjectStore, name: str) -> bool:
    """Whether the snapshot has a tombstone; raise ManifestError if another document is in its place."""
    return _is_marked(store, tombstone_key(name))


def is_only_full(store: ObjectStore, name: str) -> bool:
    """Whether the snapshot's increments were pruned; raise ManifestError if another document is in the mark's place."""
    return _is_marked(store, only_full_key(name))


def is_known_only_full(store: ObjectStore, name: str) -> bool:
    """Whether the snapshot's increments were pruned; False if another document is in the mark's place."""
    with suppress(ManifestError):
        return is_only_full(store, name)
    return False


def _is_marked(store: ObjectStore, key: str) -> bool:
    try:
        read_mark(store, key)
    except ObjectMissingError:
        return False
    return True


def check_not_deleted(store: ObjectStore, name: str, hint: str = GONE) -> None:
    """Raise SnapshotDeletedError if the snapshot was deleted, or ManifestError if its tombstone can't be read.

    The `hint` of a create is ANOTHER_NAME.
    """
    try:
        mark = read_mark(store, tombstone_key(name))
    except ObjectMissingError:
        return
    raise SnapshotDeletedError(
        f"snapshot {name} was deleted at {mark.at}",
        hint=hint,
        details={"snapshot": name, "object": tombstone_key(name)},
    )


def _damaged_hint(key: str) -> str:
    name = key.split("/")[1].removesuffix(".json")
    if key == tombstone_key(name):
        otherwise = f"otherwise delete the rest of the snapshot: snapshot delete {name} --force"
        return DAMAGED_HINT.format(done=f"deleted snapshot {name}", otherwise=otherwise)
    otherwise = "otherwise put the object back from a copy of the store"
    return DAMAGED_HINT.format(done=f"pruned snapshot {name}", otherwise=otherwise)


def put_mark(store: ObjectStore, mark: Mark, *, force: bool = False) -> Mark:
    """Create the mark unless it exists, and return the mark in the store.

    If the document in its place can't be read, raises ManifestError or, with `force`, returns `mark`. Raises
    StoreAnswersLostError if it is unknown whether the mark was stored: it may still arrive.
    """
    with suppress(ObjectExistsError):
        create_or_find(store, mark.key, seal(mark))
    try:
        return read_mark(store, mark.key)
    except ManifestError:
        if not force:
            raise
        return mark


def read_mark(store: ObjectStore, key: str) -> Mark:
    """Read a mark; raise ObjectMissingError or ManifestError."""
    try:
        mark: Mark = read_sealed(store, key, Mark)
        check_about(key, mark.key, key)
    except ManifestError as error:
        if NEWER_HINT not in error.hint:
            error.hint = _damaged_hint(key)
        raise
    return mark
