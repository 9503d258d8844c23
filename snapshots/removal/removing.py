"""Permanently remove the slots, and then the objects, that a mark names.

The order makes an interruption at any point safe:

1. Store the intent.
2. Store the mark. From here on, no listing shows the snapshot or increments that the mark names.
3. Check for leases: a running restore must end first.
4. Drop the slots, so that no node retains WAL for them.
5. Delete the commits, newest first, so that no commit outlives its objects.
6. Delete all other objects.
7. Store the outcome.

Between the intent and the mark, the pins are read again (pinning.py).

If there is no outcome, the next command of the same kind resumes from the mark, which contains everything that it
needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from msgspec import Struct, field

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Progress, Reading
from cutline.snapshots.operations.leases import check_not_in_use, read_lease
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import (
    OutcomeDetails,
    begin,
    code_of,
    current_time,
    reason_of,
    record_outcome,
)
from cutline.snapshots.operations.slot_guard import read_slot_owners
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.operation_records import (
    DELETE,
    PRUNE,
    Failure,
    Intent,
    operation_key,
    write_operation_record,
)
from cutline.snapshots.records.proven_chains import snapshot_names
from cutline.snapshots.records.tombstones import DELETED, ONLY_FULL, Mark, RestorePoint, put_mark
from cutline.snapshots.removal.node_cleanup import ChainSlots, NodeCleanup
from cutline.snapshots.removal.pinning import check_not_pinned
from cutline.snapshots.removal.survey import SizeTotal, SurveyedSnapshot
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, SnapshotError, UnreachableError
from cutline.storage.store import DeletionRefusedError, Listed, ObjectStore
from cutline.storage.storing import StoreAnswersLostError
from cutline.wal.drain.slots import chain_of_slot

DELETING_THREADS_MAX = 8
# Search for objects this many times, because puts that were in progress when the mark was stored may arrive late.
ROUNDS_MAX = 3
COMMIT_FILE = re.compile(r"snapshots/[^/]+/(?:increments/(?P<number>\d+)|snapshot)(?:\.\d+)?\.json")


class Removal(Struct, frozen=True):
    """A removal: the kind of the operation, its mark, and a function that finds its objects.

    With `force`, the removal continues even if restore points are pinned, or if the mark can't be stored because an
    unreadable object is stored under its key.
    """

    kind: str
    mark: Mark
    find_objects: Callable[[ObjectStore, str], list[Listed]]
    force: bool = False


class RemovalResult(Struct):
    """The result of a removal.

    `slots_left` are slots on nodes that did not answer. `slots_unknown` are slots that may be left on servers that
    fleet.toml no longer names. `slots_foreign` are slots in the mark that no create of this snapshot is known to have
    made. `refused` holds, by key, the reasons why the store refused to delete objects.
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
        """Whether nothing is left for a later run."""
        return not (self.slots_left or self.refused or self.publications_left)


def remove_recorded(
    store: ObjectStore, intent: Intent, removal: Removal, nodes: NodeCleanup, progress: Progress
) -> RemovalResult:
    """Run the removal, and record it as an operation. The caller holds the fleet's lock.

    Raises PinnedError before the mark is stored, and SnapshotInUseError, ManifestError, UnreachableError; a later run
    then resumes the removal. If the store refuses to delete an object, the other objects are deleted and the result
    contains the refusal.
    """
    begin(store, intent)
    try:
        progress.tell(Reading(0, operation=intent.id))
        # Once the mark is stored, the removal can only be completed.
        if not removal.force and not store.exists(removal.mark.key):
            check_not_pinned(store, removal.mark.snapshot, removal.kind)
        # If the lock is lost, another command may have settled the intent, so that a pin did not see it.
        nodes.check_held(intent)
        if removal.kind == PRUNE and not store.exists(removal.mark.key):
            _check_whole(store, removal.mark.snapshot)
        mark = put_mark(store, removal.mark, force=removal.force)
        # A restore that started in the meantime has either stored its lease by now or will find the mark.
        check_not_in_use(store, mark.snapshot)
        removed = _remove(store, RemovalResult(mark, intent.id), removal, nodes, progress)
    except BaseException as error:
        progress.ending()
        with suppress(SnapshotError):
            # If the store's answer was lost when the mark was put, the mark may still arrive.
            if not isinstance(error, StoreAnswersLostError) and not store.exists(removal.mark.key):
                record_outcome(store, intent, "failed", reason_of(error), OutcomeDetails(code_of(error)))
        raise
    if removed.is_done:
        details = OutcomeDetails(0, {"objects": removed.objects, "bytes": removed.bytes})
        for one in open_removals(store, mark.snapshot):
            reason = "" if one.id == intent.id else f"finished by {intent.id}"
            record_outcome(store, one, "done", reason, None if reason else details)
    elif removed.slots_left or removed.publications_left:
        reason = "slots or publications are left on nodes that can't be reached"
        _record_unfinished(store, intent, reason, UnreachableError.exit_code)
    else:
        leave_unfinished(store, intent, removed.refused)
    return removed


def leave_unfinished(store: ObjectStore, intent: Intent, refused: Collection[str]) -> None:
    """Record that the store refused to delete the objects with the keys `refused`; the removal's mark is stored."""
    reason = f"the store refused to delete {len(refused)} object{'s'[: len(refused) - 1]}"
    _record_unfinished(store, intent, reason, RefusedError.exit_code)


def _record_unfinished(store: ObjectStore, intent: Intent, reason: str, code: int) -> None:
    """Record why the removal has not finished. Of its repetitions that have ended, only the last stays open.

    In a bucket with Object Lock, a daily prune is refused for weeks. Two commands may do so at the same time: each
    stores its own record first, so the one that looks last sees both.
    """
    write_operation_record(store, "failure", Failure(intent.id, reason, code, current_time()))
    ended = [
        removal
        for removal in open_removals(store, intent.snapshot)
        if (removal.kind, removal.increment) == (intent.kind, intent.increment) and _has_ended(store, removal)
    ]
    *earlier, last = sorted(ended, key=lambda removal: (removal.began_at, removal.id)) or [intent]
    for removal in earlier:
        record_outcome(store, removal, "failed", f"continued by {last.id}")


def _has_ended(store: ObjectStore, removal: Intent) -> bool:
    """Whether the removal can't finish any more, according to a command of the same kind that holds the fleet's lock.

    What gives up the beginning of a chain needs no lock, so it may be running until its lease has expired.
    """
    return (
        not removal.is_giving_up
        or store.exists(operation_key(removal.id, "failure"))
        or not read_lease(store, removal).is_running(utc_now())
    )


def _check_whole(store: ObjectStore, snapshot: str) -> None:
    """Raise IncrementsNeededError if the full snapshot was given up, or may be: then the increments must stay."""
    giving_up = [one.id for one in open_removals(store, snapshot) if one.is_giving_up]
    if giving_up or first_increment(store, snapshot):
        raise IncrementsNeededError(
            f"the increments of {snapshot} were not removed: restore points before one of its merges were given up"
            " meanwhile, so the rest needs the increments",
            hint="repeat the command: it makes a new plan",
            details={"snapshot": snapshot, "operation": giving_up[0] if giving_up else None},
        )


def mark_of(
    kind: str, surveyed: SurveyedSnapshot, held: ChainSlots, points: tuple[RestorePoint, ...], removed: SizeTotal
) -> Mark:
    """Return the mark of a deletion (DELETE) or pruning (PRUNE), without the id of its operation.

    `points` are the restore points that it removes, and `removed` counts its objects. It contains the
    servers on which the copies of the nodes began.
    """
    return Mark(
        DELETED if kind == DELETE else ONLY_FULL,
        surveyed.name,
        "",
        current_time(),
        own_label(kind, surveyed.name),
        held.chain,
        held.slots,
        held.nodes,
        points,
        removed.objects,
        removed.size_bytes,
        surveyed.chain.listed_system_identifiers if surveyed.chain else {},
    )


def open_removals(store: ObjectStore, snapshot: str | None = None) -> list[Intent]:
    """Return the deletions and prunings without an outcome, of `snapshot` or of all snapshots."""
    return [
        open_intent
        for open_intent in read_open_intents(store, skips_unreadable=True)
        if open_intent.kind in (DELETE, PRUNE) and snapshot in (None, open_intent.snapshot)
    ]


def slots_to_drop(store: ObjectStore, mark: Mark) -> list[str]:
    """Return the slots named in the mark that a create of the snapshot is known to have made."""
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
        # A listing may miss a new chain. A slot with an intent in this store proves that the publications are needed.
        def is_ours(slot: str) -> bool:
            return slot not in mark.slots and store.exists(operation_key(chain_of_slot(slot), "intent"))

        removed.publications, removed.publications_left = nodes.drop_publications(is_ours)
    seen: set[str] = set()
    for _ in range(ROUNDS_MAX):
        objects = [
            stored_object
            for stored_object in removal.find_objects(store, mark.snapshot)
            if stored_object.key not in seen
        ]
        if not objects:
            break
        seen |= {stored_object.key for stored_object in objects}
        refused = remove_objects(store, [stored_object.key for stored_object in objects], progress)
        removed.refused |= refused
        removed.objects += len(objects) - len(refused)
        removed.bytes += sum(stored_object.size for stored_object in objects if stored_object.key not in refused)
    return removed


def objects_of(store: ObjectStore, snapshot: str) -> list[Listed]:
    """Return all objects in the snapshot's folder."""
    return store.inventory(f"snapshots/{snapshot}")


def remove_objects(store: ObjectStore, keys: Iterable[str], progress: Progress) -> dict[str, str]:
    """Delete objects, commits first; return, by key, the store's reasons for refusals. Raises UnreachableError.

    If interrupted, it stops when the requests in progress have ended.
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
    is_data: bool
    newest_first: int
    key: str


def _removal_order(key: str) -> _RemovalOrder:
    """Order commits before all other objects, the newest increment first and the full snapshot last."""
    commit = COMMIT_FILE.fullmatch(key)
    return _RemovalOrder(commit is None, -int(commit["number"] or 0) if commit else 0, key)


class IncrementsNeededError(BusyError):
    """The full snapshot of a chain was given up for a merge while its increments were to be removed."""


class RemovalRun(Struct, frozen=True):
    """A running `delete` or `prune` that holds the fleet's lock."""

    fleet: Fleet
    store: ObjectStore
    nodes: NodeCleanup
    progress: Progress
    force: bool = False
