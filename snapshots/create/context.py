"""The context of a create that holds the fleet's lock and has stored its intent.

Only the two attempts (`full_attempt`, `increment_attempt`) and the cut that they share take it whole. Everything below
takes the sessions, the store or the operation alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleet.config import Fleet
from fleet.nodes.lock import FleetLock
from fleet.nodes.sessions import Sessions
from fleet.progress import Progress
from fleet.read_only.resume import undo_freeze
from snapshots.create.request import CreateRequest
from snapshots.operations.operation import Operation
from storage.store import ObjectStore
from wal.slots.slots import drop_slots


@dataclass(frozen=True, slots=True)
class CreateContext:
    """What was asked for, into which store, as which operation, and under which lock."""

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


def undo_create(context: CreateContext, slot: str, progress: Progress) -> bool:
    """Remove what a failed create has made on the nodes, `slot` included; False if something is left."""
    writable = not context.request.terminal or undo_freeze(context.fleet.primaries, context.operation.id, progress)
    return not drop_slots(context.sessions.nodes, slot) and writable
