"""Taking away for good what a mark names: its slots, then its objects.

In this order, whatever the last line executed was: the intent; the mark, after which nothing of it is listed any more;
a look for leases, so that a restore that came first ends first; the slots, so that no node keeps WAL for it; commit
files, the newest first, so that never one is there whose objects are not; all other objects; the outcome. Without the
outcome the next command of the kind goes on from the mark, which holds all that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from fleet.progress import Progress
from snapshots.operations.leases import check_not_in_use
from snapshots.operations.operation import begin, readable_pending, reason_of, record_outcome
from snapshots.records.commits import snapshot_names
from snapshots.records.operation_records import Intent, operation_key
from snapshots.records.tombstones import Mark, put_mark
from storage.errors import SnapshotError
from storage.store import DeletionRefusedError, Listed, ObjectStore
from storage.storing import StoreAnswersLostError
from wal.slots.slots import chain_of_slot

DELETE, PRUNE = "delete", "prune"
DELETING_THREADS_MAX = 8
# What arrives while objects are taken away: puts that were under way when the mark was made.
ROUNDS_MAX = 3
COMMIT_FILE = re.compile(r"snapshots/[^/]+/(?:increments/(?P<number>\d+)|snapshot)(?:\.\d+)?\.json")


class NodeCleanup(Protocol):
    """What is done on the fleet's nodes, by whoever holds its lock."""

    def check_held(self) -> None:
        """Raise unless the fleet's lock is still held."""

    def drop_slot(self, slot: str, nodes: Iterable[str]) -> tuple[list[str], list[str]]:
        """Drop a slot; return the nodes that did not answer, and those that fleet.toml does not name any more."""

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Drop the publications where no slot that `is_ours` needs them; return `name on node`: dropped, and left."""


@dataclass(frozen=True, slots=True)
class Removal:
    """What is to be taken away: the kind of the operation, the mark that says so, and which objects."""

    kind: str
    mark: Mark
    find_objects: Callable[[ObjectStore, str], list[Listed]]


@dataclass(slots=True)
class RemovalResult:
    """What was taken away. `slots_left` are on nodes that did not answer, `refused` what the store keeps and why.

    `slots_unknown`: nodes that fleet.toml does not name any more, which may still have the slots.
    """

    mark: Mark
    operation: str
    objects: int = 0
    bytes: int = 0
    slots_left: list[str] = field(default_factory=list)
    slots_unknown: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    publications: list[str] = field(default_factory=list)
    publications_left: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether a repeat would find nothing left to do."""
        return not (self.slots_left or self.refused or self.publications_left)


def remove_recorded(
    store: ObjectStore, intent: Intent, removal: Removal, on_nodes: NodeCleanup, progress: Progress
) -> RemovalResult:
    """Take away what `removal` names; repeat it until it is done. The caller holds the fleet's lock.

    Raises SnapshotInUseError, UnreachableError; what was begun is then gone on with by a
    repeat. What the store refuses to delete is in the result, and the rest is gone.
    """
    begin(store, intent)
    try:
        on_nodes.check_held()
        mark = put_mark(store, removal.mark)
        # A restore that came between has its lease now, or finds the mark.
        check_not_in_use(store, mark.snapshot)
        removed = _remove(store, RemovalResult(mark, intent.id), removal, on_nodes, progress)
    except BaseException as error:
        with suppress(SnapshotError):
            # A mark whose answer was lost may still arrive.
            if not isinstance(error, StoreAnswersLostError) and not store.exists(removal.mark.key):
                record_outcome(store, intent, "failed", reason_of(error))
        raise
    if removed.is_done:
        for one in open_removals(store, mark.snapshot):
            record_outcome(store, one, "done", "" if one.id == intent.id else f"finished by {intent.id}")
    return removed


def open_removals(store: ObjectStore, snapshot: str | None = None) -> list[Intent]:
    """The deletions and prunings without an outcome, of one snapshot or of all."""
    return [one for one in readable_pending(store) if one.kind in (DELETE, PRUNE) and snapshot in (None, one.snapshot)]


def _remove(
    store: ObjectStore, removed: RemovalResult, removal: Removal, on_nodes: NodeCleanup, progress: Progress
) -> RemovalResult:
    mark = removed.mark
    progress.step("drop slots")
    for slot in mark.slots:
        left, unknown = on_nodes.drop_slot(slot, mark.nodes)
        removed.slots_left += [f"{slot} on {node}" for node in left]
        removed.slots_unknown += [f"{slot} on {node}" for node in unknown]
    if removal.kind == DELETE and not snapshot_names(store):
        # Whatever a listing says: a slot is a chain's that is being continued.
        def is_ours(slot: str) -> bool:
            return slot not in mark.slots and store.exists(operation_key(chain_of_slot(slot), "intent"))

        removed.publications, removed.publications_left = on_nodes.drop_publications(is_ours)
    seen: set[str] = set()
    for _ in range(ROUNDS_MAX):
        found = [one for one in removal.find_objects(store, mark.snapshot) if one.key not in seen]
        if not found:
            break
        seen |= {one.key for one in found}
        refused = remove_objects(store, [one.key for one in found], progress)
        removed.refused |= refused
        removed.objects += len(found) - len(refused)
        removed.bytes += sum(one.size for one in found if one.key not in refused)
    return removed


def objects_of(store: ObjectStore, snapshot: str) -> list[Listed]:
    """Everything below the snapshot's folder."""
    return store.inventory(f"snapshots/{snapshot}")


def remove_objects(store: ObjectStore, keys: Iterable[str], progress: Progress) -> dict[str, str]:
    """Delete objects, commit files first; return those that the store keeps, with its reason. Raises UnreachableError.

    Interrupted, it ends after the requests that are under way.
    """
    ordered = sorted(keys, key=_removal_order)
    progress.step("delete objects", total=len(ordered), unit="objects")

    def remove(key: str) -> tuple[str, str]:
        try:
            store.delete(key)
        except DeletionRefusedError as error:
            return key, error.message
        progress.advance(1)
        return key, ""

    commits = [key for key in ordered if COMMIT_FILE.fullmatch(key)]
    answers = [remove(key) for key in commits]
    threads = ThreadPoolExecutor(DELETING_THREADS_MAX)
    try:
        answers += threads.map(remove, ordered[len(commits) :])
    finally:
        threads.shutdown(cancel_futures=True)
    return {key: why for key, why in answers if why}


def _removal_order(key: str) -> tuple[bool, int, str]:
    """Commit files before all else, the newest increment first and the full snapshot last."""
    found = COMMIT_FILE.fullmatch(key)
    return (found is None, -int(found["number"] or 0) if found else 0, key)
