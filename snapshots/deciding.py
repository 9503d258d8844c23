"""Deciding for good whether an operation has committed, when its process can't say.

A put whose answer was lost may arrive late, and a process that was stopped may go on. So it is not enough to look: who
finds no commit puts a *void* where it would be, by the same conditional put. One of the two is stored, and whoever
comes second learns of the other: an operation that was voided can't commit any more (docs/storage.md, "Deciding").
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from snapshots.commits import VOID_BYTES_MAX, VOID_SCHEMA, commit_key, operation_of
from snapshots.documents import sealed
from snapshots.publishing import READ_BACK_PAUSES_SECONDS
from snapshots.tombstones import is_deleted
from storage.errors import IndeterminateError, UnreachableError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore

if TYPE_CHECKING:
    from snapshots.operations import Operation


class UndecidedError(IndeterminateError):
    """Whether an earlier operation has committed can't be told now, nor decided."""


def has_committed(store: ObjectStore, operation: Operation) -> bool:
    """Whether the operation's commit is in the store now. Changes nothing, so a late put may still bring it."""
    if operation.kind != "create" or is_deleted(store, operation.snapshot):
        return False
    try:
        return operation_of(store, key_of(operation)) == operation.id
    except ObjectMissingError:
        return False


def decide(store: ObjectStore, operation: Operation) -> bool:
    """Whether the operation has committed; if it has not, it never will.

    Raises UndecidedError where the store does not tell, ManifestError where what is there can't be read.
    """
    if operation.kind != "create" or is_deleted(store, operation.snapshot):
        # Whatever arrives in a deleted snapshot is garbage.
        return False
    if has_committed(store, operation):
        return True
    key = key_of(operation)
    try:
        store.create(key, _void(operation))
    except ObjectExistsError:
        return operation_of(store, key) == operation.id
    except AnswerLostError as error:
        return _read_back(store, operation, error)
    return False


def key_of(operation: Operation) -> str:
    """The key of the commit file that a create is to write."""
    return commit_key(operation.snapshot, operation.increment, operation.turn)


def _void(operation: Operation) -> bytes:
    body = sealed({"schema": VOID_SCHEMA, "snapshot": operation.snapshot, "increment": operation.increment,
                   "voids": operation.id})  # fmt: skip
    if len(body) > VOID_BYTES_MAX:
        raise RuntimeError(f"a void of {len(body)} bytes would be taken for a commit")
    return body


def _read_back(store: ObjectStore, operation: Operation, lost: AnswerLostError) -> bool:
    for pause in READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        try:
            return operation_of(store, key_of(operation)) == operation.id
        except (ObjectMissingError, UnreachableError):
            continue
    raise UndecidedError(
        f"whether operation {operation.id} has committed can't be told: the store's answers get lost",
        hint="repeat once the store answers: it is decided before anything else",
        details={"operation": operation.id, "object": key_of(operation)},
    ) from lost
