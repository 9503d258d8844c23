"""One operation at a time on a fleet: it holds a lock on all primaries, a majority of the fleet, until its commit.

The sessions that hold the lock are asked right before the commit is put. So a command that was cut off from the
fleet for a while can't commit after another one has continued without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cutline.fleet.label import own_label
from cutline.fleet.nodes.lock import FleetBusyError, FleetLock, lock_fleet
from cutline.fleet.nodes.sessions import Sessions
from cutline.snapshots.operations.committing import operation_settled_error
from cutline.snapshots.operations.majority import claim_majority
from cutline.snapshots.operations.operation import Operation
from cutline.snapshots.operations.recorded import is_open, read_open_intents
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore

# The length of a time's text down to the second.
SECOND = len("2026-11-20T11:02:03")


@contextmanager
def exclusive(sessions: Sessions, store: ObjectStore, command: str, snapshot: str) -> Iterator[FleetLock]:
    """Lock the fleet, and check that the locked primaries are more than half of the recorded primaries.

    Raises FleetBusyError naming the holder, MajorityMissingError and OtherServersError.
    """
    try:
        with lock_fleet(sessions, sessions.fleet.name, own_label(command, snapshot)) as lock:
            claim_majority(store, {node: sessions.identities[node] for node in lock.granted})
            yield lock
    except FleetBusyError as error:
        error.details.setdefault("operation", _operation_of(store, error))
        raise


def check_exclusive(lock: FleetLock, store: ObjectStore, operation: Operation) -> None:
    """Raise unless the operation still holds the fleet and nobody settled it as dead. Call it right before the commit.

    Raises FleetLockLostError, OperationSettledError.
    """
    lock.check_held()
    if lock.retaken and not is_open(store, operation.id):
        raise operation_settled_error(operation.id)


def _operation_of(store: ObjectStore, error: FleetBusyError) -> str | None:
    """The id of the holder's operation: the newest open one for its snapshot. None if it has stored no intent yet."""
    name = error.details.get("snapshot")
    if not isinstance(name, str):
        return None
    try:
        since = str(error.details.get("since"))[:SECOND]
        candidates = [
            one for one in read_open_intents(store) if one.snapshot == name and one.began_at[:SECOND] >= since
        ]
    except SnapshotError:
        return None
    return candidates[-1].id if candidates else None
