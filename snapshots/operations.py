"""Operations: an intent before anything is changed, an outcome at the end.

An operation without an outcome died, or its commit's answer was lost. Whoever holds the fleet's lock next settles it:
it is decided whether it has committed (snapshots/deciding.py), and what is left of one that has not is taken away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fleet.progress import Progress, Silent
from snapshots.commits import NAME
from snapshots.deciding import decide
from snapshots.documents import ManifestError, check_schema, entries, read_document, sealed, understood
from snapshots.manifest import Commit
from snapshots.publishing import publish
from snapshots.value_types import check_types
from storage.errors import IndeterminateError, SnapshotError, UnreachableError
from storage.ids import new_operation_id
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find

OPERATION_SCHEMA = "cutline/operation/1"
DONE, FAILED = "done", "failed"


@dataclass(slots=True)
class Operation:
    """One run of a command that changes something. `began_at` is RFC 3339 UTC.

    `turn` is that of the commit it is to write. `is_committing` from the moment on in which this process begins to put
    it: what became of it is then not to be told by the process alone.
    """

    id: str
    kind: str
    snapshot: str
    increment: int
    began_at: str
    nodes: tuple[str, ...] = ()
    slot: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    turn: int = 1
    is_committing: bool = field(default=False, compare=False)

    @property
    def is_terminal(self) -> bool:
        """Whether it may have made the fleet read-only."""
        return bool(self.details.get("terminal"))


@dataclass(frozen=True, slots=True)
class Said:
    """What an outcome repeats of its operation."""

    kind: str
    snapshot: str
    increment: int


def now_text() -> str:
    """The time, as every document has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_operation(kind: str, snapshot: str, increment: int, nodes: tuple[str, ...]) -> Operation:
    """An operation that begins now."""
    return Operation(new_operation_id(datetime.now(UTC)), kind, snapshot, increment, now_text(), nodes)


@contextmanager
def recorded(
    store: ObjectStore,
    operation: Operation,
    undo: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> Iterator[None]:
    """Store the intent, and at the end the outcome.

    After an error `undo` takes away what the operation has made elsewhere, unless it had committed already (an
    interrupt may come that late). Where that is not known, or `undo` says that something is left, no outcome is
    written: the next command settles it. What is done is done, also where its outcome can't be stored.
    """
    begin(store, operation)
    try:
        yield
    except IndeterminateError:
        raise
    except BaseException as error:
        reason = reason_of(error)
        with suppress(SnapshotError):
            if operation.is_committing and decide(store, operation):
                close(store, operation, DONE, reason)
            elif undo is None or undo():
                close(store, operation, FAILED, reason)
        raise
    try:
        close(store, operation, DONE)
    except (UnreachableError, IndeterminateError) as error:
        (progress or Silent()).note(
            f"operation {operation.id} is done, and its outcome could not be stored: the next one says so"
            f" ({error.message})"
        )


def begin(store: ObjectStore, operation: Operation) -> None:
    """Store the intent."""
    write(store, operation.id, "intent", {
        "kind": operation.kind, "snapshot": operation.snapshot, "increment": operation.increment,
        "turn": operation.turn, "began_at": operation.began_at, "nodes": list(operation.nodes), "slot": operation.slot,
        **operation.details,
    })  # fmt: skip


def reason_of(error: BaseException) -> str:
    """What an outcome says of the error that ended the operation."""
    return error.slug if isinstance(error, SnapshotError) else type(error).__name__


def commit_operation(store: ObjectStore, operation: Operation, commit: Commit) -> None:
    """Publish what the operation has made; raises what `publish` does."""
    operation.is_committing = True
    publish(store, commit, operation.turn)


def write(store: ObjectStore, operation_id: str, name: str, document: dict[str, Any]) -> None:
    """Store one of an operation's documents."""
    body = {"schema": OPERATION_SCHEMA, "operation": operation_id, **document}
    create_or_find(store, operation_key(operation_id, name), sealed(body))


def operation_key(operation_id: str, name: str) -> str:
    """The key of one of an operation's documents."""
    return f"operations/{operation_id}/{name}.json"


def close(store: ObjectStore, operation: Operation, state: str, reason: str = "") -> None:
    """Store an operation's outcome; whoever does so first has said it."""
    with suppress(ObjectExistsError):
        write(store, operation.id, "outcome", {
            "kind": operation.kind, "snapshot": operation.snapshot, "increment": operation.increment,
            "state": state, "reason": reason, "ended_at": now_text(),
        })  # fmt: skip


def pending(store: ObjectStore) -> list[Operation]:
    """All operations without an outcome, oldest first; raises ManifestError where an intent can't be read."""
    found: list[Operation] = []
    for one in pending_ids(store):
        # gc takes old records away, the intent first.
        with suppress(ObjectMissingError):
            found.append(read_intent(store, one))
    return found


def readable_pending(store: ObjectStore) -> list[Operation]:
    """The same without those whose intent can't be read: they block nobody."""
    found: list[Operation] = []
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


def read_intent(store: ObjectStore, operation_id: str) -> Operation:
    """The operation as its intent has it; raises ObjectMissingError, ManifestError."""
    key = operation_key(operation_id, "intent")
    intent = read_document(store, key)
    with understood(key, "intent"):
        _check_of(intent, operation_id)
        known = (intent["kind"], intent["snapshot"], intent["increment"], intent["began_at"])
        nodes, turn = tuple(entries(intent["nodes"])), intent.get("turn", 1)
        check_types(intent.get("terminal", False), bool, "terminal")
        details = {"terminal": True} if intent.get("terminal") else {}
        operation = Operation(operation_id, *known, nodes, intent["slot"], details, turn)
        check_types(operation, Operation, "")
        if operation.kind == "create" and not NAME.fullmatch(operation.snapshot):
            raise ValueError(f"snapshot {operation.snapshot!r}")
    return operation


def _check_of(document: dict[str, Any], operation_id: str) -> None:
    check_schema(document, OPERATION_SCHEMA)
    if document["operation"] != operation_id:
        raise ValueError(f"it is of operation {document['operation']}")


def is_open(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation has no outcome yet."""
    return not store.exists(operation_key(operation_id, "outcome"))


def has_failed(store: ObjectStore, operation_id: str) -> bool:
    """Whether the operation's outcome is that it has failed; raises ManifestError."""
    try:
        return bool(read_document(store, operation_key(operation_id, "outcome")).get("state") == FAILED)
    except ObjectMissingError:
        return False


def recorded_commits(
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
            said = _recorded_commit(store, operation_id)
        except ManifestError as error:
            if unread is None:
                raise
            unread.append(error)
            continue
        if said:
            found.setdefault(said[0], {})[operation_id] = said[1]
    return found


def _recorded_commit(store: ObjectStore, operation_id: str) -> tuple[str, int] | None:
    """The snapshot and increment that the operation says it has committed; None if it doesn't."""
    key = operation_key(operation_id, "outcome")
    try:
        outcome = read_document(store, key)
        with understood(key, "outcome"):
            _check_of(outcome, operation_id)
            if outcome["state"] not in (DONE, FAILED):
                raise ValueError(f"state {outcome['state']!r}")
            if outcome["state"] == FAILED:
                return None
            if "kind" in outcome:
                said = Said(outcome["kind"], outcome["snapshot"], outcome["increment"])
                check_types(said, Said, "")
                return (said.snapshot, said.increment) if said.kind == "create" else None
        # Outcomes of before they said it themselves.
        intent = read_intent(store, operation_id)
    except ObjectMissingError:
        return None
    return (intent.snapshot, intent.increment) if intent.kind == "create" else None
