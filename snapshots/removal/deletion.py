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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import psycopg
from msgspec import structs

from cutline.fleet.config import Fleet
from cutline.fleet.messages import without_node
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Progress, Reading
from cutline.nodes.clocks import check_clocks, note_clocks
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.lock import FleetLock
from cutline.nodes.publications import EventTriggerError, drop_publications
from cutline.nodes.server_errors import shorten_message
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.ended_operations import list_ended, read_batches
from cutline.snapshots.operations.leases import Lease, check_not_in_use, open_leases
from cutline.snapshots.operations.majority import read_recorded_servers
from cutline.snapshots.operations.open_operations import document_names, read_open_intents
from cutline.snapshots.operations.operation import (
    OutcomeDetails,
    begin,
    code_of,
    current_time,
    exclusive,
    new_operation,
    reason_of,
    record_outcome,
)
from cutline.snapshots.operations.retired_nodes import with_retired
from cutline.snapshots.operations.settling import settle_operations, settle_removals
from cutline.snapshots.operations.slot_guard import read_slot_owners
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.operation_records import (
    DELETE,
    DONE,
    PRUNE,
    Intent,
    operation_key,
    read_intent,
    read_outcome,
)
from cutline.snapshots.records.pins import StoredPin, pins_in_force
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_name,
    find_place,
    listed_numbers,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import StoreIdentity, is_copy, read_identity
from cutline.snapshots.records.tombstones import DELETED, Mark, is_deleted, put_mark, read_mark, tombstone_key
from cutline.snapshots.removal.pinning import check_not_pinned, pinned_error
from cutline.snapshots.removal.survey import SizeTotal, SurveyedSnapshot, first_restorable, survey_snapshot
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, SnapshotError
from cutline.storage.store import DeletionRefusedError, Listed, ObjectMissingError, ObjectStore
from cutline.storage.storing import StoreAnswersLostError
from cutline.wal.drain.slots import chain_of_slot, drop_slots, list_own_slots, slot_name

DELETING_THREADS_MAX = 8
# Search for objects this many times, because puts that were in progress when the mark was stored may arrive late.
ROUNDS_MAX = 3
COMMIT_FILE = re.compile(r"snapshots/[^/]+/(?:increments/(?P<number>\d+)|snapshot)(?:\.\d+)?\.json")


class NodeCleanup(Protocol):
    """The actions that a removal takes on the nodes. The implementation holds the fleet's lock."""

    def check_held(self, operation: Intent) -> None:
        """Raise unless the fleet's lock is still held, so that no other command has settled the operation."""

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Drop a slot on `nodes`, which maps nodes to their system identifiers at the time when the slot was created.

        Return the nodes that did not answer, and the servers that fleet.toml no longer names.
        """

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """Drop the publications on nodes that have no slot for which `is_ours` is true.

        Return the dropped and the remaining publications, as `name on node`.
        """


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal: the kind of the operation, its mark, and a function that finds its objects.

    With `force`, the removal continues even if restore points are pinned, or if the mark can't be stored because an
    unreadable object is stored under its key.
    """

    kind: str
    mark: Mark
    find_objects: Callable[[ObjectStore, str], list[Listed]]
    force: bool = False


@dataclass(slots=True)
class RemovalResult:
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
    return removed


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


class LastSnapshotError(RefusedError):
    """The snapshot is the last restorable snapshot in the store."""


class OverdueError(BusyError):
    """The process was suspended for so long that another command may have settled its operation."""


def overdue_error(operation: Intent) -> OverdueError:
    """Return the error for a removal that another command has settled, or may have settled."""
    return OverdueError(
        f"operation {operation.id} was suspended for too long, and has removed nothing",
        hint="repeat the command",
        details={"snapshot": operation.snapshot, "operation": operation.id},
    )


class IncrementsNeededError(BusyError):
    """The full snapshot of a chain was given up for a merge while its increments were to be removed."""


class SnapshotUnreadableError(RefusedError):
    """The snapshot can't be read, so the restore points that would be lost are unknown."""


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """The plan for a deletion.

    `surveyed` is None if the plan resumes an earlier deletion, whose mark is `mark`. `others` are the snapshots that
    remain. `is_of_copy`: the store is a copy, so no node has slots or publications for it. `left_behind` maps nodes of
    the chain to their servers that fleet.toml no longer names. `is_last_restorable`: none of the others can be
    restored, but this snapshot can. `pins` are the pins in force.
    """

    mark: Mark
    surveyed: SurveyedSnapshot | None
    others: tuple[str, ...]
    left_behind: Mapping[str, str]
    leases: tuple[Lease, ...] = ()
    is_last_restorable: bool = False
    pins: tuple[StoredPin, ...] = ()
    is_of_copy: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier deletion has already stored its mark."""
        return self.surveyed is None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that nodes may still have; if the chain has ended, the slot in the mark was already dropped."""
        return self.mark.slots if self.surveyed is None or self.surveyed.is_continuable else ()

    @property
    def drops_publications(self) -> bool:
        """Whether the publications will be dropped too, because no other snapshot needs them."""
        return not self.others and not self.is_of_copy


def plan_deletion(store: ObjectStore, fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan the deletion of the snapshot; raise unless it may be deleted."""
    others = tuple(snapshot_name for snapshot_name in snapshot_names(store) if snapshot_name != name)
    leases = tuple(lease for lease in open_leases(store, name) if lease.is_running(utc_now()))
    if _has_tombstone(store, name, force=force):
        mark = unfinished_mark(store, fleet, name)
        return DeletionPlan(
            mark, None, others, slots_left_behind(store, fleet, mark), leases, is_of_copy=is_copy(store)
        )
    surveyed = _survey(store, name, force=force)
    matters = surveyed.restorable > 0 or bool(surveyed.unreadable)
    is_only = matters and first_restorable(store, reversed(others)) is None
    pins = pins_in_force(store, name, utc_now())
    if not force:
        _check_deletable(surveyed, others, is_only=is_only)
        if pins:
            raise pinned_error(name, pins[0])
    mark, is_last = tombstone_of(store, fleet, surveyed), is_only and surveyed.restorable > 0
    left_behind = slots_left_behind(store, fleet, mark)
    return DeletionPlan(mark, surveyed, others, left_behind, leases, is_last, pins, is_copy(store))


def _survey(store: ObjectStore, name: str, *, force: bool) -> SurveyedSnapshot:
    """Survey the snapshot; raise SnapshotMissingError if it is missing.

    With `force`, a record that it existed is enough.
    """
    try:
        exists = find_place(store, name, 0).commit is not None or bool(listed_numbers(store, name))
    except ManifestError:
        exists = True
    if exists:
        return survey_snapshot(store, name)
    if force and (_was_committed(store, name) or (is_copy(store) and objects_of(store, name))):
        # The slots of the snapshot will be found in the records. A copy that did not finish has no commit yet.
        return SurveyedSnapshot(name, None, "", "", 0, SizeTotal.of(objects_of(store, name)), SizeTotal())
    raise SnapshotMissingError(
        f"there is no snapshot {name}", hint="see: snapshot list", details={"snapshot": name, "increment": 0}
    )


def _was_committed(store: ObjectStore, name: str) -> bool:
    documents = document_names(store)
    batches = read_batches(store, documents, list_ended(documents, has_intent=True))
    done = (ended for batch in batches for ended in batch if ended.outcome is not None and ended.outcome.state == DONE)
    return any((ended.kind, ended.snapshot) == ("create", name) for ended in done)


def _check_deletable(surveyed: SurveyedSnapshot, others: tuple[str, ...], *, is_only: bool) -> None:
    """Raise unless the snapshot may be deleted without --force; `is_only`: no other snapshot can be restored."""
    name = surveyed.name
    warning = ["after that, nothing can be restored any more"]
    if surveyed.unreadable:
        raise SnapshotUnreadableError(
            f"can't tell which restore points of snapshot {name} would be lost: {surveyed.unreadable}",
            hint=[
                "put the object back from a copy of the store, or delete the snapshot anyway:"
                f" snapshot delete {name} --force",
                *(warning if is_only else []),
            ],
            details={"snapshot": name, "problem": surveyed.unreadable},
        )
    if surveyed.restorable and is_only:
        raise LastSnapshotError(
            f"snapshot {name} is the last restorable snapshot",
            hint=[
                "take another snapshot first: snapshot create NAME   or delete this one anyway:"
                f" snapshot delete {name} --force",
                *warning,
            ],
            details={"snapshot": name, "others": list(others)},
        )


def tombstone_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> Mark:
    """Return the snapshot's tombstone, without the id of the operation that deletes it."""
    held = slots_of(store, fleet, surveyed)
    return Mark(
        DELETED,
        surveyed.name,
        "",
        current_time(),
        own_label(DELETE, surveyed.name),
        held.chain,
        held.slots,
        held.nodes,
        surveyed.points,
        surveyed.objects.objects,
        surveyed.objects.size_bytes,
        servers_of(surveyed.chain) if surveyed.chain else {},
    )


@dataclass(frozen=True, slots=True)
class ChainSlots:
    """A snapshot's slots, the nodes that may have them, and its chain ("" if no commit can be read)."""

    slots: tuple[str, ...]
    nodes: tuple[str, ...]
    chain: str


def slots_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> ChainSlots:
    """Return the slots that the snapshot may have, and their nodes; none in a copy, which feeds no chain."""
    if is_copy(store):
        return ChainSlots((), (), surveyed.chain.full.chain if surveyed.chain else "")
    if surveyed.chain is not None:
        chain = surveyed.chain.full.chain
        return ChainSlots((slot_name(chain),), tuple(surveyed.chain.listed_system_identifiers), chain)
    # No commit can be read, so take the slots of every attempt under that name from the records of operations.
    slots: set[str] = set()
    nodes = {node.id for node in fleet.nodes}
    for operation_id in store.list_children("operations"):
        try:
            operation = read_intent(store, operation_id)
        except (ObjectMissingError, ManifestError):
            continue
        if (operation.kind, operation.snapshot, operation.increment) == ("create", surveyed.name, 0):
            slots.add(slot_name(operation_id))
            nodes |= set(operation.nodes)
    return ChainSlots(tuple(sorted(slots)), tuple(sorted(nodes)), "")


def unfinished_mark(store: ObjectStore, fleet: Fleet, name: str) -> Mark:
    """Return the tombstone of an unfinished deletion; if it can't be read, make it from the records of operations.

    Its counts are for the remaining objects.
    """
    left = objects_of(store, name)
    try:
        mark = read_mark(store, tombstone_key(name))
    except ManifestError:
        survey = SurveyedSnapshot(name, None, "", "", 0, SizeTotal.of(left), SizeTotal())
        return tombstone_of(store, fleet, survey)
    return structs.replace(mark, objects=len(left), bytes=sum(listed.size for listed in left))


def servers_of(chain: Chain) -> dict[str, str]:
    """Return the system identifiers of the chain's nodes, as recorded when their copies began."""
    return chain.listed_system_identifiers


def slots_left_behind(store: ObjectStore, fleet: Fleet, mark: Mark) -> dict[str, str]:
    """Return the result of `servers_left_behind`, using only the store."""
    recorded: Mapping[str, str] = {}
    with suppress(ManifestError):
        recorded = read_recorded_servers(store)
    return servers_left_behind(fleet, mark.nodes_on_servers, recorded)


def servers_left_behind(fleet: Fleet, nodes: Mapping[str, str], primaries: Mapping[str, str]) -> dict[str, str]:
    """Return the nodes of a chain whose servers fleet.toml no longer names, each with a name for the server.

    `nodes` are the former system identifiers of the nodes, "" if unknown; `primaries` are the current identifiers of
    the fleet's primaries. A standby has the identifier of its primary.
    """
    shards = {node.id: node.shard for node in (*fleet.nodes, *fleet.retired_nodes)}
    left: dict[str, str] = {}
    # A node may have another id now.
    new = Counter(primaries.get(shard, "") for node, shard in shards.items() if node not in nodes)
    for node, was in nodes.items():
        if node not in shards and was and new[was]:
            new[was] -= 1
        elif node not in shards:
            left[node] = node
        elif was and primaries.get(shards[node], was) != was:
            left[node] = f"the earlier server of {node}"
    return left


def _has_tombstone(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot has a tombstone; raise ManifestError if it can't be read, unless `force` is set."""
    try:
        return is_deleted(store, name)
    except ManifestError:
        if not force:
            raise
        # The unreadable object stays, so the name can't be used again. The rest of the snapshot is deleted.
        return True


def is_finished(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot was deleted and nothing is left to do; raises ManifestError like `_has_tombstone`."""
    return (
        _has_tombstone(store, name, force=force)
        and not open_removals(store, name)
        and not any(store.exists(key) for key in store.list(f"snapshots/{name}"))
    )


def list_unfinished_deletions(store: ObjectStore) -> tuple[list[str], dict[str, str]]:
    """Return the deleted snapshots that may have left something behind in the store or on the nodes.

    Also return the snapshots whose tombstone can't be read, with the reasons; prune does not touch them.
    """
    deleted = {child.removesuffix(".json") for child in store.list_children("deleted")}
    unfinished = {*store.list_children("snapshots"), *(removal.snapshot for removal in open_removals(store))}
    names: list[str] = []
    unreadable: dict[str, str] = {}
    for name in sorted(deleted & unfinished):
        try:
            if is_deleted(store, name):
                names.append(name)
        except ManifestError as error:
            unreadable[name] = error.message
    return names, unreadable


@dataclass(frozen=True, slots=True)
class DeletionResult:
    """The result of a deletion; `removed` is None if nothing was left to do."""

    mark: Mark
    removed: RemovalResult | None


@dataclass(frozen=True, slots=True)
class RemovalRun:
    """A running `delete` or `prune` that holds the fleet's lock."""

    fleet: Fleet
    store: ObjectStore
    nodes: NodeCleanup
    progress: Progress
    force: bool = False


@dataclass(frozen=True, slots=True)
class NoNodes:
    """The NodeCleanup of a removal from a copy, whose chains have no slots.

    Nothing needs the fleet's lock there: two removals, or a removal and a copy, agree by the mark.
    """

    store: ObjectStore

    def check_held(self, operation: Intent) -> None:
        if read_outcome(self.store, operation.id) is not None:
            raise overdue_error(operation)

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:  # noqa: ARG002  # required by NodeCleanup
        return [], []

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:  # noqa: ARG002  # required by NodeCleanup
        return [], []


@dataclass(frozen=True, slots=True)
class FleetNodes:
    """The NodeCleanup that uses the sessions holding the fleet's lock."""

    lock: FleetLock
    fleet_id: str

    def check_held(self, operation: Intent) -> None:  # noqa: ARG002  # required by NodeCleanup
        self.lock.check_held()

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        sessions = self.lock.sessions
        primaries = {node: identity.system_identifier for node, identity in sessions.identities.items()}
        # A node may have another id now.
        servers = {*nodes.values()} - {""}
        left = drop_slots(
            [
                node
                for node in with_retired(sessions, nodes)
                if node.id in nodes or primaries.get(node.shard) in servers
            ],
            slot,
        )
        return left, list(servers_left_behind(sessions.fleet, nodes, primaries).values())

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        sessions = self.lock.sessions
        dropped: list[str] = []
        left: list[str] = []
        for node, connection in sessions.primaries.items():
            with raising_unreachable(sessions.fleet.node(node)):
                if any(map(is_ours, list_own_slots(connection))):
                    continue
                try:
                    dropped += [f"{name} on {node}" for name in drop_publications(connection, self.fleet_id)]
                except psycopg.errors.InsufficientPrivilege as error:
                    left.append(f"publications on {node}: {shorten_message(error)}")
                except EventTriggerError as error:
                    left.append(f"publications on {node}: {without_node(error.message, node)}")
        return dropped, left


def preview_deletion(fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan a deletion, contacting only the store; raises the errors of `delete`."""
    store = fleet.store.open()
    read_identity(store, fleet)
    return plan_deletion(store, fleet, check_name(name), force=force)


def delete_snapshot(
    fleet: Fleet, name: str, progress: Progress, announce: Callable[[DeletionPlan], None], *, force: bool
) -> DeletionResult:
    """Delete the snapshot, or resume an unfinished deletion; calls `announce` with the plan before removing anything.

    Raises SnapshotMissingError, LastSnapshotError, SnapshotUnreadableError, PinnedError, SnapshotInUseError.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    if is_finished(store, check_name(name), force=force):
        return DeletionResult(unfinished_mark(store, fleet, name), None)
    with hold_fleet(fleet, store, identity, (DELETE, name), progress) as nodes:
        return delete_locked(RemovalRun(fleet, store, nodes, progress, force), name, announce)


@contextmanager
def hold_fleet(
    fleet: Fleet,
    store: ObjectStore,
    identity: StoreIdentity,
    command: tuple[str, str],
    progress: Progress,
    *,
    goes_by_age: bool = False,
) -> Iterator[NodeCleanup]:
    """Hold the fleet's lock for a command on a snapshot; settle operations that have died.

    If the store is a copy, no node is contacted, ages are by this machine's clock, and only removals are settled.
    Raises ClocksDifferError if the command `goes_by_age` and no clock can be trusted.
    """
    if identity.is_copy:
        settle_removals(store, progress)
        yield NoNodes(store)
        return
    progress.step("check nodes")
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, *command) as lock:
        (check_clocks if goes_by_age else note_clocks)(sessions.clocks, progress)
        settle_operations(store, sessions.fleet, progress)
        yield FleetNodes(lock, identity.fleet_id)


def delete_locked(run: RemovalRun, name: str, announce: Callable[[DeletionPlan], None]) -> DeletionResult:
    """Like `delete_snapshot`, but for a `run` that already holds the fleet's lock."""
    store = run.store
    run.progress.step("read snapshots")
    plan = plan_deletion(store, run.fleet, name, force=run.force)
    check_not_in_use(store, name)
    announce(plan)
    operation = new_operation(DELETE, name, 0, plan.mark.nodes)
    removal = snapshot_removal(plan.mark, operation.id, force=run.force)
    return DeletionResult(plan.mark, remove_recorded(store, operation, removal, run.nodes, run.progress))


def snapshot_removal(mark: Mark, operation: str, *, force: bool = False) -> Removal:
    """Return the removal of a whole snapshot by `operation`."""
    return Removal(DELETE, structs.replace(mark, operation=operation), objects_of, force)
