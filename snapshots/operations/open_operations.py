"""Operations without an outcome, as those commands tell of them that only read. Nothing here changes the store.

An operation without an outcome runs, or died, or the answer to its commit was lost: from the store alone these can't be
told apart. What counts is whether its commit is there; the next operation that holds the fleet's lock settles the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from snapshots.operations.deciding import has_committed
from snapshots.operations.operation import pending_ids
from snapshots.records.commits import SnapshotMissingError, increment_label
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import Intent, read_intent
from storage.store import ObjectMissingError, ObjectStore

CREATE, RESTORE = "create", "restore"


@dataclass(frozen=True, slots=True)
class OpenOperation:
    """An operation without an outcome. No `operation`: its intent can't be read, and `problem` says why."""

    id: str
    operation: Intent | None
    committed: bool = False
    problem: str = ""

    @property
    def text(self) -> str:
        """The line that a person reads."""
        if self.operation is None:
            return f"operation {self.id} has no outcome, and what it was is not known: {self.problem}"
        one = self.operation
        what = f"operation {self.id} ({one.kind} {one.snapshot}, begun {one.began_at}) has no outcome"
        if one.kind != CREATE:
            again = f"snapshot delete {one.snapshot}" if one.kind == "delete" else f"snapshot {one.kind} --yes"
            return f"{what}: it is running, or was ended before it was done; to finish it: {again}"
        if self.committed:
            return f"{what} yet: its commit is in the store, so {increment_label(one.snapshot, one.increment)} exists"
        return (
            f"{what} yet: {increment_label(one.snapshot, one.increment)} is not committed by it;"
            " it is running, or the next create settles it"
            + (
                "; until then the fleet may accept no writes, unless you run: snapshot resume"
                if one.is_terminal
                else ""
            )
        )

    def concerns(self, name: str) -> bool:
        """Whether it may be of the snapshot `name`."""
        return self.operation is None or self.operation.snapshot == name

    def to_json(self) -> dict[str, Any]:
        """The operation as scripts read it; what is not known is null."""
        one = self.operation
        return {
            "operation": self.id,
            "kind": one.kind if one else None,
            "snapshot": one.snapshot if one else None,
            "increment": one.increment if one else None,
            "began_at": one.began_at if one else None,
            "terminal": one.is_terminal if one else None,
            "committed": self.committed if one and one.kind == CREATE else None,
            "problem": self.problem or None,
        }


def read_open_operations(store: ObjectStore, name: str | None = None) -> tuple[OpenOperation, ...]:
    """The operations without an outcome, of the snapshot `name` or of all, oldest first.

    One listing, and a few reads for each. A restore is none of them: nothing is committed by it.
    """
    found = (_open_operation(store, one) for one in pending_ids(store))
    return tuple(one for one in found if one is not None and (name is None or one.concerns(name)))


def _open_operation(store: ObjectStore, operation_id: str) -> OpenOperation | None:
    try:
        operation = read_intent(store, operation_id)
        if operation.kind == RESTORE:
            return None
        return OpenOperation(operation_id, operation, has_committed(store, operation))
    except ObjectMissingError:
        # A listing may be of a moment ago.
        return None
    except ManifestError as error:
        return OpenOperation(operation_id, None, problem=error.message)


@contextmanager
def naming_open_operations(found: tuple[OpenOperation, ...]) -> Iterator[None]:
    """Let the error for a snapshot that is missing say which operations were to make it."""
    try:
        yield
    except SnapshotMissingError as error:
        if found:
            error.details["open_operations"] = [one.to_json() for one in found]
            error.hint = "; ".join([*(one.text for one in found), error.hint])
        raise
