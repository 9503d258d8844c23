"""The context of a create that holds the fleet's lock and has stored its intent.

The attempts and their steps take it (`full_attempt`, `increment_attempt`, `prepare_tables`, `cut_attempt`,
`definitions`). A function that needs one or two of its values takes those.
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


def undo_create(sessions: Sessions, operation: Operation, slot: str, progress: Progress) -> bool:
    """Remove what a failed create made on the nodes, `slot` included; False if something is left."""
    is_terminal = operation.intent.is_terminal
    is_writable = not is_terminal or undo_freeze(sessions.fleet.primaries, operation.id, progress)
    return not drop_slots(sessions.nodes, slot) and is_writable
