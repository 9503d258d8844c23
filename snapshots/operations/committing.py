"""Put a commit: one conditional put.

If the answer to the put is lost, the commit is read back. If that is inconclusive, the result is indeterminate, and the
next command decides it before it does anything else (snapshots/operations/deciding.py).
"""

from __future__ import annotations

from cutline.snapshots.records.commit import Commit, Previous, Void
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.commits import (
    VOID_BYTES_MAX,
    SnapshotExistsError,
    chain_pruned_error,
    commit_key,
    find_place,
    increment_label,
    read_turn,
)
from cutline.snapshots.records.documents import DOCUMENT_BYTES_MAX, ManifestError, seal
from cutline.snapshots.records.tombstones import check_not_deleted, is_only_full
from cutline.storage.errors import BusyError, IndeterminateError, RefusedError, SnapshotError
from cutline.storage.store import AnswerLostError, EncryptionIgnoredError, ObjectExistsError, ObjectStore
from cutline.storage.storing import INCONCLUSIVE, read_back


class OperationSettledError(BusyError):
    """Another command took the operation for dead and settled it as not committed."""


class CommitTooLargeError(RefusedError):
    """The commit has more tables than a document can hold."""


class CommitIndeterminateError(IndeterminateError):
    """The answer to the commit's put was lost, and reading it back was inconclusive."""


def put_commit(store: ObjectStore, commit: Commit, turn: int = 1) -> None:
    """Make the snapshot or increment exist.

    Raises SnapshotExistsError if another operation committed it, OperationSettledError if another command settled this
    operation as not committed, CommitIndeterminateError if it is not known whether the commit was stored.
    """
    key = commit_key(commit.snapshot, commit.increment, turn)
    check_predecessor(store, commit)
    # A commit that no command would accept must not be stored.
    check_commit(commit)
    body = seal(commit)
    if len(body) > DOCUMENT_BYTES_MAX:
        raise CommitTooLargeError(
            f"the commit of {increment_label(commit.snapshot, commit.increment)} is too large: {len(body) >> 20} MiB",
            hint="take snapshots of fewer tables: --exclude-group, or divide the fleet",
            details={"snapshot": commit.snapshot, "increment": commit.increment},
        )
    if len(body) <= VOID_BYTES_MAX:
        raise RuntimeError(f"a commit file of {len(body)} bytes would be taken for a void")
    try:
        store.create(key, body)
    except ObjectExistsError as error:
        # Not a refusal yet: the store client may have retried this put after an answer was lost.
        _check_stored(store, key, commit, error, at_once=True)
    except AnswerLostError as error:
        _check_stored(store, key, commit, error, at_once=False)
    except EncryptionIgnoredError:
        # It is stored, so the snapshot exists. The next object that a command stores in this way shows the same.
        return


def check_predecessor(store: ObjectStore, commit: Commit) -> None:
    """Raise unless the previous commit is the one that this increment builds on, and nobody deleted it meanwhile."""
    check_not_deleted(store, commit.snapshot)
    if commit.previous is None:
        return
    before = find_place(store, commit.snapshot, commit.increment - 1).commit
    if before is None or Previous(before.operation, before.digest) != commit.previous:
        raise ManifestError(
            f"{increment_label(commit.snapshot, commit.increment - 1)} is not the commit that this increment builds on",
            hint="somebody changed the store by hand; run: snapshot check",
            details={"snapshot": commit.snapshot, "increment": commit.increment - 1},
        )
    if is_only_full(store, commit.snapshot):
        raise chain_pruned_error(commit.snapshot)


def _check_stored(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> None:
    """Return if this commit is stored; else raise the error for what is stored, or CommitIndeterminateError."""

    def is_ours() -> bool:
        stored = read_turn(store, key)
        if isinstance(stored, Void):
            raise operation_settled_error(commit.operation) from error
        if stored.operation != commit.operation:
            raise _name_taken_error(commit) from error
        return True

    # A truncated body is as inconclusive as none.
    if not read_back(is_ours, (*INCONCLUSIVE, ManifestError), at_once=at_once):
        what = increment_label(commit.snapshot, commit.increment)
        raise CommitIndeterminateError(
            f"it is not known whether {what} was committed: the store's answer was lost",
            hint="run: snapshot list   once the store answers; the next create, delete, prune or gc settles it",
            details={"snapshot": commit.snapshot, "increment": commit.increment, "operation": commit.operation},
        ) from error


def operation_settled_error(operation_id: str) -> OperationSettledError:
    """The error for an operation that another command settled as dead."""
    return OperationSettledError(
        f"operation {operation_id} was settled as not committed by another command",
        hint="this operation committed nothing; repeat the command",
        details={"operation": operation_id},
    )


def _name_taken_error(commit: Commit) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"{increment_label(commit.snapshot, commit.increment)} was committed by another operation in the meantime",
        hint="this operation committed nothing; run: snapshot list",
        details={"snapshot": commit.snapshot, "increment": commit.increment},
    )
