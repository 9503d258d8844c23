"""What is gone for good: deleted snapshots, and chains whose increments were pruned.

A mark is created before the first object goes, and stays for ever. So what is half deleted is never listed, and a name
is never used again: whatever arrives late under it, a put whose answer was lost or a process that slept, is garbage.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from fleet.record import Count, Record, Time
from snapshots.records.documents import ManifestError, check_about, read_sealed, seal
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find

DELETED: Literal["cutline/deleted/1"] = "cutline/deleted/1"
ONLY_FULL: Literal["cutline/only-full/1"] = "cutline/only-full/1"


class SnapshotDeletedError(RefusedError):
    """The snapshot of that name was deleted, or is being deleted."""


class RestorePoint(Record, frozen=True):
    """A full snapshot (increment 0) or an increment that was there."""

    increment: Count
    created_at: Time


class Mark(Record, frozen=True):
    """What is gone, and all that removing it needs: the chain's slots and the nodes that may have them.

    `schema` says whether the snapshot is deleted, or its increments pruned. `chain` and `points` are empty where the
    commits could not be read. `by` is the label of the command (fleet.label), `bytes` what was taken away.
    """

    schema: Literal["cutline/deleted/1", "cutline/only-full/1"]
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

    @property
    def key(self) -> str:
        """Where the mark is."""
        return tombstone_key(self.snapshot) if self.schema == DELETED else only_full_key(self.snapshot)


def tombstone_key(name: str) -> str:
    """The key of the mark that a snapshot is deleted."""
    return f"deleted/{name}.json"


def only_full_key(name: str) -> str:
    """The key of the mark that a chain's increments were pruned."""
    return f"snapshots/{name}/only-full.json"


def is_deleted(store: ObjectStore, name: str) -> bool:
    """Whether the name belongs to a deleted snapshot."""
    return store.exists(tombstone_key(name))


def is_only_full(store: ObjectStore, name: str) -> bool:
    """Whether the chain's increments were pruned."""
    return store.exists(only_full_key(name))


def check_not_deleted(store: ObjectStore, name: str) -> None:
    """Raise SnapshotDeletedError if the snapshot was deleted."""
    try:
        when = f" at {read_mark(store, tombstone_key(name)).at}"
    except ObjectMissingError:
        return
    except ManifestError:
        when = ""
    raise SnapshotDeletedError(
        f"snapshot {name} was deleted{when}",
        hint="names are never used again: choose another one, such as 'nightly-{date}'; see: snapshot list",
        details={"snapshot": name, "object": tombstone_key(name)},
    )


def put_mark(store: ObjectStore, mark: Mark) -> Mark:
    """Create the mark, and return the one that is there: whoever did so first has said it.

    One that can't be read marks all the same; then `mark` is returned. Raises StoreAnswersLostError if nobody can tell
    whether there is one: it may still arrive.
    """
    with suppress(ObjectExistsError):
        create_or_find(store, mark.key, seal(mark))
    try:
        return read_mark(store, mark.key)
    except ManifestError:
        return mark


def read_mark(store: ObjectStore, key: str) -> Mark:
    """Read a mark; raise ObjectMissingError, ManifestError."""
    mark: Mark = read_sealed(store, key, Mark)
    check_about(key, mark.key, key)
    return mark
