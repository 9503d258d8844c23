"""What is gone for good: deleted snapshots, and chains whose increments were taken away.

A mark is created before the first object goes, and stays for ever. So what is half deleted is never listed, and a name
is never used again: whatever arrives late under it, a put whose answer was lost or a process that slept, is garbage.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from snapshots.documents import ManifestError, check_schema, entries, read_sealed, sealed, understood
from snapshots.value_types import check_types
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find

DELETED_SCHEMA = "cutline/deleted/1"
ONLY_FULL_SCHEMA = "cutline/only-full/1"
SCHEMAS = (DELETED_SCHEMA, ONLY_FULL_SCHEMA)


class SnapshotDeletedError(RefusedError):
    """The snapshot of that name was deleted, or is being deleted."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What is gone, and all that taking it away needs: the chain's slots and the nodes that may have them.

    `chain` and `points` (increment, created_at) are empty where the commits could not be read. `at` is RFC 3339 UTC,
    `by` the label of the command (fleet.label).
    """

    snapshot: str
    operation: str
    at: str
    by: str
    chain: str
    slots: tuple[str, ...]
    nodes: tuple[str, ...]
    points: tuple[tuple[int, str], ...]
    objects: int
    bytes: int


def tombstone_key(name: str) -> str:
    """The key of the mark that a snapshot is deleted."""
    return f"deleted/{name}.json"


def only_full_key(name: str) -> str:
    """The key of the mark that a chain's increments were taken away."""
    return f"snapshots/{name}/only-full.json"


def is_deleted(store: ObjectStore, name: str) -> bool:
    """Whether the name belongs to a deleted snapshot."""
    return store.exists(tombstone_key(name))


def is_only_full(store: ObjectStore, name: str) -> bool:
    """Whether the chain's increments were taken away."""
    return store.exists(only_full_key(name))


def check_not_deleted(store: ObjectStore, name: str) -> None:
    """Raise SnapshotDeletedError if the snapshot was deleted."""
    try:
        document = read_sealed(store, tombstone_key(name))
    except ObjectMissingError:
        return
    except ManifestError:
        document = {}
    raise SnapshotDeletedError(
        f"snapshot {name} was deleted" + (f" at {document['at']}" if "at" in document else ""),
        hint="names are never used again: choose another one, such as 'nightly-{date}'; see: snapshot list",
        details={"snapshot": name, "object": tombstone_key(name)},
    )


def put_mark(store: ObjectStore, key: str, schema: str, mark: Mark) -> Mark:
    """Create the mark, and return the one that is there: whoever did so first has said it.

    One that can't be read marks all the same; then `mark` is returned. Raises StoreAnswersLostError if nobody can tell
    whether there is one: it may still arrive.
    """
    document = asdict(mark) | {"points": [{"increment": number, "created_at": at} for number, at in mark.points]}
    with suppress(ObjectExistsError):
        create_or_find(store, key, sealed({"schema": schema, **document}))
    try:
        return read_mark(store, key)
    except ManifestError:
        return mark


def read_mark(store: ObjectStore, key: str) -> Mark:
    """Read a mark; raise ObjectMissingError, ManifestError."""
    document = read_sealed(store, key)
    with understood(key, "mark of a deletion"):
        mark = _mark(document)
        check_types(mark, Mark)
        own = {DELETED_SCHEMA: tombstone_key, ONLY_FULL_SCHEMA: only_full_key}[check_schema(document, *SCHEMAS)]
        if own(mark.snapshot) != key:
            raise ValueError(f"it is of {mark.snapshot}")
    return mark


def _mark(document: Mapping[str, Any]) -> Mark:
    return Mark(
        snapshot=document["snapshot"],
        operation=document["operation"],
        at=document["at"],
        by=document["by"],
        chain=document["chain"],
        slots=tuple(entries(document["slots"])),
        nodes=tuple(entries(document["nodes"])),
        points=tuple((point["increment"], point["created_at"]) for point in entries(document["points"])),
        objects=document["objects"],
        bytes=document["bytes"],
    )
