"""Chains to delete and prune, and a store whose process dies at a chosen call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from cutline.check.stored_entries import check_listing
from cutline.check.structure import check_structure, names_to_check
from cutline.fleet.config import Retention
from cutline.snapshots.records.commit import Void
from cutline.snapshots.records.proven_chains import read_turn, snapshot_names
from cutline.snapshots.records.tombstones import is_only_full
from cutline.snapshots.removal.deletion import DeletionResult, delete_locked
from cutline.snapshots.removal.pruning import PruneResult, prune_locked
from cutline.snapshots.removal.removing import COMMIT_FILE
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.unit.made_chains import InMemoryNodes, new_removal_run, nodes_of, store_chain
from tests.unit.made_commits import memory

OLD = ("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z", "2020-01-03T00:00:00Z")
NEW = ("2020-02-01T00:00:00Z", "2020-02-02T00:00:00Z")
CALLS_MAX = 400


def delete(store: ObjectStore, nodes: InMemoryNodes, name: str = "old", *, force: bool = False) -> DeletionResult:
    return delete_locked(new_removal_run(store, nodes, force=force), name, lambda _plan: None)


def prune(store: ObjectStore, nodes: InMemoryNodes, *, force: bool = False, **rules: Any) -> PruneResult:
    return prune_locked(new_removal_run(store, nodes, force=force), Retention(**rules), lambda _plan: None)


def store_two_chains(store: ObjectStore) -> InMemoryNodes:
    return nodes_of(store_chain(store, "old", *OLD), store_chain(store, "new", *NEW))


def read_chain_lists(store: ObjectStore, name: str) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.list(f"snapshots/{name}")}


class CrashError(BaseException):
    """The process died: none of its handlers changes the store any more."""


@dataclass(slots=True)
class CrashingStore:
    """A store whose process dies at call number `at`, before the call takes effect or after."""

    store: InMemoryStore
    at: int
    takes_effect: bool
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if not callable(method):
            return method

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and self.takes_effect:
                method(*arguments)
            if self.calls >= self.at:
                raise CrashError
            return method(*arguments)

        return call


def check_after_crash(store: InMemoryStore, before: dict[str, bytes], others: dict[str, bytes]) -> None:
    """Check what must hold wherever the process died."""
    names = snapshot_names(store)
    assert read_chain_lists(store, "new") == others
    if "old" in names and not is_only_full(store, "old"):
        assert read_chain_lists(store, "old") == before
    # No commit file lists an object that is missing.
    for key in [key for key in store.list("snapshots/old") if COMMIT_FILE.fullmatch(key)]:
        commit = read_turn(store, key)
        assert not isinstance(commit, Void)
        listed = [one.key for segments in commit.segments.values() for one in segments]
        assert all(store.exists(one) for one in listed), key
    for name in names_to_check(store, {"old": {"op-old-0": 0, "op-old-1": 1}}):
        chain, report = check_structure(store, "fleet", name, None, {"op-old-1": 1} if name == "old" else {})
        assert chain is not None
        check_listing(store, chain, report)
        assert report.conflicts == []
        assert name in names


def crash_everywhere(run: Callable[[ObjectStore, InMemoryNodes], object], check_end: Callable[..., None]) -> int:
    """Let `run` die before and after each of its store calls, and repeat it each time; return the number of calls."""
    for takes_effect in (False, True):
        for at in count(1):
            store = memory()
            nodes = store_two_chains(store)
            before, others = read_chain_lists(store, "old"), read_chain_lists(store, "new")
            crashing = CrashingStore(store, at, takes_effect)
            try:
                run(crashing, nodes)  # type: ignore[arg-type]  # it has all of a store's methods
                is_over = True
            except CrashError:
                is_over = False
            check_after_crash(store, before, others)
            run(store, nodes)
            check_end(store, nodes, before, others)
            if is_over:
                break
            assert at < CALLS_MAX
    return at
