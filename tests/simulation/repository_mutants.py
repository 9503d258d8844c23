"""Deliberately broken protocols: each breaks one step of the product's code, or of what it relies on, and copies none.

The simulation is worth what it catches; tests assert that it catches every one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TypeVar
from unittest.mock import patch

from fleet.config import Fleet
from fleet.progress import Progress
from snapshots.operations import committing as publishing
from snapshots.operations import deciding
from snapshots.operations import operation as operations
from snapshots.operations import settling as settle
from snapshots.operations.operation import Operation, is_open, pending_operations
from snapshots.records import commits, operation_records
from snapshots.records.commit import Commit
from snapshots.records.operation_records import Intent, Outcome
from snapshots.records.tombstones import Mark
from snapshots.removal import garbage, removal
from storage.digest import digest
from storage.errors import SnapshotError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore, StoreUnreachableError
from tests.simulation import create_processes, reading_processes
from tests.simulation.faulty_store import Bucket

Mutant = Callable[[], AbstractContextManager[object]]
T = TypeVar("T")


@contextmanager
def _everywhere(name: str, broken: object, *modules: object) -> Iterator[None]:
    """Put `broken` in the place of what several modules call `name`."""
    patches = [patch.object(module, name, broken) for module in modules]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def no_void() -> AbstractContextManager[object]:
    """Whoever settles looks whether the commit is there, and leaves it at that."""
    return _everywhere("decide", deciding.has_committed, settle, operations)


def outcome_decides() -> AbstractContextManager[object]:
    """There are no voids: before it commits, an operation looks whether somebody has stored its outcome."""
    real = operations.commit_operation

    def broken(store: ObjectStore, operation: Operation, commit: Commit) -> None:
        if not is_open(store, operation.id):
            raise publishing.operation_settled_error(operation.id)
        real(store, operation, commit)

    @contextmanager
    def both() -> Iterator[None]:
        with no_void(), patch.object(create_processes, "commit_operation", broken):
            yield

    return both()


def void_at_another_key() -> AbstractContextManager[object]:
    """The void is put where the next turn would be, not where the operation's own commit would."""
    return patch.object(deciding, "key_of", lambda one: commits.commit_key(one.snapshot, one.increment, one.turn + 1))


def interrupt_leaves_the_put() -> AbstractContextManager[object]:
    """An operation that is interrupted says that it failed, whatever becomes of its put."""

    def broken(store: ObjectStore, intent: Intent) -> bool:
        return False

    return patch.object(operations, "decide", broken)


def taken_is_an_answer() -> AbstractContextManager[object]:
    """A 412 is taken for another's commit without reading whose it is."""
    real = publishing._check_stored

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> None:
        if isinstance(error, ObjectExistsError):
            raise publishing._name_taken_error(commit)
        real(store, key, commit, error, at_once=at_once)

    return patch.object(publishing, "_check_stored", broken)


def lost_is_failed() -> AbstractContextManager[object]:
    """A commit whose answer was lost is said not to exist."""

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> None:
        raise StoreUnreachableError(url=store.url, reason="no answer")

    return patch.object(publishing, "_check_stored", broken)


def lost_is_stored() -> AbstractContextManager[object]:
    """A commit whose answer was lost is said to exist."""
    real = publishing._check_stored

    def broken(store: ObjectStore, key: str, commit: Commit, error: SnapshotError, *, at_once: bool) -> None:
        if not isinstance(error, AnswerLostError):
            real(store, key, commit, error, at_once=at_once)

    return patch.object(publishing, "_check_stored", broken)


def one_look_is_enough() -> AbstractContextManager[object]:
    """A put that is not seen after its answer was lost is said not to exist, though it may arrive later."""

    def broken(look: Callable[[], T], unclear: tuple[type[Exception], ...], *, at_once: bool) -> T:
        with suppress(ObjectMissingError):
            return look()
        raise StoreUnreachableError(url="", reason="it was not stored")

    return patch.object(publishing, "read_back", broken)


def unconditional_put() -> AbstractContextManager[object]:
    """The store puts one object in the place of another, as some S3 servers do."""
    real = Bucket.put

    def broken(bucket: Bucket, key: str, body: bytes) -> None:
        first = bucket.first.get(key)
        bucket.stored.delete(key)
        real(bucket, key, body)
        bucket.first[key] = first or digest(body)

    return patch.object(Bucket, "put", broken)


def turn_used_again() -> AbstractContextManager[object]:
    """The try after a void is put in the same turn."""

    def broken(store: ObjectStore, name: str, increment: int) -> int:
        commits.free_turn(store, name, increment)
        return 1

    return patch.object(create_processes, "free_turn", broken)


def slots_dropped_first() -> AbstractContextManager[object]:
    """Settling drops an operation's slots before it decides whether that has committed."""
    real = settle.settle_operations

    def broken(store: ObjectStore, fleet: Fleet, progress: Progress) -> None:
        for operation in pending_operations(store):
            if operation.slot:
                settle.drop_slots([], operation.slot)
        real(store, fleet, progress)

    return patch.object(create_processes, "settle_operations", broken)


def undone_though_committed() -> AbstractContextManager[object]:
    """After an error a create drops its slots without asking whether it has committed."""
    real = operations.decide

    def broken(store: ObjectStore, intent: Intent) -> bool:
        real(store, intent)
        return False

    return patch.object(operations, "decide", broken)


def listing_counts() -> AbstractContextManager[object]:
    """An increment that a listing does not show is not asked for."""
    real = commits._read_place

    def broken(store: ObjectStore, name: str, increment: int) -> commits.CommitPlace:
        return commits.CommitPlace("", 1, None) if increment else real(store, name, increment)

    return patch.object(commits, "_read_place", broken)


def not_verified() -> AbstractContextManager[object]:
    """A restore takes an object's bytes as they come."""

    def broken(store: ObjectStore, node: str, key: str, listed: tuple[int, str]) -> bytes:
        return store.read(key)

    return patch.object(reading_processes, "read_listed", broken)


def settles_nothing() -> AbstractContextManager[object]:
    """An operation begins whatever became of those before it."""

    def broken(store: ObjectStore, fleet: Fleet, progress: Progress) -> None: ...

    return patch.object(create_processes, "settle_operations", broken)


def nothing_recorded() -> AbstractContextManager[object]:
    """A create makes its slots without having stored what it is about to do."""

    @contextmanager
    def broken(store: ObjectStore, operation: Operation, undo: Callable[[], bool] | None = None) -> Iterator[None]:
        yield

    return patch.object(create_processes, "record_operation", broken)


def lost_object_is_stored() -> AbstractContextManager[object]:
    """An object that a commit lists is taken to be stored where nobody said so."""

    def broken(store: ObjectStore, key: str, body: bytes) -> None:
        with suppress(AnswerLostError):
            store.create(key, body)

    return patch.object(create_processes, "create_or_find", broken)


def folder_is_a_snapshot() -> AbstractContextManager[object]:
    """Whatever has objects is a snapshot."""
    return patch.object(commits, "_is_committed", lambda store, name: True)


def gc_takes_what_is_open() -> AbstractContextManager[object]:
    """An operation without an outcome is taken for dead."""
    real = operation_records.read_outcome

    def broken(store: ObjectStore, owner: str) -> Outcome:
        return real(store, owner) or Outcome(operation=owner, state="failed", reason="", ended_at="")

    return patch.object(garbage, "read_outcome", broken)


def gc_takes_the_next_increment() -> AbstractContextManager[object]:
    """The segments after the last that a commit lists are taken for garbage."""
    return patch.object(garbage, "GARBAGE", garbage.GARBAGE | {garbage.GarbageReason.NEXT})


def gc_trusts_a_listing() -> AbstractContextManager[object]:
    """A commit that a listing does not show is taken not to be there."""
    real = garbage.create_outcome

    def broken(store: ObjectStore, snapshot: str, owner: str) -> garbage.CreateOutcome:
        shown = store.list_children(f"snapshots/{snapshot}")
        if not any(one.startswith("snapshot.") for one in shown):
            return garbage.CreateOutcome(garbage.GarbageVerdict(garbage.GarbageReason.FAILED))
        return real(store, snapshot, owner)

    return patch.object(garbage, "create_outcome", broken)


def mark_comes_last() -> AbstractContextManager[object]:
    """What a deletion takes away is marked once it is gone."""
    real_put, real_remove = removal.put_mark, removal._remove

    def broken(
        store: ObjectStore,
        removed: removal.RemovalResult,
        one: removal.Removal,
        nodes: removal.NodeCleanup,
        progress: Progress,
    ) -> removal.RemovalResult:
        found = real_remove(store, removed, one, nodes, progress)
        real_put(store, one.mark)
        return found

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(removal, "put_mark", lambda store, mark: mark),
            patch.object(removal, "_remove", broken),
        ):
            yield

    return both()


def name_is_used_again() -> AbstractContextManager[object]:
    """A create does not look for a tombstone."""
    return _everywhere("check_not_deleted", lambda store, name: None, create_processes, publishing)


def tombstone_not_looked_for() -> AbstractContextManager[object]:
    """What has a commit is listed, deleted or not."""
    return patch.object(commits, "is_deleted", lambda store, name: False)


def increments_go_unmarked() -> AbstractContextManager[object]:
    """Pruning takes increments away without having said so."""
    real = removal.put_mark

    def broken(store: ObjectStore, mark: Mark) -> Mark:
        return mark if mark.key.endswith("/only-full.json") else real(store, mark)

    return patch.object(removal, "put_mark", broken)


# Each with the promises that it may break: the first that a history comes upon is named.
MUTANTS: Mapping[Mutant, str] = {
    no_void: "settled|slots|goes on|refused",
    outcome_decides: "settled|slots|goes on|refused",
    void_at_another_key: "settled|slots|goes on|refused",
    interrupt_leaves_the_put: "settled|slots|goes on|refused",
    taken_is_an_answer: "refused",
    lost_is_failed: "refused",
    lost_is_stored: "kept|goes on",
    one_look_is_enough: "refused",
    unconditional_put: "overwritten|numbers|refused|kept",
    turn_used_again: "goes on",
    slots_dropped_first: "goes on|slots",
    undone_though_committed: "goes on|slots|settled",
    listing_counts: "kept",
    not_verified: "restores|errors",
    settles_nothing: "settled|slots",
    nothing_recorded: "slots",
    lost_object_is_stored: "restores|goes on",
    folder_is_a_snapshot: "whole",
    mark_comes_last: "whole|kept|goes on|garbage",
    name_is_used_again: "deleted|numbers",
    tombstone_not_looked_for: "deleted|whole",
    increments_go_unmarked: "whole|kept|goes on|garbage|restores",
    gc_takes_what_is_open: "restores|goes on|garbage",
    gc_takes_the_next_increment: "restores|goes on|garbage",
    gc_trusts_a_listing: "restores|goes on|garbage",
}
