"""Remove permanently what a mark names: its slots, then its objects.

The order makes an interruption at any point safe:

1. store the intent;
2. store the mark: from here on no listing shows what it names;
3. check for leases: a running restore ends first;
4. drop the slots, so that no node retains WAL for them;
5. delete the commits, the newest first, so that no commit outlives its objects;
6. delete all other objects;
7. store the outcome.

Without an outcome, the next command of the same kind resumes from the mark, which holds all that it needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from cutline.fleet.progress import Progress, Reading
from cutline.snapshots.operations.leases import check_not_in_use
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import OutcomeDetails, begin, code_of, reason_of, record_outcome
from cutline.snapshots.operations.slot_guard import read_slot_owners
from cutline.snapshots.records.chains import snapshot_names
from cutline.snapshots.records.operation_records import Intent, operation_key
from cutline.snapshots.records.tombstones import Mark, put_mark
from cutline.storage.errors import SnapshotError
from cutline.storage.store import DeletionRefusedError, Listed, ObjectStore
from cutline.storage.storing import StoreAnswersLostError
from cutline.wal.slots.slots import chain_of_slot

DELETE, PRUNE = "delete", "prune"
DELETING_THREADS_MAX = 8
# How often to look again for objects that arrive late, from puts that were in progress when the mark was stored.
ROUNDS_MAX = 3
COMMIT_FILE = re.compile(r"snapshots/[^/]+/(?:increments/(?P<number>\d+)|snapshot)(?:\.\d+)?\.json")


class NodeCleanup(Protocol):
    """What a removal does on the nodes. The implementation holds the fleet's lock."""

    def check_held(self) -> None:
        """Raise unless the fleet's lock is still held."""

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Drop a slot on nodes, given with the system identifiers that they had when it was made.

        Return the nodes that did not answer, and the servers that fleet.toml no longer names.
        """

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Drop the publications on nodes that have no slot for which `is_ours` is true.

        Return those dropped and those left, as `name on node`.
        """


@dataclass(frozen=True, slots=True)
class Removal:
    """What to remove: the kind of the operation, its mark, and how to find its objects.

    `force`: something that can't be read is in the place of the mark, and the removal goes on nevertheless.
    """

    kind: str
    mark: Mark
    find_objects: Callable[[ObjectStore, str], list[Listed]]
    force: bool = False


@dataclass(slots=True)
class RemovalResult:
    """What was removed.

    `slots_left` are slots on nodes that did not answer, `slots_unknown` slots that may be left on servers that
    fleet.toml no longer names, `slots_foreign` slots in the mark that no create of this snapshot is known to have made.
    `refused` gives, by key, why the store refused to delete an object.
    """

    mark: Mark
    operation: str
    objects: int = 0
    bytes: int = 0
    slots_left: list[str] = field(default_factory=list)
    slots_unknown: list[str] = field(default_factory=list)
    slots_foreign: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    publications: list[str] = field(default_factory=list)
    publications_left: list[str] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left for another run."""
        return not (self.slots_left or self.refused or self.publications_left)


def remove_recorded(
    store: ObjectStore, intent: Intent, removal: Removal, nodes: NodeCleanup, progress: Progress
) -> RemovalResult:
    """Remove what `removal` names, and record it as an operation. The caller holds the fleet's lock.

    Raises SnapshotInUseError, ManifestError, UnreachableError; another run then resumes the removal. If the store
    refuses to delete an object, the result says so, and the other objects are deleted.
    """
    begin(store, intent)
    try:
        progress.tell(Reading(0, operation=intent.id))
        nodes.check_held()
        mark = put_mark(store, removal.mark, force=removal.force)
        # A restore that began meanwhile either has its lease by now, or finds the mark.
        check_not_in_use(store, mark.snapshot)
        removed = _remove(store, RemovalResult(mark, intent.id), removal, nodes, progress)
    except BaseException as error:
        progress.ending()
        with suppress(SnapshotError):
            # If the store's answer to the mark was lost, the mark may still arrive.
            if not isinstance(error, StoreAnswersLostError) and not store.exists(removal.mark.key):
                record_outcome(store, intent, "failed", reason_of(error), OutcomeDetails(code_of(error)))
        raise
    if removed.is_done:
        details = OutcomeDetails(0, {"objects": removed.objects, "bytes": removed.bytes})
        for one in open_removals(store, mark.snapshot):
            reason = "" if one.id == intent.id else f"finished by {intent.id}"
            record_outcome(store, one, "done", reason, None if reason else details)
    return removed


def open_removals(store: ObjectStore, snapshot: str | None = None) -> list[Intent]:
    """The deletions and prunings without an outcome, of `snapshot` or of all."""
    return [
        one
        for one in read_open_intents(store, skips_unreadable=True)
        if one.kind in (DELETE, PRUNE) and snapshot in (None, one.snapshot)
    ]


def slots_to_drop(store: ObjectStore, mark: Mark) -> list[str]:
    """The slots that the mark names and that a create of its snapshot is known to have made."""
    owners = read_slot_owners(store)
    return [
        slot for slot in mark.slots if (owner := owners.owner_of(slot)) is not None and owner.snapshot == mark.snapshot
    ]


def _remove(
    store: ObjectStore, removed: RemovalResult, removal: Removal, nodes: NodeCleanup, progress: Progress
) -> RemovalResult:
    mark = removed.mark
    progress.step("drop slots")
    slots = slots_to_drop(store, mark)
    removed.slots_foreign += [slot for slot in mark.slots if slot not in slots]
    for slot in slots:
        left, unknown = nodes.drop_slot(slot, mark.nodes_on_servers)
        removed.slots_left += [f"{slot} on {node}" for node in left]
        removed.slots_unknown += [f"{slot} on {node}" for node in unknown]
    if removal.kind == DELETE and not snapshot_names(store):
        # A listing may miss a new chain; a slot with an intent in this store proves that the publications are needed.
        def is_ours(slot: str) -> bool:
            return slot not in mark.slots and store.exists(operation_key(chain_of_slot(slot), "intent"))

        removed.publications, removed.publications_left = nodes.drop_publications(is_ours)
    seen: set[str] = set()
    for _ in range(ROUNDS_MAX):
        objects = [one for one in removal.find_objects(store, mark.snapshot) if one.key not in seen]
        if not objects:
            break
        seen |= {one.key for one in objects}
        refused = remove_objects(store, [one.key for one in objects], progress)
        removed.refused |= refused
        removed.objects += len(objects) - len(refused)
        removed.bytes += sum(one.size for one in objects if one.key not in refused)
    return removed


def objects_of(store: ObjectStore, snapshot: str) -> list[Listed]:
    """All objects in the snapshot's folder."""
    return store.inventory(f"snapshots/{snapshot}")


def remove_objects(store: ObjectStore, keys: Iterable[str], progress: Progress) -> dict[str, str]:
    """Delete objects, commits first; return, by key, why the store refused some. Raises UnreachableError.

    If interrupted, it ends after the requests that are in progress.
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


class _RemovalOrder(NamedTuple):
    """The sort key of objects to delete."""

    is_data: bool
    newest_first: int
    key: str


def _removal_order(key: str) -> _RemovalOrder:
    """Order commits before all else, the newest increment first and the full snapshot last."""
    commit = COMMIT_FILE.fullmatch(key)
    return _RemovalOrder(commit is None, -int(commit["number"] or 0) if commit else 0, key)
