"""A snapshot whose commits are whole and one of whose marks is damaged: every command is of one opinion about it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cutline.cli.commands.list import entry_document, lines_of
from cutline.cli.commands.prune import plan_lines
from cutline.cli.output.flat_list import flat_rows
from cutline.fleet.config import Fleet, Retention
from cutline.fleet.progress import Silent
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.figures import figures_of, gaps_of
from cutline.snapshots.listing.listing import Listing, read_entry, show_snapshot
from cutline.snapshots.listing.metrics_gathering import read_facts, samples_of_store
from cutline.snapshots.operations.ended_operations import EndedReader
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.operation import current_time, new_operation
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.end_marks import EndMark, check_chain_not_ended, end_key, mark_end
from cutline.snapshots.records.proven_chains import check_not_pruned, read_chain
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import only_full_key
from cutline.snapshots.removal.deletion import plan_deletion
from cutline.snapshots.removal.pruning import plan_prune
from cutline.wal.drain.lags import RetainedAnswers
from tests.unit.made_chains import FLEET
from tests.unit.made_fleets import new_fleet, store_chain
from tests.unit.metric_values import of, read

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
TIMES = tuple(f"2026-11-20T0{hour}:00:00Z" for hour in range(3))
END, PRUNED = end_key("daily", "op-daily-0"), only_full_key("daily")
HINTS = {END: "or remove it: the next increment will show", PRUNED: "if nobody pruned snapshot daily"}
MARKS = pytest.mark.parametrize("key", [END, PRUNED])


@pytest.fixture
def fleet() -> Fleet:
    made = new_fleet(FLEET)
    store_chain(made, "daily", *TIMES)
    return made


def listing_of(fleet: Fleet) -> Listing:
    store = fleet.store.open()
    entry = read_entry(store, read_identity(store, fleet), "daily")
    assert entry is not None
    return Listing((entry,), RetainedAnswers((), {}))


@MARKS
def test_all_restore_points_are_listed_and_the_mark_is_named_with_what_to_do(fleet: Fleet, key: str) -> None:
    fleet.store.open().create(key, b"{")
    listing = listing_of(fleet)
    (entry,) = listing.entries
    document = entry_document(entry)
    assert (document["state"], document["ended"]) == ("ended", None)
    assert [one["number"] for one in document["increments"]] == [1, 2]
    for problem in (document["problem"], entry.remark):
        assert key in problem
        assert HINTS[key] in problem
    _, remark, *_ = lines_of(listing, NOW)
    assert remark == f"snapshot daily: {entry.problem}"
    rows = list(flat_rows(listing))
    assert [(row["increment"], row["state"], row["problem"]) for row in rows] == [
        (number, "ended", entry.problem) for number in range(3)
    ]


@MARKS
def test_it_is_shown_and_restored_and_counts_as_restorable(fleet: Fleet, key: str) -> None:
    store = fleet.store.open()
    store.create(key, b"{")
    for increment in (None, 1, 0):
        details = show_snapshot(fleet, "daily", increment)
        assert details.chain.last.increment == (2 if increment is None else increment)
        assert key in details.entry.remark
    assert read_chain(store, "daily").last.increment == 2
    with hold_lease(store, new_operation("restore", "daily", 2, ("a",)), Silent()):
        pass
    figures = figures_of(details.entry, read_chain(store, "daily"))
    assert (figures.is_counted, figures.is_given_up, len(figures.points)) == (True, False, 3)
    assert gaps_of([figures], NOW).found == ()


@MARKS
def test_it_gets_no_increments_until_somebody_has_looked_at_the_mark(fleet: Fleet, key: str) -> None:
    store = fleet.store.open()
    store.create(key, b"{")
    with pytest.raises(ManifestError, match="is damaged") as refused:
        check_goes_on(fleet)
    assert refused.value.details["object"] == key
    assert HINTS[key] in refused.value.hint
    store.delete(key)
    check_goes_on(fleet)


def check_goes_on(fleet: Fleet) -> None:
    store = fleet.store.open()
    check_not_pruned(store, "daily")
    check_chain_not_ended(store, read_chain(store, "daily"))


@MARKS
def test_it_is_never_pruned_and_can_be_deleted(fleet: Fleet, key: str) -> None:
    store = fleet.store.open()
    store_chain(fleet, "newer", "2026-11-21T00:00:00Z")
    store.create(key, b"{")
    plan = plan_prune(store, fleet, Retention(last=1), force=False)
    assert plan.steps == ()
    *_, line, nothing = plan_lines(plan)
    assert line.startswith(
        f"daily: kept: it is damaged, so it is not known what would be lost (object {key} is damaged"
    )
    assert nothing == "nothing to prune"
    deletion = plan_deletion(store, fleet, "daily", force=False)
    assert [one.increment for one in deletion.mark.points] == [0, 1, 2]


def test_a_mark_that_can_be_read_is_told_beside_one_that_can_not(fleet: Fleet) -> None:
    store = fleet.store.open()
    mark_end(store, EndMark("daily", "op-daily-0", 2, "a", current_time()))
    store.create(PRUNED, b"{")
    (entry,) = listing_of(fleet).entries
    assert (entry.state, len(entry.summaries)) == ("ended", 2)
    assert entry.ended is not None
    assert PRUNED in str(entry.problem)


def test_of_two_damaged_marks_both_are_named(fleet: Fleet) -> None:
    store = fleet.store.open()
    store.create(PRUNED, b"{")
    store.create(END, seal({"schema": "cutline/ended/2", "why": "another reason"}))
    (entry,) = listing_of(fleet).entries
    problem = str(entry.problem)
    assert PRUNED in problem
    assert END in problem
    assert "a newer version of Cutline may have written it" in problem


@MARKS
def test_they_are_counted_and_snapshots_that_are_broken_are_counted_apart(fleet: Fleet, key: str) -> None:
    for damaged in (False, True):
        if damaged:
            fleet.store.open().create(key, b"{")
        found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
        assert of(metrics.DAMAGED_MARKS, found) == {"": damaged}
        assert of(metrics.SNAPSHOTS, found)["broken"] == 0
