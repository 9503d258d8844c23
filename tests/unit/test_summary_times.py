"""Commits summarize when the cuts before them were made."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from cutline.fleet.record import Time
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.commit import Commit, Increment, Previous
from cutline.snapshots.records.proven_chains import (
    cut_time,
    read_chain,
    read_commit,
    read_newest_part,
    read_summaries,
    safe_time,
)
from cutline.storage.memory import InMemoryStore
from tests.unit.made_commits import commit, counted, memory

BLOCK = 64


def made_at(number: int) -> Time:
    """When the cut of commit `number` was made: a tenth of a second after the one before."""
    return Time.of(datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=0.6 + number / 10))


def store_timed_chain(increments: int) -> InMemoryStore:
    """A chain of which every commit says when its cut was made."""
    store = memory()
    last: Commit | None = None
    for number in range(increments + 1):
        made = commit(number, position=100 * (number + 1))
        # Nothing is ever committed, so the safe time is that of the only node's marker.
        nodes = tuple(structs.replace(one, marked_at=made_at(number - 1)) for one in made.cut.nodes)
        cut = structs.replace(made.cut, made_at=made_at(number), nodes=nodes, safe_at=made_at(number - 1))
        made = structs.replace(made, cut=cut)
        if isinstance(made, Increment) and last:
            history = read_chain(store, "daily").next_history
            made = structs.replace(made, previous=Previous(last.operation, last.digest), history=history)
        put_commit(store, counted(made))
        last = read_commit(store, "daily", number)
    return store


@pytest.mark.parametrize("increments", [1, BLOCK - 1, BLOCK, BLOCK + 2])
def test_summaries_say_when_cuts_were_made(increments: int) -> None:
    store = store_timed_chain(increments)
    whole, newest = read_chain(store, "daily"), read_newest_part(store, "daily")
    times = [datetime.fromisoformat(made_at(number)) for number in range(increments + 1)]
    assert [cut_time(one) for one in whole.commits] == times
    summaries = read_summaries(store, newest)
    assert [cut_time(one) for one in summaries] == times[1:]
    assert [safe_time(one) for one in summaries] == [made_at(number - 1) for number in range(1, increments + 1)]
