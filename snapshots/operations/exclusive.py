"""One operation at a time on a fleet: its lock on all primaries, which must be most of the fleet, until the commit.

A coordinator that was cut off from the fleet for a while can't commit what another one has gone past: the sessions
that hold the lock are asked last before the commit is put.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fleet.label import own_label
from fleet.nodes.lock import FleetBusyError, FleetLock, locked_fleet
from fleet.nodes.sessions import Sessions
from snapshots.operations.committing import operation_settled
from snapshots.operations.majority import claim_majority
from snapshots.operations.operation import Operation, is_open, pending_operations
from storage.errors import SnapshotError
from storage.store import ObjectStore

# As much of a time's text as is its second.
SECOND = len("2026-11-20T11:02:03")


@contextmanager
def exclusive(sessions: Sessions, store: ObjectStore, command: str, snapshot: str) -> Iterator[FleetLock]:
    """Hold the fleet, and see that what is held is more than half of the largest baseline of the store.

    Raises FleetBusyError saying who holds it, MajorityMissingError.
    """
    try:
        with locked_fleet(sessions, sessions.fleet.name, own_label(command, snapshot)) as lock:
            claim_majority(store, {node: sessions.identities[node] for node in lock.granted})
            yield lock
    except FleetBusyError as error:
        error.details.setdefault("operation", _operation_of(store, error))
        raise


def check_exclusive(lock: FleetLock, store: ObjectStore, operation: Operation) -> None:
    """Raise unless the operation holds the fleet and nobody took it for dead; what comes next is the commit.

    Raises FleetLockLostError, OperationSettledError.
    """
    lock.check_held()
    if lock.retaken and not is_open(store, operation.id):
        raise operation_settled(operation.id)


def _operation_of(store: ObjectStore, error: FleetBusyError) -> str | None:
    """The id of the holder's operation, if it has stored its intent: the newest one that is open for its snapshot."""
    name = error.details.get("snapshot")
    if not isinstance(name, str):
        return None
    try:
        since = str(error.details.get("since"))[:SECOND]
        found = [one for one in pending_operations(store) if one.snapshot == name and one.began_at[:SECOND] >= since]
    except SnapshotError:
        return None
    return found[-1].id if found else None
