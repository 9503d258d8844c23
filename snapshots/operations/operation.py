"""Operations: an intent before anything is changed, an outcome at the end.

An operation without an outcome died, or its commit's answer was lost. Whoever holds the fleet's lock next settles it:
it is decided whether it has committed (snapshots/operations/deciding.py), and what is left of one that has not is
removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from fleet.progress import Progress, Silent
from snapshots.operations.committing import put_commit
from snapshots.operations.deciding import decide
from snapshots.records.commit import Commit
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import (
    DONE,
    FAILED,
    Intent,
    Outcome,
    operation_key,
    read_intent,
    read_outcome,
    write_operation_record,
)
from storage.errors import IndeterminateError, SnapshotError, UnreachableError
from storage.ids import new_operation_id
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore


@dataclass(slots=True)
class Operation:
    """One run of a command that changes something, in the process that runs it.

    `is_committing` from the moment on in which the process begins to put the commit: what became of it is then not
    for the process alone to say.
    """

    intent: Intent
    is_committing: bool = False

    @property
    def id(self) -> str:
        """The operation's id."""
        return self.intent.operation

    @property
    def snapshot(self) -> str:
        """The snapshot that it is about."""
        return self.intent.snapshot

    @property
    def increment(self) -> int:
        """The increment that it is about; 0 is the full snapshot."""
        return self.intent.increment

    @property
    def began_at(self) -> str:
        """When it began, RFC 3339 UTC."""
        return self.intent.began_at


@dataclass(frozen=True, slots=True)
class CommittedIncrement:
    """A full snapshot (increment 0) or an increment that an operation says it has committed."""

    snapshot: str
    increment: int


def now_text() -> str:
    """The time, as every document has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_operation(kind: str, snapshot: str, increment: int, nodes: tuple[str, ...]) -> Intent:
    """The intent of an operation that begins now."""
    return Intent(
        operation=new_operation_id(datetime.now(UTC)),
        kind=kind,
        snapshot=snapshot,
        increment=increment,
        began_at=now_text(),
        nodes=nodes,
        slot=None,
    )


@contextmanager
def record_operation(
    store: ObjectStore,
    operation: Operation,
    undo: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """Store the intent, and at the end the outcome.

    After an error `undo` removes what the operation has made elsewhere, unless it had committed already (an interrupt
    may come that late). Where that is not known, or `undo` says that something is left, no outcome is written: the
    next command settles it. What is done is done, also where its outcome can't be stored.
    """
    intent = operation.intent
    begin(store, intent)
    try:
        yield
    except IndeterminateError:
        raise
    except BaseException as error:
        reason = reason_of(error)
        with suppress(SnapshotError):
            if operation.is_committing and decide(store, intent):
                record_outcome(store, intent, DONE, reason)
            elif undo is None or undo():
                record_outcome(store, intent, FAILED, reason)
        raise
    try:
        record_outcome(store, intent, DONE)
    except (UnreachableError, IndeterminateError) as error:
        (progress or Silent()).note(
            f"operation {operation.id} is done, and its outcome could not be stored: the next one says so"
            f" ({error.message})"
        )


def begin(store: ObjectStore, intent: Intent) -> None:
    """Store the intent."""
    write_operation_record(store, "intent", intent)


def reason_of(error: BaseException) -> str:
    """What an outcome says of the error that ended the operation."""
    return error.slug if isinstance(error, SnapshotError) else type(error).__name__


def commit_operation(store: ObjectStore, operation: Operation, commit: Commit) -> None:
    """Put the commit of what the operation has made; raises what `publish` does."""
    operation.is_committing = True
    put_commit(store, commit, operation.intent.turn)


def record_outcome(store: ObjectStore, intent: Intent, state: Literal["done", "failed"], reason: str = "") -> None:
    """Store an operation's outcome; whoever does so first has said it."""
    outcome = Outcome(
        operation=intent.operation,
        kind=intent.kind,
        snapshot=intent.snapshot,
        increment=intent.increment,
        state=state,
        reason=reason,
        ended_at=now_text(),
    )
    with suppress(ObjectExistsError):
        write_operation_record(store, "outcome", outcome)


def pending_operations(store: ObjectStore) -> list[Intent]:
    """All operations without an outcome, oldest first; raises ManifestError where an intent can't be read."""
    found: list[Intent] = []
    for one in pending_ids(store):
        # gc removes old records, the intent first.
        with suppress(ObjectMissingError):
            found.append(read_intent(store, one))
    return found


def readable_pending(store: ObjectStore) -> list[Intent]:
    """The same without those whose intent can't be read: they block nobody."""
    found: list[Intent] = []
    for operation_id in pending_ids(store):
        with suppress(ManifestError, ObjectMissingError):
            found.append(read_intent(store, operation_id))
    return found


def pending_ids(store: ObjectStore) -> list[str]:
    """The ids of all operations without an outcome, oldest first: by one listing, and a look at each of them."""
    documents: dict[str, set[str]] = {}
    for key in store.list("operations"):
        operation_id, _, name = key.removeprefix("operations/").partition("/")
        documents.setdefault(operation_id, set()).add(name)
    found = [one for one, names in sorted(documents.items()) if "intent.json" in names and "outcome.json" not in names]
    # A listing may be of a moment ago.
    return [one for one in found if is_open(store, one)]


def is_open(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation has no outcome yet."""
    return not store.exists(operation_key(operation_id, "outcome"))


def has_failed(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation's outcome is that it has failed; raises ManifestError."""
    outcome = read_outcome(store, operation_id)
    return outcome is not None and outcome.state == FAILED


def read_recorded_commits(
    store: ObjectStore, since: str = "", unread: list[ManifestError] | None = None
) -> dict[str, dict[str, int]]:
    """By snapshot, the increments (0: the full snapshot) that were committed, by operation id.

    Operations that began before the second in which the operation `since` did are not read. What can't be understood is
    added to `unread`; without that list, raises ManifestError.
    A commit whose process died before it could say so is missing until the next command settles it.
    """
    found: dict[str, dict[str, int]] = {}
    # Ids sort by time, down to the second.
    second = since.rpartition("-")[0]
    for operation_id in store.list_children("operations"):
        if operation_id < second:
            continue
        try:
            committed = _read_commit_record(store, operation_id)
        except ManifestError as error:
            if unread is None:
                raise
            unread.append(error)
            continue
        if committed:
            found.setdefault(committed.snapshot, {})[operation_id] = committed.increment
    return found


def _read_commit_record(store: ObjectStore, operation_id: str) -> CommittedIncrement | None:
    """What the operation says it has committed; None if it says no such thing."""
    outcome = read_outcome(store, operation_id)
    if outcome is None or outcome.state == FAILED:
        return None
    kind, snapshot, increment = outcome.kind, outcome.snapshot, outcome.increment
    if not isinstance(kind, str) or not isinstance(snapshot, str) or not isinstance(increment, int):
        # An early outcome, which does not repeat what the operation was.
        try:
            intent = read_intent(store, operation_id)
        except ObjectMissingError:
            return None
        kind, snapshot, increment = intent.kind, intent.snapshot, intent.increment
    return CommittedIncrement(snapshot, increment) if kind == "create" else None
