"""Decide for good whether an operation has committed, when its own process can't say.

A put whose answer was lost may arrive late, and a suspended process may continue. So reading alone is not enough: if
there is no commit, a *void* is put in its place, by the same conditional put. Exactly one of the two is stored, and the
second put fails: an operation that was voided can no longer commit (docs/storage.md, "Deciding").
"""

from __future__ import annotations

from cutline.snapshots.records.commit import Void
from cutline.snapshots.records.commits import VOID_BYTES_MAX, commit_key, operation_of
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.tombstones import is_deleted
from cutline.storage.errors import IndeterminateError
from cutline.storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import read_back


class UndecidedError(IndeterminateError):
    """It is not known whether an earlier operation has committed, and it can't be decided now."""


def has_committed(store: ObjectStore, intent: Intent) -> bool:
    """Whether the operation's commit is in the store now. Changes nothing, so a late put may still store it."""
    if intent.kind != "create" or is_deleted(store, intent.snapshot):
        return False
    try:
        return operation_of(store, key_of(intent)) == intent.operation
    except ObjectMissingError:
        return False


def decide(store: ObjectStore, intent: Intent) -> bool:
    """Return whether the operation has committed; if it has not, it never will.

    Raises UndecidedError if the store's answers are lost, ManifestError if the stored document can't be read.
    """
    if intent.kind != "create" or is_deleted(store, intent.snapshot):
        # An object that arrives in a deleted snapshot is garbage.
        return False
    if has_committed(store, intent):
        return True
    key = key_of(intent)
    try:
        store.create(key, _void(intent))
    except ObjectExistsError:
        return operation_of(store, key) == intent.operation
    except AnswerLostError as error:
        is_committed = read_back(lambda: operation_of(store, key) == intent.operation)
        if is_committed is None:
            raise UndecidedError(
                f"it is not known whether operation {intent.operation} has committed: the store's answers were lost",
                hint="repeat the command once the store answers: it decides this operation first",
                details={"operation": intent.operation, "object": key},
            ) from error
        return is_committed
    return False


def key_of(intent: Intent) -> str:
    """The key of the commit file that a create writes."""
    return commit_key(intent.snapshot, intent.increment, intent.turn)


def _void(intent: Intent) -> bytes:
    body = seal(Void(intent.snapshot, intent.increment, intent.operation))
    if len(body) > VOID_BYTES_MAX:
        raise RuntimeError(f"a void of {len(body)} bytes would be taken for a commit")
    return body
