"""Broken protocols of deleting, pruning and gc, for tests/simulation/repository_mutants.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from cutline.fleet.progress import Progress
from cutline.snapshots.listing import listing
from cutline.snapshots.records import operation_records, proven_chains
from cutline.snapshots.records.operation_records import Outcome
from cutline.snapshots.records.tombstones import Mark
from cutline.snapshots.removal import garbage_rules, pinning, pruning, removing
from cutline.snapshots.removal.node_cleanup import NodeCleanup
from cutline.storage.store import ObjectStore


def folder_is_a_snapshot() -> AbstractContextManager[object]:
    """Take any folder with objects for a snapshot."""
    return patch.object(proven_chains, "is_committed", lambda store, name: True)


def gc_takes_what_is_open() -> AbstractContextManager[object]:
    """Take an operation without an outcome for failed."""
    real = operation_records.read_outcome

    def broken(store: ObjectStore, owner: str) -> Outcome:
        return real(store, owner) or Outcome(
            operation=owner, kind="create", snapshot="", state="failed", reason="", ended_at=""
        )

    return patch.object(garbage_rules, "read_outcome", broken)


def gc_takes_the_next_increment() -> AbstractContextManager[object]:
    """Take the segments after the last committed one for garbage."""
    return patch.object(garbage_rules, "GARBAGE", garbage_rules.GARBAGE | {garbage_rules.GarbageReason.NEXT})


def gc_trusts_a_listing() -> AbstractContextManager[object]:
    """Take a commit that is missing in a listing for missing in the store."""
    real = garbage_rules.create_outcome

    def broken(store: ObjectStore, snapshot: str, owner: str) -> garbage_rules.CreateOutcome:
        shown = store.list_children(f"snapshots/{snapshot}")
        if not any(one.startswith("snapshot.") for one in shown):
            return garbage_rules.CreateOutcome(garbage_rules.GarbageVerdict(garbage_rules.GarbageReason.FAILED))
        return real(store, snapshot, owner)

    return patch.object(garbage_rules, "create_outcome", broken)


def mark_comes_last() -> AbstractContextManager[object]:
    """Store the mark of a removal after the objects are removed, not before."""
    real_put, real_remove = removing.put_mark, removing._remove

    def broken(
        store: ObjectStore,
        removed: removing.RemovalResult,
        one: removing.Removal,
        nodes: NodeCleanup,
        progress: Progress,
    ) -> removing.RemovalResult:
        found = real_remove(store, removed, one, nodes, progress)
        real_put(store, one.mark)
        return found

    @contextmanager
    def both() -> Iterator[None]:
        with (
            patch.object(removing, "put_mark", lambda store, mark, *, force: mark),
            patch.object(removing, "_remove", broken),
        ):
            yield

    return both()


@contextmanager
def tombstone_not_looked_for() -> Iterator[None]:
    """List everything that has a commit, even if it is deleted."""
    with (
        patch.object(proven_chains, "is_deleted", lambda store, name: False),
        patch.object(listing, "check_not_deleted", lambda store, name, hint="": None),
        patch.object(proven_chains, "check_not_deleted", lambda store, name, hint="": None),
    ):
        yield


def conflicts_take_a_place() -> AbstractContextManager[object]:
    """Prune by age and number alone, whatever checks have found."""
    return patch.object(pruning, "standing_check", lambda checks, count: None)


def pins_are_read_for_the_plan_only() -> AbstractContextManager[object]:
    """Don't read the pins again once the intent of a removal is stored."""
    return patch.object(removing, "check_not_pinned", lambda store, name, kind: None)


def pins_look_for_no_removal() -> AbstractContextManager[object]:
    """Pin a restore point without looking for removals that may not see the pin."""
    return patch.object(pinning, "_check_not_removed", lambda store, pin: None)


def increments_go_unmarked() -> AbstractContextManager[object]:
    """Prune increments without storing the mark."""
    real = removing.put_mark

    def broken(store: ObjectStore, mark: Mark, *, force: bool) -> Mark:
        return mark if mark.key.endswith("/only-full.json") else real(store, mark, force=force)

    return patch.object(removing, "put_mark", broken)
