"""Chains to delete and prune, and a store that ends whoever asks it at any call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from check.structure import check_listing, check_structure, names_to_check
from fleet.config import Retention
from snapshots.records.commit import Void
from snapshots.records.commits import (
    read_turn,
    snapshot_names,
)
from snapshots.records.tombstones import (
    is_only_full,
)
from snapshots.removal.deletion import (
    DeletionResult,
    delete_locked,
)
from snapshots.removal.pruning import PruneResult, prune_locked
from snapshots.removal.removal import COMMIT_FILE
from storage.memory import InMemoryStore
from storage.store import ObjectStore
from tests.unit.made_chains import HeldNodes, deleting, nodes_of, take
from tests.unit.made_commits import memory

OLD = ("2020-01-01T00:00:00Z", "2020-01-02T00:00:00Z", "2020-01-03T00:00:00Z")
NEW = ("2020-02-01T00:00:00Z", "2020-02-02T00:00:00Z")
CALLS_MAX = 400


def delete(store: ObjectStore, nodes: HeldNodes, name: str = "old", *, force: bool = False) -> DeletionResult:
    return delete_locked(deleting(store, nodes, force=force), name, lambda _plan: None)


def prune(store: ObjectStore, nodes: HeldNodes, *, force: bool = False, **rules: int) -> PruneResult:
    return prune_locked(deleting(store, nodes, force=force), Retention(**rules), lambda _plan: None)


def two_chains(store: ObjectStore) -> HeldNodes:
    return nodes_of(take(store, "old", *OLD), take(store, "new", *NEW))


def contents(store: ObjectStore, name: str) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.list(f"snapshots/{name}")}


class CrashError(BaseException):
    """The process is gone: no handler of its own does anything in the store any more."""


@dataclass(slots=True)
class Crashing:
    """A store whose process dies around its call number `at`, before that has an effect or after."""

    store: InMemoryStore
    at: int
    is_done_first: bool
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if not callable(method):
            return method

        def called(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and self.is_done_first:
                method(*arguments)
            if self.calls >= self.at:
                raise CrashError
            return method(*arguments)

        return called


def check_between(store: InMemoryStore, before: dict[str, bytes], others: dict[str, bytes]) -> None:
    """What must hold wherever it ended."""
    names = snapshot_names(store)
    assert contents(store, "new") == others
    if "old" in names and not is_only_full(store, "old"):
        assert contents(store, "old") == before
    # Never a commit file whose objects are not there.
    for key in [key for key in store.list("snapshots/old") if COMMIT_FILE.fullmatch(key)]:
        commit = read_turn(store, key)
        assert not isinstance(commit, Void)
        listed = [one.key for found in commit.segments.values() for one in found]
        assert all(store.exists(one) for one in listed), key
    for name in names_to_check(store, {"old": {"op-old-0": 0, "op-old-1": 1}}):
        chain, report = check_structure(store, "fleet", name, None, {"op-old-1": 1} if name == "old" else {})
        assert chain is not None
        check_listing(store, chain, report)
        assert report.conflicts == []
        assert name in names


def crash_everywhere(run: Callable[[ObjectStore, HeldNodes], object], check_end: Callable[..., None]) -> int:
    """Let `run` die before and after each of its store calls in turn, then repeat it; how many calls it makes."""
    for is_done_first in (False, True):
        for at in count(1):
            store = memory()
            nodes = two_chains(store)
            before, others = contents(store, "old"), contents(store, "new")
            crashing = Crashing(store, at, is_done_first)
            try:
                run(crashing, nodes)  # type: ignore[arg-type]  # it has all of a store's methods
                is_over = True
            except CrashError:
                is_over = False
            check_between(store, before, others)
            run(store, nodes)
            check_end(store, nodes, before, others)
            if is_over:
                break
            assert at < CALLS_MAX
    return at
