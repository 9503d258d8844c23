"""Stop operations from elsewhere: ask their processes, wait until they end, and settle what is dead.

A request is an object beside the operation's intent. The process looks for it every few seconds, stops as by SIGTERM,
cleans up, and ends with exit code 8. A restore that has decided to publish goes on. What has died can't answer: a
create or a removal is settled as the next create would, under the fleet's lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from fleet.config import Fleet
from fleet.label import own_label
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from snapshots.activity.command import Command
from snapshots.activity.history import Ending, record_without_intent
from snapshots.activity.under_way import ActivityState, UnderWay
from snapshots.operations.exclusive import exclusive
from snapshots.operations.open_operations import RESTORE
from snapshots.operations.operation import CANCELLED, current_time, is_open
from snapshots.operations.settling import settle_operations
from snapshots.operations.signs import clear_signs
from snapshots.records.operation_records import (
    FAILED,
    CancelRequest,
    Outcome,
    read_cancel_request,
    read_outcome,
    write_operation_record,
)
from storage.store import ObjectExistsError, ObjectStore

POLL_SECONDS = 0.5


class CancelResult(StrEnum):
    """What became of an operation that was to be cancelled."""

    CANCELLED = "cancelled"
    SETTLED = "settled"
    TOO_LATE = "too-late"
    ENDED = "ended"
    STILL_RUNNING = "still-running"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What became of one operation, and what there is to say of it."""

    operation: UnderWay
    result: CancelResult
    text: str


def cancel_operations(
    fleet: Fleet, operations: Iterable[UnderWay], wait_seconds: float, progress: Progress
) -> list[Cancelled]:
    """Ask all of the operations to stop, settle those that are dead, and wait for the others up to `wait_seconds`.

    Raises StoreUnreachableError; FleetBusyError or NodeUnreachableError if a dead one can't be settled now.
    """
    store, now = fleet.store.open(), datetime.now(UTC)
    results: dict[str, Cancelled] = {}
    asked: list[UnderWay] = []
    dead: list[UnderWay] = []
    for one in operations:
        state = one.state(now)
        if state is ActivityState.DEAD:
            dead.append(one)
        elif state is ActivityState.PUBLISHING:
            text = "the restore has decided to publish its databases: it only goes forward, or is undone afterwards"
            results[one.id] = Cancelled(one, CancelResult.REFUSED, text)
        else:
            ask_to_stop(store, one)
            asked.append(one)
    if dead:
        progress.step("settle dead operations")
        results |= {one.id: _settle(store, fleet, one, progress) for one in dead}
    if asked:
        progress.step("wait for operations to stop", total=len(asked), unit="operations")
        results |= {one.id: found for one, found in _await(store, asked, wait_seconds, progress)}
    return list(results.values())


def ask_to_stop(store: ObjectStore, operation: UnderWay) -> CancelRequest:
    """Store the request, and return the one that counts: the first."""
    request = CancelRequest(operation.id, own_label("cancel", operation.snapshot), current_time())
    try:
        write_operation_record(store, "cancel", request)
    except ObjectExistsError:
        return read_cancel_request(store, operation.id) or request
    return request


def _await(
    store: ObjectStore, asked: list[UnderWay], wait_seconds: float, progress: Progress
) -> Iterator[tuple[UnderWay, Cancelled]]:
    """Each of the operations when it has ended, then those that have not."""
    deadline, waiting = time.monotonic() + wait_seconds, list(asked)
    while waiting:
        for one in list(waiting):
            if not is_open(store, one.id):
                waiting.remove(one)
                progress.advance(1)
                yield one, _ended(one, read_outcome(store, one.id))
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    for one in waiting:
        text = f"it is asked to stop, and has not ended in {wait_seconds:.0f} s"
        yield one, Cancelled(one, CancelResult.STILL_RUNNING, text)


def _ended(one: UnderWay, outcome: Outcome | None) -> Cancelled:
    if outcome is None or outcome.state != FAILED:
        return Cancelled(one, CancelResult.TOO_LATE, "it was done before it could be stopped")
    if outcome.code == CANCELLED:
        return Cancelled(one, CancelResult.CANCELLED, "it has stopped and cleaned up")
    return Cancelled(one, CancelResult.ENDED, f"it had ended by itself: {outcome.reason}")


def _settle(store: ObjectStore, fleet: Fleet, one: UnderWay, progress: Progress) -> Cancelled:
    if one.problem:
        return Cancelled(one, CancelResult.REFUSED, one.problem)
    if one.intent is None and one.sign is not None:
        # A check or a gc has changed nothing that others would have to undo.
        about = Command(one.kind, one.snapshot, one.id)
        record_without_intent(store, about, one.sign.began_at, one.label, Ending(FAILED, "its process died"))
        clear_signs(store, one.id)
        return Cancelled(one, CancelResult.SETTLED, "its process is gone; it has left nothing")
    if one.kind == RESTORE:
        return Cancelled(one, CancelResult.REFUSED, f"its process is gone; {one.remedy}")
    with (
        open_sessions(fleet, fleet.primaries) as sessions,
        exclusive(sessions, store, "cancel", one.snapshot),
    ):
        settle_operations(store, fleet, progress)
    clear_signs(store, one.id)
    if is_open(store, one.id):
        return Cancelled(one, CancelResult.REFUSED, f"its process is gone, and it can't be undone; {one.remedy}")
    outcome = read_outcome(store, one.id)
    if outcome is not None and outcome.state != FAILED:
        return Cancelled(one, CancelResult.TOO_LATE, "its process is gone, but it had committed")
    return Cancelled(one, CancelResult.SETTLED, "its process is gone; what it had begun is undone")
