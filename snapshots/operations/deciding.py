"""Deciding for good whether an operation has committed, when its process can't say.

A put whose answer was lost may arrive late, and a process that was stopped may go on. So it is not enough to look: who
finds no commit puts a *void* where it would be, by the same conditional put. One of the two is stored, and whoever
comes second learns of the other: an operation that was voided can't commit any more (docs/storage.md, "Deciding").
"""

from __future__ import annotations

from snapshots.records.commit import Void
from snapshots.records.commits import VOID_BYTES_MAX, commit_key, operation_of
from snapshots.records.documents import seal
from snapshots.records.operation_records import Intent
from snapshots.records.tombstones import is_deleted
from storage.errors import IndeterminateError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import read_back


class UndecidedError(IndeterminateError):
    """Whether an earlier operation has committed can't be told now, nor decided."""


def has_committed(store: ObjectStore, intent: Intent) -> bool:
    """Whether the operation's commit is in the store now. Changes nothing, so a late put may still bring it."""
    if intent.kind != "create" or is_deleted(store, intent.snapshot):
        return False
    try:
        return operation_of(store, key_of(intent)) == intent.operation
    except ObjectMissingError:
        return False


def decide(store: ObjectStore, intent: Intent) -> bool:
    """Whether the operation has committed; if it has not, it never will.

    Raises UndecidedError where the store does not tell, ManifestError where what is there can't be read.
    """
    if intent.kind != "create" or is_deleted(store, intent.snapshot):
        # Whatever arrives in a deleted snapshot is garbage.
        return False
    if has_committed(store, intent):
        return True
    key = key_of(intent)
    try:
        store.create(key, _void(intent))
    except ObjectExistsError:
        return operation_of(store, key) == intent.operation
    except AnswerLostError as error:
        found = read_back(lambda: operation_of(store, key) == intent.operation)
        if found is None:
            raise UndecidedError(
                f"whether operation {intent.operation} has committed can't be told: the store's answers get lost",
                hint="repeat once the store answers: it is decided before anything else",
                details={"operation": intent.operation, "object": key},
            ) from error
        return found
    return False


def key_of(intent: Intent) -> str:
    """The key of the commit file that a create is to write."""
    return commit_key(intent.snapshot, intent.increment, intent.turn)


def _void(intent: Intent) -> bytes:
    body = seal(Void(intent.snapshot, intent.increment, intent.operation))
    if len(body) > VOID_BYTES_MAX:
        raise RuntimeError(f"a void of {len(body)} bytes would be taken for a commit")
    return body
