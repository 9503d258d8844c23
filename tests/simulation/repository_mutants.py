"""Deliberately broken protocols. Each patches one step of the product's code or of the store, and duplicates no code.

A simulation is worth what it catches: tests assert that it catches every one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar
from unittest.mock import patch

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.snapshots.operations import committing, settling
from cutline.snapshots.operations import operation as operations
from cutline.snapshots.operations.open_operations import is_open, read_open_intents
from cutline.snapshots.operations.operation import Operation
from cutline.snapshots.records import proven_chains
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import Intent
from cutline.storage.digest import digest
from cutline.storage.errors import SnapshotError
from cutline.storage.store import (
    AnswerLostError,
    ObjectExistsError,
    ObjectMissingError,
    ObjectStore,
    StoreUnreachableError,
)
from tests.simulation import create_processes, reading_processes
from tests.simulation.faulty_store import Bucket
from tests.simulation.removal_mutants import (
    conflicts_take_a_place,
    folder_is_a_snapshot,
    gc_takes_the_next_increment,
    gc_takes_what_is_open,
    gc_trusts_a_listing,
    increments_go_unmarked,
    mark_comes_last,
    tombstone_not_looked_for,
)

Mutant = Callable[[], AbstractContextManager[object]]
T = TypeVar("T")


@contextmanager
def _everywhere(name: str, broken: object, *modules: object) -> Iterator[None]:
    """Replace `name` in several modules with `broken`."""
    patches = [patch.object(module, name, broken) for module in modules]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def no_void() -> AbstractContextManager[object]:
    """Settle by looking for the commit, without putting a void."""
    return _everywhere("decide", committing.has_committed, settling, operations)


def outcome_decides() -> AbstractContextManager[object]:
    """Put no voids; instead, before it commits, an operation checks whether its outcome has been stored."""
    real = operations.commit_operation

    def broken(store: ObjectStore, operation: Operation, commit: Commit) -> None:
        if not is_open(store, operation.id):
            raise committing.operation_settled_error(operation.id)
        real(store, operation, commit)

    @contextmanager
    def both() -> Iterator[None]:
        with no_void(), patch.object(create_processes, "commit_operation", broken):
            yield

    return both()


def void_at_another_key() -> AbstractContextManager[object]:
    """Put the void under the key of the next turn instead of the operation's own commit key."""
    return patch.object(
        committing, "key_of", lambda one: proven_chains.commit_key(one.snapshot, one.increment, one.turn + 1)
    )


def interrupt_leaves_the_put() -> AbstractContextManager[object]:
    """Report an interrupted operation as failed without deciding whether its put was stored."""

    def broken(store: ObjectStore, intent: Intent) -> bool:
        return False

    return patch.object(operations, "decide", broken)


def taken_is_an_answer() -> AbstractContextManager[object]:
    """Take a 412 for another operation's commit without reading the object."""
    real = committing._check_stored

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> Commit:
        if isinstance(error, ObjectExistsError):
            raise committing._name_taken_error(commit)
        return real(store, key, commit, error, at_once=at_once)

    return patch.object(committing, "_check_stored", broken)


def lost_is_failed() -> AbstractContextManager[object]:
    """Report a commit whose answer was lost as failed."""

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> Commit:
        raise StoreUnreachableError(url=store.url, reason="no answer")

    return patch.object(committing, "_check_stored", broken)


def lost_is_stored() -> AbstractContextManager[object]:
    """Report a commit whose answer was lost as stored."""
    real = committing._check_stored

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> Commit:
        if not isinstance(error, AnswerLostError):
            return real(store, key, commit, error, at_once=at_once)
        return commit

    return patch.object(committing, "_check_stored", broken)


def one_look_is_enough() -> AbstractContextManager[object]:
    """Report a put whose answer was lost as failed if one read doesn't find it, though it may arrive later."""

    def broken(look: Callable[[], T], unclear: tuple[type[Exception], ...], *, at_once: bool) -> T:
        with suppress(ObjectMissingError):
            return look()
        raise StoreUnreachableError(url="", reason="it was not stored")

    return patch.object(committing, "read_back", broken)


def unconditional_put() -> AbstractContextManager[object]:
    """Let puts overwrite objects, as some S3 servers do."""
    real = Bucket.put

    def broken(bucket: Bucket, key: str, body: bytes) -> None:
        first = bucket.first_digests.get(key)
        bucket.stored.delete(key)
        real(bucket, key, body)
        bucket.first_digests[key] = first or digest(body)

    return patch.object(Bucket, "put", broken)


def turn_used_again() -> AbstractContextManager[object]:
    """Use the same turn again after a void."""

    def broken(store: ObjectStore, name: str, increment: int) -> int:
        proven_chains.free_turn(store, name, increment)
        return 1

    return patch.object(create_processes, "free_turn", broken)


def slots_dropped_first() -> AbstractContextManager[object]:
    """Settle by dropping an operation's slots before deciding whether it has committed."""
    real = settling.settle_operations

    def broken(store: ObjectStore, fleet: Fleet, progress: Progress) -> None:
        for operation in read_open_intents(store):
            if operation.slot:
                settling.drop_slots([], operation.slot)
        real(store, fleet, progress)

    return patch.object(create_processes, "settle_operations", broken)


def undone_though_committed() -> AbstractContextManager[object]:
    """After an error, drop the slots of a create even if it has committed."""
    real = operations.decide

    def broken(store: ObjectStore, intent: Intent) -> bool:
        real(store, intent)
        return False

    return patch.object(operations, "decide", broken)


def listing_counts() -> AbstractContextManager[object]:
    """Rely on the listing for increments instead of reading them by key."""
    real = proven_chains.find_place

    def broken(store: ObjectStore, name: str, increment: int, named: str = "") -> proven_chains.CommitPlace:
        is_listed = not increment or increment in proven_chains.listed_numbers(store, name)
        return real(store, name, increment, named) if is_listed else proven_chains.CommitPlace("", 1, None)

    return patch.multiple(proven_chains, read_place=broken, find_place=broken)


def not_verified() -> AbstractContextManager[object]:
    """Restore without verifying the digests of objects."""

    def broken(store: ObjectStore, node: str, key: str, listed: tuple[int, str]) -> bytes:
        return store.read(key)

    return patch.object(reading_processes, "read_listed", broken)


def settles_nothing() -> AbstractContextManager[object]:
    """Begin an operation without settling the earlier ones."""

    def broken(store: ObjectStore, fleet: Fleet, progress: Progress) -> None: ...

    return patch.object(create_processes, "settle_operations", broken)


def nothing_recorded() -> AbstractContextManager[object]:
    """Create slots without storing an intent first."""

    @contextmanager
    def broken(store: ObjectStore, operation: Operation, undo: Callable[[], bool] | None = None) -> Iterator[None]:
        yield

    return patch.object(create_processes, "record_operation", broken)


def lost_object_is_stored() -> AbstractContextManager[object]:
    """Take an object whose answer was lost for stored."""

    def broken(store: ObjectStore, key: str, body: bytes) -> None:
        with suppress(AnswerLostError):
            store.create(key, body)

    return patch.object(create_processes, "create_or_find", broken)


def name_is_used_again() -> AbstractContextManager[object]:
    """Create without looking for a tombstone."""
    return _everywhere("check_not_deleted", lambda store, name, hint="": None, create_processes, committing)


# Each mutant with the promises that it may break; a history reports the first that it finds broken.
MUTANTS: Mapping[Mutant, str] = {
    no_void: "settled|slots|continues|refused",
    outcome_decides: "settled|slots|continues|refused",
    void_at_another_key: "settled|slots|continues|refused",
    interrupt_leaves_the_put: "settled|slots|continues|refused",
    taken_is_an_answer: "refused",
    lost_is_failed: "refused",
    lost_is_stored: "kept|continues",
    one_look_is_enough: "refused",
    unconditional_put: "overwritten|numbers|refused|kept",
    turn_used_again: "continues",
    slots_dropped_first: "continues|slots",
    undone_though_committed: "continues|slots|settled",
    listing_counts: "kept",
    not_verified: "restores|errors",
    settles_nothing: "settled|slots",
    nothing_recorded: "slots",
    lost_object_is_stored: "restores|continues",
    folder_is_a_snapshot: "whole",
    mark_comes_last: "whole|kept|continues|garbage",
    name_is_used_again: "deleted|numbers",
    tombstone_not_looked_for: "deleted|whole",
    increments_go_unmarked: "whole|kept|continues|garbage|restores",
    gc_takes_what_is_open: "restores|continues|garbage",
    gc_takes_the_next_increment: "restores|continues|garbage",
    gc_trusts_a_listing: "restores|continues|garbage",
    conflicts_take_a_place: "checked",
}
