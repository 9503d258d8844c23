"""`delete`: remove one snapshot with all its increments, permanently. Its name is never used again.

A plan is made first and says what would be lost. snapshots/removal/removal.py then does the removal, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import psycopg
from msgspec import structs

from fleet.config import Fleet
from fleet.label import own_label
from fleet.nodes.connections import raising_unreachable
from fleet.nodes.lock import FleetLock
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from fleet.tables.publications import drop_publications
from snapshots.operations.exclusive import exclusive
from snapshots.operations.leases import Lease, check_not_in_use, open_leases
from snapshots.operations.operation import current_time, new_operation
from snapshots.operations.settling import settle_operations
from snapshots.records.commits import SnapshotMissingError, check_name, find_place, listed_numbers, snapshot_names
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import read_intent
from snapshots.records.store_identity import read_identity
from snapshots.records.tombstones import DELETED, Mark, is_deleted, read_mark, tombstone_key
from snapshots.removal.removal import (
    DELETE,
    NodeCleanup,
    Removal,
    RemovalResult,
    objects_of,
    open_removals,
    remove_recorded,
)
from snapshots.removal.survey import SurveyedSnapshot, first_restorable, survey_snapshot
from storage.errors import RefusedError
from storage.store import ObjectMissingError, ObjectStore
from wal.slots.slots import drop_slots, slot_name

SLOTS_QUERY = r"""
SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline\_%' AND database = current_database()
"""


class LastSnapshotError(RefusedError):
    """The snapshot is the last one in the store that can be restored."""


class SnapshotUnreadableError(RefusedError):
    """The snapshot can't be read, so it is unknown which restore points would be lost."""


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """What deleting a snapshot removes.

    `surveyed` is None if this resumes an earlier deletion, whose mark is `mark`. `others` are the snapshots that
    remain, `unknown_nodes` the nodes of the chain that are no longer in fleet.toml.
    """

    mark: Mark
    surveyed: SurveyedSnapshot | None
    others: tuple[str, ...]
    unknown_nodes: tuple[str, ...]
    leases: tuple[Lease, ...] = ()

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier deletion has stored its mark already."""
        return self.surveyed is None

    @property
    def drops_publications(self) -> bool:
        """Whether the publications go too: it is the last snapshot, so nothing of Cutline remains on the nodes."""
        return not self.others


@dataclass(frozen=True, slots=True)
class DeletionResult:
    """What a deletion did; `removed` is None if nothing was left to do."""

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
class FleetNodes:
    """NodeCleanup through the sessions that hold the fleet's lock."""

    lock: FleetLock
    fleet_id: str

    def check_held(self) -> None:
        """See NodeCleanup."""
        self.lock.check_held()

    def drop_slot(self, slot: str, nodes: Iterable[str]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        known = {node.id: node for node in self.lock.sessions.fleet.nodes}
        names = list(nodes)
        left = drop_slots([known[name] for name in names if name in known], slot)
        return left, [name for name in names if name not in known]

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        sessions = self.lock.sessions
        dropped: list[str] = []
        left: list[str] = []
        for node, connection in sessions.primaries.items():
            with raising_unreachable(sessions.fleet.node(node)):
                if any(is_ours(slot) for (slot,) in connection.execute(SLOTS_QUERY)):
                    continue
                try:
                    dropped += [f"{name} on {node}" for name in drop_publications(connection, self.fleet_id)]
                except psycopg.errors.InsufficientPrivilege as error:
                    left.append(f"publications on {node}: {str(error).strip()}")
        return dropped, left


def preview_deletion(fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan what `delete` would do, contacting only the store; raise as `delete` would."""
    store = fleet.store.open()
    read_identity(store, fleet)
    return plan_deletion(store, fleet, check_name(name), force=force)


def delete_snapshot(
    fleet: Fleet, name: str, progress: Progress, announce: Callable[[DeletionPlan], None], *, force: bool
) -> DeletionResult:
    """Delete the snapshot, or resume an unfinished deletion; `announce` gets the plan before anything is removed.

    Raises SnapshotMissingError, LastSnapshotError, SnapshotUnreadableError, SnapshotInUseError.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    if is_finished(store, check_name(name), force=force):
        return DeletionResult(_unfinished_mark(store, fleet, name), None)
    with hold_fleet(fleet, store, identity.fleet_id, (DELETE, name), progress) as nodes:
        return delete_locked(RemovalRun(fleet, store, nodes, progress, force), name, announce)


@contextmanager
def hold_fleet(
    fleet: Fleet, store: ObjectStore, fleet_id: str, command: tuple[str, str], progress: Progress
) -> Iterator[FleetNodes]:
    """Hold the fleet's lock for a command on a snapshot; settle operations that died before."""
    progress.step("check nodes")
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, *command) as lock:
        settle_operations(store, fleet, progress)
        yield FleetNodes(lock, fleet_id)


def delete_locked(run: RemovalRun, name: str, announce: Callable[[DeletionPlan], None]) -> DeletionResult:
    """As `delete_snapshot`, while `run` holds the fleet's lock."""
    store = run.store
    plan = plan_deletion(store, run.fleet, name, force=run.force)
    check_not_in_use(store, name)
    announce(plan)
    operation = new_operation(DELETE, name, 0, plan.mark.nodes)
    removal = snapshot_removal(plan.mark, operation.id)
    return DeletionResult(plan.mark, remove_recorded(store, operation, removal, run.nodes, run.progress))


def snapshot_removal(mark: Mark, operation: str) -> Removal:
    """The removal of a whole snapshot by `operation`."""
    return Removal(DELETE, structs.replace(mark, operation=operation), objects_of)


def is_finished(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot was deleted and nothing is left to do; raise ManifestError as `_has_tombstone`."""
    return (
        _has_tombstone(store, name, force=force)
        and not open_removals(store, name)
        and not any(store.exists(key) for key in store.list(f"snapshots/{name}"))
    )


def _has_tombstone(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot has a tombstone; raise ManifestError if what is in its place is none, unless `force`."""
    try:
        return is_deleted(store, name)
    except ManifestError:
        if not force:
            raise
        # It stays, so the name can't be used again, and what is left of the snapshot is deleted.
        return True


def plan_deletion(store: ObjectStore, fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan the deletion of the snapshot; raise unless it may be deleted."""
    others = tuple(one for one in snapshot_names(store) if one != name)
    leases = tuple(lease for lease in open_leases(store, name) if lease.is_running(datetime.now(UTC)))
    if _has_tombstone(store, name, force=force):
        mark = _unfinished_mark(store, fleet, name)
        return DeletionPlan(mark, None, others, _unknown_nodes(fleet, mark), leases)
    surveyed = _survey(store, name)
    if not force:
        _check_deletable(store, surveyed, others)
    mark = tombstone_of(store, fleet, surveyed)
    return DeletionPlan(mark, surveyed, others, _unknown_nodes(fleet, mark), leases)


def _survey(store: ObjectStore, name: str) -> SurveyedSnapshot:
    """Survey the snapshot; raise SnapshotMissingError if there is none."""
    try:
        exists = find_place(store, name, 0).commit is not None or bool(listed_numbers(store, name))
    except ManifestError:
        exists = True
    if exists:
        return survey_snapshot(store, name)
    raise SnapshotMissingError(
        f"there is no snapshot {name}", hint="see: snapshot list", details={"snapshot": name, "increment": 0}
    )


def _check_deletable(store: ObjectStore, surveyed: SurveyedSnapshot, others: tuple[str, ...]) -> None:
    name = surveyed.name
    if surveyed.unreadable:
        raise SnapshotUnreadableError(
            f"can't tell which restore points of snapshot {name} would be lost: {surveyed.unreadable}",
            hint="put the object back from a copy of the store, or delete the snapshot anyway:"
            f" snapshot delete {name} --force",
            details={"snapshot": name, "problem": surveyed.unreadable},
        )
    if surveyed.restorable and first_restorable(store, reversed(others)) is None:
        raise LastSnapshotError(
            f"snapshot {name} is the last one that can be restored",
            hint=f"take another one first: snapshot create NAME   or delete it anyway: snapshot delete {name} --force",
            details={"snapshot": name, "others": list(others)},
        )


def tombstone_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> Mark:
    """The snapshot's tombstone, without the id of the operation that deletes it."""
    held = slots_of(store, fleet, surveyed)
    return Mark(
        DELETED, surveyed.name, "", current_time(), own_label(DELETE, surveyed.name), held.chain, held.slots,
        held.nodes, surveyed.points, len(surveyed.objects), surveyed.size_bytes,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChainSlots:
    """A snapshot's slots, the nodes that may have them, and its chain ("" if no commit can be read)."""

    slots: tuple[str, ...]
    nodes: tuple[str, ...]
    chain: str


def slots_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> ChainSlots:
    """The slots that the snapshot may have, and on which nodes."""
    if surveyed.chain is not None:
        chain = surveyed.chain.full.chain
        return ChainSlots((slot_name(chain),), tuple(identity.node for identity in surveyed.chain.nodes), chain)
    # No commit can be read: take the slots of every attempt under that name from the records of operations.
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


def _unfinished_mark(store: ObjectStore, fleet: Fleet, name: str) -> Mark:
    """The tombstone of an unfinished deletion; if it can't be read, one made from the records of operations.

    Its counts are those of the objects that are left.
    """
    left = objects_of(store, name)
    try:
        mark = read_mark(store, tombstone_key(name))
    except ManifestError:
        return tombstone_of(store, fleet, SurveyedSnapshot(name, None, "", "", 0, tuple(left)))
    return structs.replace(mark, objects=len(left), bytes=sum(one.size for one in left))


def _unknown_nodes(fleet: Fleet, mark: Mark) -> tuple[str, ...]:
    known = {node.id for node in fleet.nodes}
    return tuple(node for node in mark.nodes if node not in known)


def list_unfinished_deletions(store: ObjectStore) -> tuple[list[str], dict[str, str]]:
    """The deleted snapshots of which something may be left, in the store or on the nodes.

    Also those whose tombstone can't be read, with the reason: nothing of them is removed.
    """
    deleted = {child.removesuffix(".json") for child in store.list_children("deleted")}
    unfinished = {*store.list_children("snapshots"), *(one.snapshot for one in open_removals(store))}
    names: list[str] = []
    unreadable: dict[str, str] = {}
    for name in sorted(deleted & unfinished):
        try:
            if is_deleted(store, name):
                names.append(name)
        except ManifestError as error:
            unreadable[name] = error.message
    return names, unreadable
