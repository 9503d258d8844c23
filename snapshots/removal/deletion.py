"""`delete`: remove one snapshot with all its increments, permanently. Its name is never used again.

A plan is made first and says what would be lost. snapshots/removal/removal.py then does the removal, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from msgspec import structs

from cutline.fleet.config import Fleet
from cutline.fleet.nodes.clocks import check_clocks, note_clocks
from cutline.fleet.nodes.connections import raising_unreachable
from cutline.fleet.nodes.lock import FleetLock
from cutline.fleet.nodes.server_messages import shorten_message
from cutline.fleet.nodes.sessions import open_sessions
from cutline.fleet.progress import Progress
from cutline.fleet.tables.event_triggers import EventTriggerError
from cutline.fleet.tables.publications import drop_publications
from cutline.snapshots.operations.exclusive import exclusive
from cutline.snapshots.operations.leases import check_not_in_use
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.commits import check_name
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import Mark
from cutline.snapshots.removal.deletion_plan import (
    DeletionPlan,
    is_finished,
    plan_deletion,
    servers_left_behind,
    unfinished_mark,
)
from cutline.snapshots.removal.removal import (
    DELETE,
    NodeCleanup,
    Removal,
    RemovalResult,
    objects_of,
    remove_recorded,
)
from cutline.storage.store import ObjectStore
from cutline.wal.slots.own_slots import list_own_slots
from cutline.wal.slots.slots import drop_slots


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

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        sessions = self.lock.sessions
        left = drop_slots([node for node in sessions.fleet.nodes if node.id in nodes], slot)
        primaries = {node: identity.system_identifier for node, identity in sessions.identities.items()}
        return left, list(servers_left_behind(sessions.fleet, nodes, primaries).values())

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
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
                    left.append(f"publications on {node}: {error.message.removeprefix(f'node {node}: ')}")
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
        return DeletionResult(unfinished_mark(store, fleet, name), None)
    with hold_fleet(fleet, store, identity.fleet_id, (DELETE, name), progress) as nodes:
        return delete_locked(RemovalRun(fleet, store, nodes, progress, force), name, announce)


@contextmanager
def hold_fleet(
    fleet: Fleet,
    store: ObjectStore,
    fleet_id: str,
    command: tuple[str, str],
    progress: Progress,
    *,
    goes_by_age: bool = False,
) -> Iterator[FleetNodes]:
    """Hold the fleet's lock for a command on a snapshot; settle operations that died before.

    Raises ClocksDifferError if what the command does depends on how old something is, and no clock can be believed.
    """
    progress.step("check nodes")
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, *command) as lock:
        (check_clocks if goes_by_age else note_clocks)(sessions.clocks, progress)
        settle_operations(store, fleet, progress)
        yield FleetNodes(lock, fleet_id)


def delete_locked(run: RemovalRun, name: str, announce: Callable[[DeletionPlan], None]) -> DeletionResult:
    """As `delete_snapshot`, while `run` holds the fleet's lock."""
    store = run.store
    run.progress.step("read snapshots")
    plan = plan_deletion(store, run.fleet, name, force=run.force)
    check_not_in_use(store, name)
    announce(plan)
    operation = new_operation(DELETE, name, 0, plan.mark.nodes)
    removal = snapshot_removal(plan.mark, operation.id, force=run.force)
    return DeletionResult(plan.mark, remove_recorded(store, operation, removal, run.nodes, run.progress))


def snapshot_removal(mark: Mark, operation: str, *, force: bool = False) -> Removal:
    """The removal of a whole snapshot by `operation`."""
    return Removal(DELETE, structs.replace(mark, operation=operation), objects_of, force)
