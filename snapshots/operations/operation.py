"""Operations: take the fleet's lock, store an intent before anything is changed, and store an outcome at the end.

An operation without an outcome has died, or lost the answer to its commit. The next operation that holds the fleet's
lock settles it: it decides whether the commit exists (snapshots/operations/committing.py), and if not, removes the
remains of the operation.

A suspended restore and the command that ends it may both put a decision. Exactly one decision is stored. A restore
publishes only if the stored decision is to publish; if it is undone afterwards, the old databases return.

Right before the commit is put, the sessions that hold the lock are checked. So a command that was cut off from the
fleet can't commit after another command has continued without it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from cutline.fleet.own_process import own_label, own_process
from cutline.fleet.progress import Progress, Reading, Silent, StepTimes
from cutline.fleet.record import Time
from cutline.nodes.lock import FleetBusyError, FleetLock, lock_fleet
from cutline.nodes.publications import PublicationChangedError
from cutline.nodes.sessions import Sessions
from cutline.nodes.table_state import AppendOnlyChangedError
from cutline.snapshots.operations.committing import (
    OperationSettledError,
    UndecidedError,
    decide,
    operation_settled_error,
    put_commit,
)
from cutline.snapshots.operations.majority import claim_majority
from cutline.snapshots.operations.old_primaries import check_timelines
from cutline.snapshots.operations.open_operations import is_open, read_open_intents
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.documents import TextTooLongError
from cutline.snapshots.records.operation_records import (
    DONE,
    FAILED,
    Decision,
    Failure,
    Intent,
    Outcome,
    RestoreFigures,
    operation_key,
    read_decision,
    write_operation_record,
)
from cutline.snapshots.records.proven_chains import increment_label
from cutline.snapshots.records.unfinished_records import (
    interruption_name,
    is_unfinished_base,
    read_unfinished,
    read_unfinished_base,
    resumption_name,
)
from cutline.storage.clock import utc_now
from cutline.storage.errors import (
    ChainEnd,
    IndeterminateError,
    SnapshotError,
    StoppedError,
    UnreachableError,
    find_behind,
)
from cutline.storage.ids import new_operation_id
from cutline.storage.process_limits import find_used_up
from cutline.storage.store import ObjectExistsError, ObjectStore
from cutline.storage.storing import StoreAnswersLostError
from cutline.wal.drain.slots import SlotLostError
from cutline.wal.segments.archive import SegmentDamagedError
from cutline.wal.segments.own_store import StoreGoneError

# The exit codes of errors other than SnapshotError (cli/output/failure.py).
CANCELLED, BUG, INTERRUPTED = 8, 70, 130


class OutcomeDetails(Struct, frozen=True):
    """The details of an outcome besides the operation's end; see Outcome. `times`, if given, replace `phases`.

    `commit_digest` is the digest of the commit that the operation has stored, if it is that of a full snapshot.
    """

    code: int | UnsetType = UNSET
    volumes: Mapping[str, int] | UnsetType = UNSET
    causes: tuple[str, ...] | UnsetType = UNSET
    figures: RestoreFigures | UnsetType = UNSET
    phases: Mapping[str, float] | UnsetType = UNSET
    times: StepTimes | None = None
    commit_digest: str | UnsetType = UNSET


class Operation(Struct):
    """One run of a command that changes something, in the process that runs it.

    `is_committing` is set before the process puts the commit. From then on, only the store shows whether the operation
    has committed. `is_idle` is true if the operation stored nothing but its intent and its commit. `details` are
    additional fields of the outcome. `is_resumable` is set once a full snapshot has stored what a repetition needs to
    resume it. `resumption` is the number with which this process has resumed it; 0 if it began the operation.
    `table_slots` are the names of the slots for copying tables that this process may have created.
    """

    intent: Intent
    is_committing: bool = False
    is_idle: bool = False
    is_resumable: bool = False
    resumption: int = 0
    table_slots: set[str] = field(default_factory=set)
    details: OutcomeDetails = field(default_factory=lambda: OutcomeDetails())

    @property
    def id(self) -> str:
        """The operation's id."""
        return self.intent.operation

    @property
    def run_id(self) -> str:
        """The operation's id; in a process that has resumed it, with the number of the resumption."""
        return f"{self.id}.r{self.resumption}" if self.resumption else self.id

    @property
    def snapshot(self) -> str:
        """The snapshot that the operation works on."""
        return self.intent.snapshot

    @property
    def increment(self) -> int:
        """The increment that the operation works on; 0 is the full snapshot."""
        return self.intent.increment

    @property
    def began_at(self) -> Time:
        """The time at which the operation began."""
        return self.intent.began_at


def current_time() -> Time:
    """Return the current time in the format used in documents."""
    return Time.of(utc_now())


def new_operation(kind: str, snapshot: str, increment: int, nodes: tuple[str, ...]) -> Intent:
    """Return the intent of an operation that begins now, in this process."""
    return Intent(
        operation=new_operation_id(utc_now()),
        kind=kind,
        snapshot=snapshot,
        increment=increment,
        began_at=current_time(),
        nodes=nodes,
        slot=None,
        by=own_label(kind, snapshot),
        process=own_process() or UNSET,
    )


@contextmanager
def record_operation(
    store: ObjectStore,
    operation: Operation,
    undo: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """Store the intent, and at the end the outcome.

    After an error, `undo` removes the operation's traces elsewhere, unless the operation has committed. After an
    interrupt, a StoppedError says which of the two is the case, as far as it is known. If it is not known whether it
    has committed, no outcome is stored, and the next command settles the operation. The same holds if `undo` returns
    False because something is left; in that case, a failure record stores the reason. If the store is gone, nothing is
    stored. A full snapshot that can be resumed stays open, nothing is undone, and a record says when and why it ended.
    An operation that is done does not fail if its outcome can't be stored.
    """
    intent, progress = operation.intent, progress or Silent()
    if not operation.resumption:
        begin(store, intent)
    try:
        progress.tell(Reading(0, operation=intent.id))
        yield
    except IndeterminateError:
        raise
    except BaseException as error:
        progress.ending()
        reason, stopped = reason_of(error), None
        with suppress(SnapshotError):
            details = replace(operation.details, code=code_of(error))
            if operation.is_committing and decide(store, intent):
                stopped = _committed_error(intent)
                record_outcome(store, intent, DONE, reason, details)
            elif (left := _left_open(store, operation, error)) is not None:
                stopped = left
                if not isinstance(error, KeyboardInterrupt):
                    progress.note(f"{left.message}; {left.hint}")
                _record_interruption(store, operation, reason, error)
            elif operation.resumption and decide(store, intent):
                # The process that began the operation has committed it after all.
                stopped = _committed_error(intent)
                record_outcome(store, intent, DONE, reason, details)
            else:
                is_undone = undo is None or undo()
                stopped = _stopped_error(intent, is_undone=is_undone)
                if isinstance(error, StoreGoneError):
                    pass
                elif is_undone:
                    record_outcome(store, intent, FAILED, reason, details)
                else:
                    write_operation_record(store, "failure", Failure(intent.id, reason, code_of(error), current_time()))
        if stopped is not None and isinstance(error, KeyboardInterrupt):
            raise stopped from error
        raise
    progress.ending()
    try:
        details = replace(operation.details, code=0)
        record_outcome(store, intent, DONE, details=details, keeps_intent=not operation.is_idle)
    except (UnreachableError, IndeterminateError) as error:
        progress.note(
            f"operation {operation.id} is done, but its outcome could not be stored; the next command will record it"
            f" ({error.message})"
        )


def _stopped_error(intent: Intent, *, is_undone: bool) -> StoppedError:
    """Return what an interrupted create leaves, if it has not committed: never a restore point."""
    hint = "to try again, repeat the command"
    if not intent.increment:
        hint = f"the name {intent.snapshot} is still free: {hint}; to remove the objects that it stored: snapshot gc"
    if is_undone:
        # The slots of a chain that continues stay.
        slots = "the slots of the chain stay" if intent.increment else "no slot is left on a node"
        return StoppedError(f"nothing was committed, and {slots}", hint=hint)
    left = "nothing was committed, but something is left on a node: the next create, delete, prune or gc removes it"
    return StoppedError(left, hint=hint)


def _committed_error(intent: Intent) -> StoppedError:
    label = increment_label(intent.snapshot, intent.increment)
    return StoppedError(f"{label} is committed", hint=f"to see it: snapshot show {intent.snapshot}")


def _left_open(store: ObjectStore, operation: Operation, error: BaseException) -> StoppedError | None:
    """Return what an interrupted full snapshot leaves if it stays open, so that it can be resumed; None otherwise.

    It is undone if somebody has cancelled it, or if the same error would follow again. It also stays open if another
    process has resumed it, whose slots these are, or if the store does not answer.
    """
    if not operation.is_resumable or operation.is_committing:
        return None
    intent = operation.intent
    details: dict[str, object] = {"snapshot": intent.snapshot, "operation": intent.operation}
    kept = "the tables that were copied are kept"
    with suppress(UnreachableError, IndeterminateError):
        if _is_resumed(store, operation):
            return StoppedError(
                f"another process has resumed operation {intent.operation}",
                hint="see: snapshot status",
                details=details,
            )
        interrupt = find_behind(error, KeyboardInterrupt)
        is_cancelled = interrupt is not None and len(interrupt.args) > 1
        # Imported here because it imports Arrow, which has been imported if the error was raised.
        from cutline.wal.drain.lineage import WalDivergedError

        # The counters of append-only tables, altered publications, and lost or damaged WAL would be found again by
        # every repetition.
        lasting = (
            AppendOnlyChangedError,
            PublicationChangedError,
            SegmentDamagedError,
            SlotLostError,
            WalDivergedError,
        )
        is_repeated = isinstance(error, lasting) or (
            isinstance(error, SnapshotError) and error.ends_chain is ChainEnd.FOR_GOOD
        )
        names = store.list_children(f"operations/{intent.operation}")
        if is_cancelled or is_repeated or not is_unfinished_base(names):
            return None
        copied = read_unfinished(store, read_unfinished_base(store, intent.operation, names), names)
        if not any(copied.groups.values()):
            return None
        kept = f"{copied.share_text} and kept"
    return StoppedError(
        f"nothing was committed; {kept}, and the nodes keep WAL for them",
        hint=f"to resume it, repeat the command with the same name, {intent.snapshot}; to give it up:"
        f" snapshot cancel {intent.operation}",
        details=details,
    )


def _is_resumed(store: ObjectStore, operation: Operation) -> bool:
    """Whether another process has resumed the operation, which seemed dead."""
    later = operation_key(operation.id, resumption_name(operation.resumption + 1))
    return operation.is_resumable and store.exists(later)


def _record_interruption(store: ObjectStore, operation: Operation, reason: str, error: BaseException) -> None:
    """Store when and why this run of the operation ended, unless another process has resumed it meanwhile."""
    if not _is_resumed(store, operation):
        interruption = Failure(operation.id, reason, code_of(error), current_time())
        write_operation_record(store, interruption_name(operation.resumption + 1), interruption)


def begin(store: ObjectStore, intent: Intent) -> None:
    """Store the intent."""
    write_operation_record(store, "intent", intent)


def reason_of(error: BaseException) -> str:
    """Return the reason that an outcome records for the error that ended the operation.

    An interrupt contains the number of a signal, and the user and host that asked to cancel the operation, if any.
    """
    if (interrupt := find_behind(error, KeyboardInterrupt)) is not None:
        if isinstance(owner := next(iter(interrupt.args[1:]), None), str):
            return f"cancelled by {owner}"
        number = next(iter(interrupt.args), signal.SIGINT)
        is_named = isinstance(number, int) and number != signal.SIGINT
        return f"stopped by {signal.Signals(number).name}" if is_named else "stopped by Ctrl-C"
    return error.slug if isinstance(error, SnapshotError) else type(error).__name__


def code_of(error: BaseException) -> int:
    """Return the exit code of a command that ends with this error."""
    if (interrupt := find_behind(error, KeyboardInterrupt)) is not None:
        # The SIGTERM handler raises KeyboardInterrupt with the signal's number.
        return CANCELLED if interrupt.args else INTERRUPTED
    exception = find_used_up(error) or error
    return exception.exit_code if isinstance(exception, SnapshotError) else BUG


def commit_operation(store: ObjectStore, operation: Operation, commit: Commit) -> Commit:
    """Put the operation's commit, and return the stored one; raises the errors of `put_commit`."""
    operation.details = replace(operation.details, volumes=dict(commit.counts), causes=commit.cut.causes)
    operation.is_committing = True
    try:
        stored = put_commit(store, commit, operation.intent.turn)
    except TextTooLongError:
        # Nothing was put. A full snapshot that can be resumed keeps its tables until the text has been shortened.
        operation.is_committing = False
        raise
    # Only the commit of a full snapshot is read again by every increment, and can be large.
    commit_digest = UNSET if stored.increment else stored.digest
    operation.details = replace(
        operation.details, volumes=dict(stored.counts), causes=stored.cut.causes, commit_digest=commit_digest
    )
    return stored


def record_outcome(
    store: ObjectStore,
    intent: Intent,
    state: Literal["done", "failed"],
    reason: str = "",
    details: OutcomeDetails | None = None,
    *,
    keeps_intent: bool = True,
) -> None:
    """Store an operation's outcome, unless the operation already has an outcome.

    Unless `keeps_intent` is set, the outcome repeats what the intent says, and the intent is deleted if the store
    allows it. So an idle increment leaves two objects: its commit and this outcome.
    """
    details = details or OutcomeDetails()
    phases = details.times.phases() if details.times else details.phases
    outcome = Outcome(
        operation=intent.operation,
        kind=intent.kind,
        snapshot=intent.snapshot,
        increment=intent.increment,
        state=state,
        reason=reason,
        ended_at=current_time(),
        figures=details.figures,
        code=details.code,
        volumes=dict(details.volumes) if isinstance(details.volumes, Mapping) else UNSET,
        causes=details.causes or UNSET,
        phases=dict(phases) if isinstance(phases, Mapping) else UNSET,
        commit_digest=details.commit_digest,
        by=UNSET if keeps_intent else intent.by,
        began_at=intent.began_at,
    )
    if keeps_intent:
        with suppress(ObjectExistsError):
            write_operation_record(store, "outcome", outcome)
        return
    # Another command may have settled this operation while its process was suspended.
    if store.exists(operation_key(intent.operation, "outcome")):
        return
    write_operation_record(store, "increment", outcome)
    with suppress(SnapshotError):
        store.delete(operation_key(intent.operation, "intent"))


PUBLISH: Literal["publish"] = "publish"
ABANDON: Literal["abandon"] = "abandon"


def decide_restore(store: ObjectStore, intent: Intent, decision: Literal["publish", "abandon"]) -> str:
    """Store the decision unless a decision is already stored; return the stored decision.

    Raises UndecidedError if the store's answers are lost.
    """
    ours = Decision(
        operation=intent.operation,
        decision=decision,
        by=own_label(intent.kind, intent.snapshot),
        decided_at=current_time(),
    )
    try:
        write_operation_record(store, "decision", ours)
    except ObjectExistsError:
        stored = read_decision(store, intent.operation)
        return stored.decision if stored else decision
    except StoreAnswersLostError as error:
        raise UndecidedError(
            f"it is not known whether operation {intent.operation} was decided: the store's answers were lost",
            hint="once the store answers, resume the restore or undo it; for the commands, run: snapshot list",
            details={"operation": intent.operation},
        ) from error
    return decision


def is_publishing(store: ObjectStore, operation: str) -> bool:
    """Whether a restore has decided to publish, after which it can't be stopped; raises ManifestError."""
    decision = read_decision(store, operation)
    return decision is not None and decision.decision == PUBLISH


def list_decided(documents: Mapping[str, Set[str]]) -> list[str]:
    """Return the ids of restores with a decision, newest first; `documents` is the result of document_names."""
    return sorted((operation for operation, names in documents.items() if "decision.json" in names), reverse=True)


# The length of a time as text, up to the second.
SECOND = len("2026-11-20T11:02:03")
# The commands that store what the primaries have.
USING_ROWS = ("create", "archive")


@contextmanager
def exclusive(sessions: Sessions, store: ObjectStore, command: str, snapshot: str) -> Iterator[FleetLock]:
    """Lock the fleet, and check that more than half of the recorded primaries are locked.

    Raises FleetBusyError, which names the holder, MajorityMissingError and OtherServersError. A command of USING_ROWS
    also raises the errors of check_timelines.
    """
    check = partial(check_timelines, sessions) if command in USING_ROWS else None
    try:
        with lock_fleet(sessions, sessions.fleet.name, own_label(command, snapshot)) as lock:
            listed = {node.id: node.listed_id for node in sessions.nodes}
            claim_majority(store, {listed[node]: sessions.identities[node] for node in lock.granted}, check)
            yield lock
    except FleetBusyError as error:
        error.details.setdefault("operation", _operation_of(store, error))
        raise


def check_exclusive(lock: FleetLock, store: ObjectStore, operation: Operation) -> None:
    """Right before the commit, check that the operation still holds the lock, and was not settled or continued since.

    Raises FleetLockLostError, OperationSettledError.
    """
    lock.check_held()
    if lock.retaken and not is_open(store, operation.id):
        raise operation_settled_error(operation.id)
    if lock.retaken and _is_resumed(store, operation):
        raise OperationSettledError(
            f"another process has resumed operation {operation.id}, which seemed dead",
            hint="this process committed nothing; see: snapshot status",
            details={"operation": operation.id},
        )


def _operation_of(store: ObjectStore, error: FleetBusyError) -> str | None:
    """Return the id of the holder's operation: the newest open operation on its snapshot, None if none is stored."""
    name = error.details.get("snapshot")
    if not isinstance(name, str):
        return None
    try:
        since = str(error.details.get("since"))[:SECOND]
        candidates = [
            open_intent
            for open_intent in read_open_intents(store)
            if open_intent.snapshot == name and open_intent.began_at[:SECOND] >= since
        ]
    except SnapshotError:
        return None
    return candidates[-1].id if candidates else None
