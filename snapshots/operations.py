"""Operations: an intent before anything is changed, an outcome at the end.

An operation without an outcome died, or its commit's answer was lost. Whoever holds the fleet's lock next
settles it: a commit that was stored counts, and what is left of one that was not is taken away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from snapshots.commits import commit_key, operation_of, read_json
from storage.errors import IndeterminateError, SnapshotError
from storage.ids import new_operation_id
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore

OPERATION_SCHEMA = "cutline/operation/1"


@dataclass(frozen=True, slots=True)
class Operation:
    """One run of a command that changes something. `began_at` is RFC 3339 UTC."""

    id: str
    kind: str
    snapshot: str
    increment: int
    began_at: str
    nodes: tuple[str, ...] = ()
    slot: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def now_text() -> str:
    """The time, as every document has it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_operation(kind: str, snapshot: str, increment: int, nodes: tuple[str, ...]) -> Operation:
    """An operation that begins now."""
    return Operation(new_operation_id(datetime.now(UTC)), kind, snapshot, increment, now_text(), nodes)


@contextmanager
def recorded(store: ObjectStore, operation: Operation, undo: Callable[[], bool] | None = None) -> Iterator[None]:
    """Store the intent, and at the end the outcome.

    After an error `undo` takes away what the operation has made elsewhere, unless it had committed already (an
    interrupt may come that late). Where that is not known, or `undo` says that something is left, no outcome is
    written: the next command settles it.
    """
    write(store, operation.id, "intent", {
        "kind": operation.kind, "snapshot": operation.snapshot, "increment": operation.increment,
        "began_at": operation.began_at, "nodes": list(operation.nodes), "slot": operation.slot,
        **operation.details,
    })  # fmt: skip
    try:
        yield
    except IndeterminateError:
        raise
    except BaseException as error:
        reason = error.slug if isinstance(error, SnapshotError) else type(error).__name__
        with suppress(SnapshotError):
            if was_committed(store, operation):
                close(store, operation.id, "done", reason)
            elif undo is None or undo():
                close(store, operation.id, "failed", reason)
        raise
    close(store, operation.id, "done")


def write(store: ObjectStore, operation_id: str, name: str, document: dict[str, Any]) -> None:
    """Store one of an operation's documents."""
    body = {"schema": OPERATION_SCHEMA, "operation": operation_id, **document}
    store.create(f"operations/{operation_id}/{name}.json", json.dumps(body, indent=1).encode())


def close(store: ObjectStore, operation_id: str, state: str, reason: str = "") -> None:
    """Store an operation's outcome; whoever does so first has said it."""
    with suppress(ObjectExistsError):
        write(store, operation_id, "outcome", {"state": state, "reason": reason, "ended_at": now_text()})


def pending(store: ObjectStore) -> list[Operation]:
    """All operations without an outcome, oldest first."""
    found: list[Operation] = []
    for operation_id in store.list_children("operations"):
        children = store.list_children(f"operations/{operation_id}")
        if "intent.json" in children and "outcome.json" not in children:
            found.append(read_intent(store, operation_id))
    return found


def read_intent(store: ObjectStore, operation_id: str) -> Operation:
    """The operation as its intent has it; raises ObjectMissingError."""
    intent = read_json(store, f"operations/{operation_id}/intent.json")
    known = (intent["kind"], intent["snapshot"], int(intent["increment"]), intent["began_at"])
    return Operation(operation_id, *known, tuple(intent["nodes"]), intent["slot"])


def is_open(store: ObjectStore, operation: Operation) -> bool:
    """Whether the operation has no outcome yet."""
    return not store.exists(f"operations/{operation.id}/outcome.json")


def recorded_commits(store: ObjectStore, since: str = "") -> dict[str, dict[str, int]]:
    """By snapshot, the increments (0: the full snapshot) that were committed, by operation id.

    Operations that began before the second in which the operation `since` did are not read.
    A commit whose process died before it could say so is missing until the next command settles it.
    """
    found: dict[str, dict[str, int]] = {}
    # Ids sort by time, down to the second.
    second = since.rpartition("-")[0]
    for operation_id in store.list_children("operations"):
        if operation_id < second:
            continue
        try:
            intent = read_json(store, f"operations/{operation_id}/intent.json")
            if intent["kind"] != "create":
                continue
            outcome = read_json(store, f"operations/{operation_id}/outcome.json")
        except ObjectMissingError:
            continue
        if outcome["state"] == "done":
            found.setdefault(str(intent["snapshot"]), {})[operation_id] = int(intent["increment"])
    return found


def was_committed(store: ObjectStore, operation: Operation) -> bool:
    """Whether a create is the one that its commit file names."""
    if operation.kind != "create":
        return False
    try:
        return operation_of(store, commit_key(operation.snapshot, operation.increment)) == operation.id
    except ObjectMissingError:
        return False
