"""The context of a create that holds the fleet's lock and has stored its intent.

The attempts and their steps take it (`full_attempt`, `increment_attempt`, `prepare_tables`, `cut_attempt`,
`definitions`). A function that needs one or two of its values takes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from msgspec import UNSET, structs

from cutline.fleet.config import Fleet
from cutline.fleet.nodes.free_connections import check_free_connections
from cutline.fleet.nodes.lock import FleetLock
from cutline.fleet.nodes.sessions import Sessions
from cutline.fleet.progress import Progress
from cutline.fleet.read_only.resume import check_terminal, undo_freeze
from cutline.fleet.step_times import StepTimes
from cutline.snapshots.create.request import CreateRequest
from cutline.snapshots.executors.needs import ExecutorNeeds
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.operations.exclusive import exclusive
from cutline.snapshots.operations.operation import Operation, OutcomeDetails, new_operation
from cutline.snapshots.operations.settling import note_restores, settle_operations
from cutline.snapshots.operations.slot_guard import guard_nodes
from cutline.snapshots.records.commits import free_turn
from cutline.snapshots.records.tombstones import check_not_deleted
from cutline.storage.store import ObjectStore
from cutline.wal.slots.slots import drop_slots, slot_name


@dataclass(frozen=True, slots=True)
class CreateContext:
    """The request, the store that the snapshot goes to, the operation, and the lock that it holds."""

    request: CreateRequest
    store: ObjectStore
    operation: Operation
    lock: FleetLock

    @property
    def sessions(self) -> Sessions:
        """The sessions that hold the lock."""
        return self.lock.sessions

    @property
    def fleet(self) -> Fleet:
        """The fleet as fleet.toml describes it."""
        return self.lock.sessions.fleet

    @property
    def executor_needs(self) -> ExecutorNeeds:
        """What its tasks need of executors."""
        nodes, wait = tuple(self.sessions.nodes), self.request.wait_seconds
        return ExecutorNeeds(self.fleet.store, nodes, writes=True, wait_seconds=wait)


@contextmanager
def begin_full(
    sessions: Sessions, store: ObjectStore, request: CreateRequest, fleet_id: str, progress: StepTimes
) -> Iterator[CreateContext]:
    """Hold the fleet's lock, settle what died before, and begin a full snapshot of the sessions' nodes.

    Nothing of the operation is stored yet. Raises what `exclusive` and the checks of the store and the nodes raise.
    """
    with exclusive(sessions, store, "create", request.name) as lock:
        progress.reached(CrashPoint.LOCKED)
        note_restores(settle_operations(store, sessions.fleet, progress), sessions, progress)
        progress.reached(CrashPoint.SETTLED)
        check_not_deleted(store, request.name)
        guard_nodes(store, sessions, progress)
        check_free_connections(sessions.by_node)
        progress.reached(CrashPoint.GIVEN_UP)
        check_terminal(sessions, fleet_id, progress, terminal=request.terminal)
        intent = new_operation("create", request.name, 0, tuple(node.id for node in sessions.nodes))
        # Settling may have used a turn.
        turn, terminal = free_turn(store, request.name, 0), request.terminal or UNSET
        intent = structs.replace(
            intent, slot=slot_name(intent.id), turn=turn, terminal=terminal, fleet_id=fleet_id,
            only_cut=request.only_cut or UNSET,
        )  # fmt: skip
        yield CreateContext(request, store, Operation(intent, details=OutcomeDetails(times=progress)), lock)


def undo_create(sessions: Sessions, operation: Operation, slot: str, progress: Progress) -> bool:
    """Remove what a failed create made on the nodes, `slot` included; False if something is left."""
    is_terminal = operation.intent.is_terminal
    is_writable = not is_terminal or undo_freeze(sessions.fleet.primaries, operation.id, progress)
    return not drop_slots(sessions.nodes, slot) and is_writable
