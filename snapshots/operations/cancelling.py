"""Stop operations from another process or machine: request it, wait until they end, and settle dead operations.

A request is an object in the same folder as the operation's intent. The process looks for a request every few seconds,
stops as it does on SIGTERM, cleans up, and exits with code 8. A restore that has decided to publish continues.
Operations without a sign of life are also asked to stop: if a process was only suspended, it stops as soon as it
continues. They are then settled under the fleet's lock, as the next create would do.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from enum import StrEnum

from msgspec import UNSET, Struct

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import end_sessions_statement, is_of_one_process, own_label
from cutline.fleet.progress import Progress
from cutline.nodes.lock import ask_lock_holders
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.open_operations import RESTORE, is_open
from cutline.snapshots.operations.operation import CANCELLED, current_time, exclusive
from cutline.snapshots.operations.settling import settle_in_store, settle_operations
from cutline.snapshots.operations.signs import clear_signs, sign_numbers, store_request
from cutline.snapshots.operations.under_way import (
    WATCH,
    ActivityState,
    UnderWay,
    hanging_watch,
    read_one,
    read_under_way,
)
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import FAILED, IN_STORE, CancelRequest, Outcome, read_any_outcome
from cutline.snapshots.records.store_identity import read_identity
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, UnreachableError
from cutline.storage.store import ObjectStore

POLL_SECONDS = 0.5
# A check, gc or prune whose process was only suspended answers within this time.
ANSWER_SECONDS_MAX = 5.0
# The process has ended if this many successive listings contain no signs of life. The second number is for a process
# that has not stored a sign yet: it does so within LOOK_SECONDS.
GONE_LISTINGS, NONE_LISTINGS = 3, 20
SILENT = "it shows no sign of life"


class CancelResult(StrEnum):
    """The result of cancelling an operation."""

    CANCELLED = "cancelled"
    SETTLED = "settled"
    TOO_LATE = "too-late"
    ENDED = "ended"
    UNFINISHED = "unfinished"
    STILL_RUNNING = "still-running"
    REFUSED = "refused"
    BUSY = "busy"
    UNREACHABLE = "unreachable"


class Cancelled(Struct, frozen=True):
    """An operation with the result of cancelling it, and a message for the operator."""

    operation: UnderWay
    result: CancelResult
    text: str


def cancel_operations(
    fleet: Fleet, operations: Iterable[UnderWay], wait_seconds: float, progress: Progress
) -> list[Cancelled]:
    """Ask all of the operations to stop, wait up to `wait_seconds`, and settle the dead operations.

    This also settles all other dead operations. Raises StoreOfAnotherFleetError, StoreUnreachableError.
    """
    store, now = fleet.store.open(), utc_now()
    read_identity(store, fleet)
    results: dict[str, Cancelled] = {}
    alive, dead = list[UnderWay](), list[UnderWay]()
    for operation in operations:
        if operation.state(now) is ActivityState.PUBLISHING:
            text = "the restore has decided to publish its databases: it can't be stopped, only undone afterwards"
            results[operation.id] = Cancelled(operation, CancelResult.REFUSED, text)
            continue
        store_request(store, CancelRequest(operation.id, own_label("cancel", operation.snapshot), current_time()))
        (dead if operation.has_ended(now) else alive).append(operation)
    if alive:
        progress.step("wait for operations to stop", total=len(alive), unit="operations")
        results |= {cancelled.operation.id: cancelled for cancelled in _await(store, alive, wait_seconds, progress)}
        late = {result.operation.id for result in results.values() if result.result is CancelResult.STILL_RUNNING}
        # An operation whose process was killed just before the request is known to be dead by now.
        ways = [way for way in read_under_way(store) if way.id in late]
        dead += [way for way in ways if way.has_ended(utc_now())]
    if dead:
        progress.step("settle dead operations")
        results |= {cancelled.operation.id: cancelled for cancelled in _settle_all(store, fleet, dead, progress)}
    return list(results.values())


def _await(store: ObjectStore, asked: list[UnderWay], wait_seconds: float, progress: Progress) -> Iterator[Cancelled]:
    """Yield each operation when it ends, then those that did not end in time."""
    deadline, waiting = time.monotonic() + wait_seconds, list(asked)
    watch = _SignWatch(store)
    while waiting:
        for way in list(waiting):
            # Look at the signs of life first, because they are deleted after the outcome is stored.
            is_over = watch.is_over(way)
            if not is_open(store, way.id, may_be_check=way.opened is None):
                ended = _ended(way, read_any_outcome(store, way.id))
                if ended.result is CancelResult.CANCELLED and way.opened is None:
                    ended = _with_unfinished_part(store, ended)
            elif is_over:
                ended = _left_open(way)
            else:
                continue
            waiting.remove(way)
            progress.advance(1)
            yield ended
        if not waiting or time.monotonic() >= deadline:
            break
        time.sleep(POLL_SECONDS)
    for way in waiting:
        text = f"it was asked to stop, but is still running after {wait_seconds:.0f} s"
        yield Cancelled(way, CancelResult.STILL_RUNNING, text)


def _with_unfinished_part(store: ObjectStore, ended: Cancelled) -> Cancelled:
    """Report the unfinished operations of a command that runs several in turn, such as the removals of a prune."""
    whole = ended.operation
    remedies = [
        way.remedy
        for way in read_under_way(store)
        if way.opened is not None
        and (way.began_at or "") >= (whole.began_at or "")
        and is_of_one_process(way.label, whole.label)
    ]
    return Cancelled(whole, CancelResult.UNFINISHED, _unfinished_text(remedies)) if remedies else ended


def _unfinished_text(remedies: Iterable[str]) -> str:
    return f"it stopped before it had finished; {'; '.join(remedies)}"


def _left_open(one: UnderWay) -> Cancelled:
    if not one.remedy:
        return Cancelled(one, CancelResult.CANCELLED, "it has stopped")
    return Cancelled(one, CancelResult.UNFINISHED, _unfinished_text([one.remedy]))


class _SignWatch:
    """Detects processes that ended without storing an outcome: when a process ends, it deletes its signs of life.

    Their operations are left for a later command to resume or undo.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        # How many successive listings contained no signs of life of each operation, and which operations had any.
        self._missed = Counter[str]()
        self._had_signs: set[str] = set()

    def is_over(self, one: UnderWay) -> bool:
        """Whether the operation's process has deleted its signs of life; must be called repeatedly."""
        has_signs = bool(sign_numbers(self._store.list_children(f"operations/{one.id}")))
        if has_signs or one.sign is not None:
            self._had_signs.add(one.id)
        # A listing may be out of date, and may miss a sign that has just replaced its predecessor.
        self._missed[one.id] = 0 if has_signs else self._missed[one.id] + 1
        return self._missed[one.id] >= (GONE_LISTINGS if one.id in self._had_signs else NONE_LISTINGS)


def _ended(one: UnderWay, outcome: Outcome | None) -> Cancelled:
    if outcome is None or outcome.state != FAILED:
        return Cancelled(one, CancelResult.TOO_LATE, "it finished before it could be stopped")
    if outcome.code == CANCELLED:
        return Cancelled(one, CancelResult.CANCELLED, "it has stopped and cleaned up")
    return Cancelled(one, CancelResult.ENDED, f"it had already ended: {outcome.reason}")


def _settle_all(store: ObjectStore, fleet: Fleet, dead: list[UnderWay], progress: Progress) -> Iterator[Cancelled]:
    """Settle the dead operations; take the fleet's lock once for all that need it."""
    for way in dead:
        if not way.is_known:
            yield Cancelled(way, CancelResult.REFUSED, "; ".join(way.problems))
        elif way.intent is None:
            yield _hanging(store, fleet, way) or forget(store, way, progress)
        elif way.intent.kind == RESTORE:
            yield Cancelled(way, CancelResult.REFUSED, f"{SILENT}; {way.remedy}")
        elif way.intent.kind in IN_STORE:
            settle_in_store(store, way.intent, progress)
            yield _settled(store, way, None)
    under_lock = [way for way in dead if way.intent is not None and way.intent.kind not in (RESTORE, *IN_STORE)]
    if not under_lock:
        return
    problem: BusyError | RefusedError | UnreachableError | None = None
    try:
        with ExitStack() as stack:
            sessions = stack.enter_context(open_sessions(fleet, fleet.primaries))
            stack.enter_context(exclusive(sessions, store, "cancel", ""))
            settle_operations(store, sessions.fleet, progress, given_up={way.id for way in under_lock})
    except (BusyError, RefusedError, UnreachableError) as error:
        problem = error
    yield from (_settled(store, way, problem) for way in under_lock)


def _hanging(store: ObjectStore, fleet: Fleet, one: UnderWay) -> Cancelled | None:
    """Report on a watch whose process hangs and still holds the watch lock; return None if the process is gone."""
    if one.kind != WATCH:
        return None
    hanging = hanging_watch(read_under_way(store), one.label, utc_now())
    if hanging is None or hanging.id != one.id:
        return None
    answers = ask_lock_holders(fleet)
    for answer in answers:
        if answer.watch is not None and is_of_one_process(answer.watch.label, one.label):
            text = (
                f"{SILENT}, but still holds the watch lock: it will stop once it resumes; if it does not, end its"
                f" process, or its sessions on every primary: {end_sessions_statement(answer.watch.label)}"
            )
            return Cancelled(one, CancelResult.STILL_RUNNING, text)
    if all(answer.problem for answer in answers):
        silent = answers[0]
        text = (
            f"{SILENT}; it may still hold the watch lock, whose holder can't be determined: node {silent.node}:"
            f" {silent.problem}"
        )
        return Cancelled(one, CancelResult.UNREACHABLE, text)
    return None


def forget(store: ObjectStore, one: UnderWay, progress: Progress) -> Cancelled:
    """Record that an operation without an intent is dead. The removals of a prune have separate records."""
    (found,) = _await(store, [one], ANSWER_SECONDS_MAX, progress)
    if found.result is not CancelResult.STILL_RUNNING or one.began_at is None:
        return found
    about = Command(one.kind, one.snapshot, one.id)
    # A watch's reports are kept for the next watch.
    watch = one.sign.watch if one.sign else UNSET
    record_without_intent(store, about, one.began_at, one.label, Ending(FAILED, "no sign of life", watch=watch))
    clear_signs(store, one.id)
    return Cancelled(one, CancelResult.SETTLED, f"{SILENT}; {one.left_text}")


def _settled(
    store: ObjectStore, one: UnderWay, problem: BusyError | RefusedError | UnreachableError | None
) -> Cancelled:
    try:
        outcome = read_any_outcome(store, one.id)
    except ManifestError as error:
        return Cancelled(one, CancelResult.REFUSED, error.message)
    if outcome is not None:
        clear_signs(store, one.id)
        if outcome.state == FAILED:
            return Cancelled(one, CancelResult.SETTLED, f"it {one.dead_text}; its unfinished work was undone")
        return Cancelled(one, CancelResult.TOO_LATE, f"it {one.dead_text}, but it had committed")
    if problem is None:
        one = read_one(store, one.id) or one
        return Cancelled(one, CancelResult.REFUSED, f"it {one.dead_text}, but it can't be undone; {one.remedy}")
    result = {BusyError: CancelResult.BUSY, UnreachableError: CancelResult.UNREACHABLE}
    kind = next(
        (cancel_result for base, cancel_result in result.items() if isinstance(problem, base)), CancelResult.REFUSED
    )
    return Cancelled(one, kind, f"it {one.dead_text}, but it can't be settled now: {problem.message}")
