"""Publishing a commit: one conditional put.

When its answer is lost it is read back. When that does not tell, the outcome is indeterminate, and the next command
decides it before it does anything else (snapshots/deciding.py).
"""

from __future__ import annotations

import time

from snapshots.commit_file import commit_to_json
from snapshots.commits import (
    VOID_BYTES_MAX,
    VOID_SCHEMA,
    SnapshotExistsError,
    called,
    commit_key,
    find_place,
    increments_pruned,
)
from snapshots.documents import ManifestError, read_document, sealed
from snapshots.manifest import Commit
from snapshots.tombstones import check_not_deleted, is_only_full
from storage.errors import BusyError, IndeterminateError, SnapshotError, UnreachableError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore

READ_BACK_PAUSES_SECONDS = (0.2, 1.0, 3.0)


class OperationSettledError(BusyError):
    """While the operation was away, another command took it for dead and settled that it has not committed."""


class CommitIndeterminateError(IndeterminateError):
    """The commit's answer was lost, and reading it back did not tell."""


def publish(store: ObjectStore, commit: Commit, turn: int = 1) -> None:
    """Make the snapshot or increment exist.

    Raises SnapshotExistsError if another operation did, OperationSettledError if another one decided that this has not
    committed, CommitIndeterminateError if nobody can tell.
    """
    key = commit_key(commit.snapshot, commit.increment, turn)
    check_predecessor(store, commit)
    body = sealed(commit_to_json(commit))
    if len(body) <= VOID_BYTES_MAX:
        raise RuntimeError(f"a commit file of {len(body)} bytes would be taken for a void")
    try:
        store.create(key, body)
    except ObjectExistsError as error:
        # Not an answer either: it may be that of a retry of this very put.
        _read_back(store, key, commit, error, at_once=True)
    except AnswerLostError as error:
        _read_back(store, key, commit, error)


def check_predecessor(store: ObjectStore, commit: Commit) -> None:
    """Raise unless the commit before is the one that this one was made for, and nobody has deleted it meanwhile."""
    check_not_deleted(store, commit.snapshot)
    if commit.previous is None:
        return
    document = find_place(store, commit.snapshot, commit.increment - 1).document or {}
    if (document.get("operation"), document.get("digest")) != (commit.previous.operation, commit.previous.digest):
        raise ManifestError(
            f"{called(commit.snapshot, commit.increment - 1)} is not the one that this increment was made for",
            hint="somebody changed the store by hand; see: snapshot check",
            details={"snapshot": commit.snapshot, "increment": commit.increment - 1},
        )
    if is_only_full(store, commit.snapshot):
        raise increments_pruned(commit.snapshot)


def _is_ours(store: ObjectStore, key: str, commit: Commit, error: SnapshotError) -> None:
    """Return if what is there is this very commit, else raise what it means."""
    document = read_document(store, key)
    if document.get("schema") == VOID_SCHEMA:
        raise operation_settled(commit.operation) from error
    if document.get("operation") != commit.operation:
        raise _taken(commit) from error


def _read_back(store: ObjectStore, key: str, commit: Commit, lost: SnapshotError, *, at_once: bool = False) -> None:
    for pause in (0.0, *READ_BACK_PAUSES_SECONDS) if at_once else READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        try:
            _is_ours(store, key, commit, lost)
        except (ObjectMissingError, UnreachableError, ManifestError):
            # Not stored, or not yet: a put may arrive later. And a body that was cut short tells as little as none.
            continue
        return
    what = called(commit.snapshot, commit.increment)
    raise CommitIndeterminateError(
        f"whether {what} was stored is not known: the answer to its commit was lost",
        hint="run: snapshot list   once the store answers; the next command settles it",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "operation": commit.operation},
    ) from lost


def operation_settled(operation_id: str) -> OperationSettledError:
    """The error for an operation that another command took for dead."""
    return OperationSettledError(
        f"operation {operation_id} was settled by another command while it was away",
        hint="nothing of it is committed; repeat the command",
        details={"operation": operation_id},
    )


def _taken(commit: Commit) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"{called(commit.snapshot, commit.increment)} was committed by another operation in the meantime",
        hint="nothing of this attempt remains visible; see: snapshot list",
        details={"snapshot": commit.snapshot, "increment": commit.increment},
    )
