"""What others have removed from a chain, or settled, while an operation read it.

An operation that was suspended until its lease expired may find that objects are missing, those that it reads or those
that it has stored itself. Before it calls them damaged, it looks for what others have done meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from cutline.snapshots.operations.committing import OperationSettledError, operation_settled_error
from cutline.snapshots.operations.open_operations import RESTORE
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.merged_chain import check_kept
from cutline.snapshots.records.operation_records import DONE, Intent, operation_key, read_outcome
from cutline.snapshots.records.proven_chains import SnapshotMissingError, check_name, increments_pruned_error
from cutline.snapshots.records.tombstones import check_not_deleted, is_known_only_full
from cutline.storage.errors import BusyError, IndeterminateError, SnapshotError, UnreachableError, UsageError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

# Errors that others' removal of objects does not explain, or that name another operation themselves.
UNRELATED = (UnreachableError, IndeterminateError, UsageError, BusyError)
# A restore also fails because of its targets.
OF_THE_STORE = (ObjectMissingError, ObjectDamagedError, ManifestError, SnapshotMissingError)


class BeginningGivenUpError(BusyError):
    """What lay before a merge was given up while a command was reading it; the command can be repeated."""


@contextmanager
def naming_removal(store: ObjectStore, intent: Intent, begins_at: int, *, is_stored: bool = True) -> Iterator[None]:
    """If the block fails because of what others have done, as after a long suspension, raise the error that says so.

    See check_not_removed. Raises OperationSettledError if another command has settled the operation, which seemed dead,
    or has continued and completed it; it is recorded in the store, unless `is_stored` is false.
    """
    try:
        yield
    except Exception as error:
        kinds = OF_THE_STORE if intent.kind == RESTORE else Exception
        if (
            isinstance(error, kinds)
            and not isinstance(error, UNRELATED)
            and (found := _find_removal(store, intent, begins_at, is_stored=is_stored))
        ):
            raise found from error
        raise


@contextmanager
def naming_removed(
    store: ObjectStore, name: str, increment: int = 0, begins_at: int | None = None
) -> Iterator[Callable[[], None]]:
    """If the block can't read the chain, raise the errors of check_not_removed instead, if they apply.

    Without `begins_at`, the chain is read in the block. Yields a function that raises these errors at once, for damage
    that the block only reports.
    """
    begins_at = first_increment(store, check_name(name)) if begins_at is None else begins_at
    check = partial(check_not_removed, store, name, increment, begins_at)
    try:
        yield check
    except OF_THE_STORE:
        with suppress(UnreachableError):
            check()
        raise


def _find_removal(store: ObjectStore, intent: Intent, begins_at: int, *, is_stored: bool) -> SnapshotError | None:
    """Return the error for what others have done meanwhile; None for nothing, or if the store does not tell."""
    try:
        check_not_removed(store, intent.snapshot, intent.increment, begins_at)
        outcome = read_outcome(store, intent.id) if is_stored else None
        if outcome is not None and outcome.state == DONE:
            return OperationSettledError(
                f"another process has continued operation {intent.id}, which seemed dead, and has completed it",
                hint=f"nothing is left to do; see: snapshot show {intent.snapshot}",
                details={"operation": intent.id},
            )
        # What was settled long ago is removed.
        is_settled = is_stored and (outcome is not None or not store.exists(operation_key(intent.id, "intent")))
    except (UnreachableError, IndeterminateError, ManifestError):
        return None
    except SnapshotError as error:
        return error
    return operation_settled_error(intent.id) if is_settled else None


def check_not_removed(store: ObjectStore, name: str, increment: int, begins_at: int) -> None:
    """Raise unless the chain up to the increment is still there; `begins_at` is the increment with which it began.

    Raises SnapshotDeletedError, SnapshotMissingError if the increments were pruned, MergedAwayError if the increment
    was given up, and BeginningGivenUpError if only what lay before it was given up.
    """
    check_not_deleted(store, name)
    if increment and is_known_only_full(store, name):
        raise increments_pruned_error(name)
    if begins_at >= (first := first_increment(store, name)):
        return
    check_kept(store, name, increment)
    raise BeginningGivenUpError(
        f"the restore points of {name} before increment {first} were given up while this command was reading them",
        hint=f"repeat the command: the chain begins at increment {first} now",
        details={"snapshot": name, "increment": increment, "first": first},
    )
