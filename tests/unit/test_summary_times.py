"""Commits summarize when the cuts before them were made; histories of earlier versions, which lack it, still count."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import UNSET, structs

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


def store_timed_chain(increments: int, without: int) -> InMemoryStore:
    """A chain of which every commit says when its cut was made; the first `without` increments summarize it nowhere."""
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
            if number <= without:
                recent = tuple(structs.replace(one, cut_at=UNSET, safe_at=UNSET) for one in history.recent)
                history = structs.replace(history, recent=recent)
            made = structs.replace(made, previous=Previous(last.operation, last.digest), history=history)
        put_commit(store, counted(made))
        last = read_commit(store, "daily", number)
    return store


@pytest.mark.parametrize("without", [0, 1, 5, 7, BLOCK, BLOCK + 2])
def test_summaries_say_when_cuts_were_made_and_those_of_earlier_versions_still_count(without: int) -> None:
    store = store_timed_chain(BLOCK + 2, without)
    whole, newest = read_chain(store, "daily"), read_newest_part(store, "daily")
    assert [cut_time(one) for one in whole.commits] == [
        datetime.fromisoformat(made_at(number)) for number in range(BLOCK + 3)
    ]
    times = [cut_time(one) for one in read_summaries(store, newest)]
    # Where no summary says it, the time at which the commit was put counts: it began at 00:00:00 and took a second.
    put_at = datetime(2026, 11, 20, 0, 0, 1, tzinfo=UTC)
    # The summaries of 1 to 63 are in increment 64, those of 64 and 65 in 66. Each is written with the commit after.
    lacking = {number for number in range(1, BLOCK + 2) if number < without}
    assert times == [
        put_at if number in lacking else datetime.fromisoformat(made_at(number)) for number in range(1, BLOCK + 3)
    ]
    assert [safe_time(one) for one in read_summaries(store, newest)] == [
        None if number in lacking else made_at(number - 1) for number in range(1, BLOCK + 3)
    ]
