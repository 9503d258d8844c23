"""Publishing a commit: one conditional put.

When its answer is lost it is read back. When that does not tell, the outcome is indeterminate, and the next command
decides it before it does anything else (snapshots/operations/deciding.py).
"""

from __future__ import annotations

from snapshots.records.commit import Commit, Previous, Void
from snapshots.records.commits import (
    VOID_BYTES_MAX,
    SnapshotExistsError,
    commit_key,
    find_place,
    increment_label,
    increments_pruned_error,
    read_turn,
)
from snapshots.records.documents import ManifestError, seal
from snapshots.records.tombstones import check_not_deleted, is_only_full
from storage.errors import BusyError, IndeterminateError, SnapshotError
from storage.store import AnswerLostError, ObjectExistsError, ObjectStore
from storage.storing import NOTHING_TOLD, read_back


class OperationSettledError(BusyError):
    """While the operation was away, another command took it for dead and settled that it has not committed."""


class CommitIndeterminateError(IndeterminateError):
    """The commit's answer was lost, and reading it back did not tell."""


def put_commit(store: ObjectStore, commit: Commit, turn: int = 1) -> None:
    """Make the snapshot or increment exist.

    Raises SnapshotExistsError if another operation did, OperationSettledError if another one decided that this has not
    committed, CommitIndeterminateError if nobody can tell.
    """
    key = commit_key(commit.snapshot, commit.increment, turn)
    check_predecessor(store, commit)
    body = seal(commit)
    if len(body) <= VOID_BYTES_MAX:
        raise RuntimeError(f"a commit file of {len(body)} bytes would be taken for a void")
    try:
        store.create(key, body)
    except ObjectExistsError as error:
        # Not an answer either: it may be that of a retry of this very put.
        _check_stored(store, key, commit, error, at_once=True)
    except AnswerLostError as error:
        _check_stored(store, key, commit, error, at_once=False)


def check_predecessor(store: ObjectStore, commit: Commit) -> None:
    """Raise unless the commit before is the one that this one was made for, and nobody has deleted it meanwhile."""
    check_not_deleted(store, commit.snapshot)
    if commit.previous is None:
        return
    before = find_place(store, commit.snapshot, commit.increment - 1).commit
    if before is None or Previous(before.operation, before.digest) != commit.previous:
        raise ManifestError(
            f"{increment_label(commit.snapshot, commit.increment - 1)} is not the one that this increment was made for",
            hint="somebody changed the store by hand; see: snapshot check",
            details={"snapshot": commit.snapshot, "increment": commit.increment - 1},
        )
    if is_only_full(store, commit.snapshot):
        raise increments_pruned_error(commit.snapshot)


def _check_stored(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> None:
    """Return if this very commit is stored, else raise what is there instead, or that nobody can tell."""

    def is_ours() -> bool:
        found = read_turn(store, key)
        if isinstance(found, Void):
            raise operation_settled(commit.operation) from error
        if found.operation != commit.operation:
            raise _name_taken(commit) from error
        return True

    # A body that was cut short tells as little as none.
    if not read_back(is_ours, (*NOTHING_TOLD, ManifestError), at_once=at_once):
        what = increment_label(commit.snapshot, commit.increment)
        raise CommitIndeterminateError(
            f"whether {what} was stored is not known: the answer to its commit was lost",
            hint="run: snapshot list   once the store answers; the next command settles it",
            details={"snapshot": commit.snapshot, "increment": commit.increment, "operation": commit.operation},
        ) from error


def operation_settled(operation_id: str) -> OperationSettledError:
    """The error for an operation that another command took for dead."""
    return OperationSettledError(
        f"operation {operation_id} was settled by another command while it was away",
        hint="nothing of it is committed; repeat the command",
        details={"operation": operation_id},
    )


def _name_taken(commit: Commit) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"{increment_label(commit.snapshot, commit.increment)} was committed by another operation in the meantime",
        hint="nothing of this attempt remains visible; see: snapshot list",
        details={"snapshot": commit.snapshot, "increment": commit.increment},
    )
