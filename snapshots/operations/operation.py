"""Operations: an intent before anything is changed, an outcome at the end.

An operation without an outcome died, or lost the answer to its commit. The next operation that holds the fleet's lock
settles it: it decides whether the commit exists (snapshots/operations/deciding.py), and if not, removes what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from msgspec import UNSET, UnsetType

from cutline.fleet.label import own_label
from cutline.fleet.own_process import own_process
from cutline.fleet.progress import Progress, Reading, Silent
from cutline.fleet.record import Time
from cutline.fleet.step_times import StepTimes
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.operations.deciding import decide
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.commits import increment_label
from cutline.snapshots.records.operation_records import (
    DONE,
    FAILED,
    Failure,
    Intent,
    Outcome,
    write_operation_record,
)
from cutline.snapshots.records.restore_figures import RestoreFigures
from cutline.storage.clock import utc_now
from cutline.storage.errors import IndeterminateError, SnapshotError, StoppedError, UnreachableError, find_behind
from cutline.storage.ids import new_operation_id
from cutline.storage.store import ObjectExistsError, ObjectStore
from cutline.storage.used_up import find_used_up
from cutline.wal.segments.own_store import StoreGoneError

# The exit codes of what is no SnapshotError (cli/output/exit_codes.py).
CANCELLED, BUG, INTERRUPTED = 8, 70, 130


@dataclass(frozen=True, slots=True)
class OutcomeDetails:
    """What an outcome says besides how the operation ended; see Outcome. `times` measure phases that are not given."""

    code: int | UnsetType = UNSET
    volumes: Mapping[str, int] | UnsetType = UNSET
    causes: tuple[str, ...] | UnsetType = UNSET
    figures: RestoreFigures | UnsetType = UNSET
    phases: Mapping[str, float] | UnsetType = UNSET
    times: StepTimes | None = None


@dataclass(slots=True)
class Operation:
    """One run of a command that changes something, in the process that runs it.

    `is_committing` is set before the process puts the commit. From then on the process alone can't tell whether the
    operation has committed. `details` are what its outcome says of it besides.
    """

    intent: Intent
    is_committing: bool = False
    details: OutcomeDetails = field(default_factory=lambda: OutcomeDetails())

    @property
    def id(self) -> str:
        """The operation's id."""
        return self.intent.operation

    @property
    def snapshot(self) -> str:
        """The snapshot that it works on."""
        return self.intent.snapshot

    @property
    def increment(self) -> int:
        """The increment that it works on; 0 is the full snapshot."""
        return self.intent.increment

    @property
    def began_at(self) -> Time:
        """When it began, RFC 3339 UTC."""
        return self.intent.began_at


def current_time() -> Time:
    """The current time, as documents store it."""
    return Time.of(utc_now())


def new_operation(kind: str, snapshot: str, increment: int, nodes: tuple[str, ...]) -> Intent:
    """The intent of an operation that begins now, in this process."""
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

    After an error `undo` removes what the operation made elsewhere, unless it has already committed (an interrupt
    may come that late: then StoppedError says so). If that is not known, or `undo` returns False because something
    is left, no outcome is written, and the next command settles the operation; why it failed is recorded for that. If
    the store is gone, nothing is written. An outcome that can't be stored does not fail an operation that is done.
    """
    intent, progress = operation.intent, progress or Silent()
    begin(store, intent)
    try:
        progress.tell(Reading(0, operation=intent.id))
        yield
    except IndeterminateError:
        raise
    except BaseException as error:
        progress.ending()
        reason, is_committed = reason_of(error), False
        with suppress(SnapshotError):
            details = replace(operation.details, code=code_of(error))
            if operation.is_committing and decide(store, intent):
                is_committed = True
                record_outcome(store, intent, DONE, reason, details)
            else:
                is_undone = undo is None or undo()
                if isinstance(error, StoreGoneError):
                    pass
                elif is_undone:
                    record_outcome(store, intent, FAILED, reason, details)
                else:
                    write_operation_record(store, "failure", Failure(intent.id, reason, code_of(error), current_time()))
        if is_committed and isinstance(error, KeyboardInterrupt):
            label = increment_label(intent.snapshot, intent.increment)
            raise StoppedError(f"{label} is committed", hint=f"see it: snapshot show {intent.snapshot}") from error
        raise
    progress.ending()
    try:
        record_outcome(store, intent, DONE, details=replace(operation.details, code=0))
    except (UnreachableError, IndeterminateError) as error:
        progress.note(
            f"operation {operation.id} is done, but its outcome could not be stored; the next command records it"
            f" ({error.message})"
        )


def begin(store: ObjectStore, intent: Intent) -> None:
    """Store the intent."""
    write_operation_record(store, "intent", intent)


def reason_of(error: BaseException) -> str:
    """The reason that an outcome records for the error that ended the operation."""
    if (interrupt := find_behind(error, KeyboardInterrupt)) is not None:
        return "stopped from elsewhere" if interrupt.args else "stopped by Ctrl-C"
    return error.slug if isinstance(error, SnapshotError) else type(error).__name__


def code_of(error: BaseException) -> int:
    """The exit code of a command that ends with this error."""
    if (interrupt := find_behind(error, KeyboardInterrupt)) is not None:
        # SIGTERM gives its number.
        return CANCELLED if interrupt.args else INTERRUPTED
    found = find_used_up(error) or error
    return found.exit_code if isinstance(found, SnapshotError) else BUG


def commit_operation(store: ObjectStore, operation: Operation, commit: Commit) -> None:
    """Put the operation's commit; raises what `put_commit` raises."""
    operation.details = replace(operation.details, volumes=dict(commit.counts), causes=commit.cut.causes)
    operation.is_committing = True
    put_commit(store, commit, operation.intent.turn)


def record_outcome(
    store: ObjectStore,
    intent: Intent,
    state: Literal["done", "failed"],
    reason: str = "",
    details: OutcomeDetails | None = None,
) -> None:
    """Store an operation's outcome, unless it already has one: the first one counts."""
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
    )
    with suppress(ObjectExistsError):
        write_operation_record(store, "outcome", outcome)
