"""`list` beside commands that remove what it reads: it shows the snapshot as it is then, and never as broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cutline.snapshots.listing.listing import read_entry
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.store_identity import StoreIdentity
from cutline.snapshots.records.tombstones import put_mark
from cutline.storage.memory import InMemoryStore
from tests.unit.made_chains import store_chain
from tests.unit.made_commits import mark, unused_url

TIMES = tuple(f"2026-11-20T0{hour}:00:00Z" for hour in range(4))


@dataclass(frozen=True, slots=True)
class ChangingStore(InMemoryStore):
    """A store in which something happens right before a key is read for the first time."""

    happening: dict[str, Callable[[], None]] = field(default_factory=dict)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        if key in self.happening:
            self.happening.pop(key)()
        return InMemoryStore.read_range(self, key, start, length)


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("is_pruned", [True, False])
def test_a_snapshot_that_is_removed_while_it_is_read_is_not_broken(before: int, *, is_pruned: bool) -> None:
    store = ChangingStore(unused_url())
    identity = StoreIdentity("fleet", "shop")
    store_chain(store, "daily", *TIMES)

    def remove() -> None:
        put_mark(store, mark(only_full=is_pruned))
        for one in store.inventory("snapshots/daily"):
            if not is_pruned or "/increments/" in one.key:
                store.delete(one.key)

    store.happening[commit_key("daily", before)] = remove
    entry = read_entry(store, identity, "daily")
    assert not store.happening
    if is_pruned:
        assert entry is not None
        assert (entry.problem, entry.is_only_full, entry.summaries) == (None, True, ())
    else:
        assert entry is None
