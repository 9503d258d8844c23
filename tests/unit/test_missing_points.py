"""Restore points that were committed, and whose commit files are gone: list, metrics, check and restore say it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cutline.check import structure
from cutline.check.structure import check_structure, names_to_check
from cutline.cli.commands.list import entry_document, lines_of
from cutline.cli.main import run
from cutline.fleet.config import WEEKLY, Fleet, Retention, load_fleet
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.snapshots.listing import listing
from cutline.snapshots.listing.listing import find_doubts, list_store, read_restorable
from cutline.snapshots.listing.metrics_gathering import read_facts, samples_of_store
from cutline.snapshots.operations.ended_operations import EndedReader
from cutline.snapshots.operations.open_operations import document_names, read_recorded_commits
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    commit_key,
    increments_pruned_error,
    read_chain,
)
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.records.tombstones import is_deleted, only_full_key, put_mark
from cutline.snapshots.removal.deletion import plan_deletion
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_chains import FLEET
from tests.unit.made_checks import ended, point
from tests.unit.made_commits import mark
from tests.unit.made_fleets import new_fleet, store_chain

TIMES = ("2026-11-20T00:00:00Z", "2026-11-20T01:00:00Z", "2026-11-20T02:00:00Z")


@pytest.fixture
def fleet() -> Fleet:
    """With a full snapshot and two increments of `daily`, and the records of their operations."""
    # Without merges, the chain would be warned of once it is old.
    made = new_fleet(replace(FLEET, retention=Retention(merge_seconds=WEEKLY)))
    store_chain(made, "daily", *TIMES)
    return made


@pytest.fixture
def store(fleet: Fleet) -> ObjectStore:
    return fleet.store.open()


def metric_of(fleet: Fleet, name: str) -> float:
    facts = read_facts(fleet, EndedReader(100))
    (value,) = [one.value for one in samples_of_store(facts, datetime.now(UTC)) if one.metric.name == name]
    return value


def conflicts_of(store: ObjectStore) -> list[str]:
    recorded = read_recorded_commits(store)
    reports = [check_structure(store, "", name, None, recorded[name])[1] for name in names_to_check(store, recorded)]
    return [str(one.object) for report in reports for one in report.conflicts if one.kind != "fleet"]


def doubts_of(store: ObjectStore, *, is_newest: bool = True) -> tuple[str, ...]:
    return find_doubts(store, document_names(store), read_chain(store, "daily"), is_newest=is_newest)


def test_nothing_is_missing_of_a_chain_that_is_whole(fleet: Fleet, store: ObjectStore) -> None:
    assert list_store(fleet).missing == ()
    assert metric_of(fleet, "cutline_missing_restore_points") == 0
    assert doubts_of(store) == ()


def test_the_newest_increment_is_missed(fleet: Fleet, store: ObjectStore) -> None:
    store.delete(commit_key("daily", 2))
    listing = list_store(fleet)
    assert [(one.snapshot, one.increment) for one in listing.missing] == [("daily", 2)]
    (line,) = [one for one in lines_of(listing, datetime.now(UTC)) if "is missing" in str(one)]
    assert "increment 2 of daily was committed, but its commit file is missing from the store" in str(line)
    assert commit_key("daily", 2) in str(line)
    assert metric_of(fleet, "cutline_missing_restore_points") == 1
    assert conflicts_of(store) == [commit_key("daily", 2)]
    assert doubts_of(store) == tuple(listing.warnings)
    moment = datetime(2027, 1, 1, tzinfo=UTC)
    for request in (RestoreRequest("daily"), RestoreRequest("daily", at=moment)):
        assert plan_restore(fleet, fleet, request).report().warnings == listing.warnings
    assert plan_restore(fleet, fleet, RestoreRequest("daily", 1)).report().warnings == []
    # Whoever asks for an earlier one does not need it.
    assert doubts_of(store, is_newest=False) == ()


def test_a_snapshot_of_which_nothing_is_left_is_missed(fleet: Fleet, store: ObjectStore) -> None:
    for key in store.list("snapshots"):
        store.delete(key)
    assert [(one.snapshot, one.increment) for one in list_store(fleet).missing] == [("daily", n) for n in (0, 1, 2)]
    assert metric_of(fleet, "cutline_missing_restore_points") == 3
    assert conflicts_of(store) == [commit_key("daily", 0)]
    (text,) = list_store(fleet).warnings
    assert text.startswith(
        "snapshot daily was committed, but its commit file is missing from the store (as are those of later"
    )
    assert text.endswith("if there is no copy, delete the snapshot: snapshot delete daily --force")
    with pytest.raises(SnapshotMissingError):
        plan_deletion(store, fleet, "daily", force=False)
    with pytest.raises(SnapshotMissingError):
        plan_deletion(store, fleet, "unknown", force=True)
    planned = plan_deletion(store, fleet, "daily", force=True).mark
    # Nodes may still keep WAL for it.
    assert (planned.slots, planned.nodes) == ((slot_name("op-daily-0"),), ("a", "b"))
    put_mark(store, planned)
    assert list_store(fleet).warnings == []


def test_recorded_increments_prove_that_a_snapshot_was_there(store: ObjectStore) -> None:
    for key in store.list("snapshots"):
        store.delete(key)
    _, report = check_structure(store, "", "daily", None, {"op-daily-1": 1})
    assert [one.kind for one in report.conflicts] == ["commit"]


def test_what_was_deleted_or_pruned_is_not_missed(fleet: Fleet, store: ObjectStore) -> None:
    put_mark(store, mark(only_full=True))
    for number in (1, 2):
        store.delete(commit_key("daily", number))
    assert list_store(fleet).missing == ()
    assert conflicts_of(store) == []
    put_mark(store, mark())
    for key in store.list("snapshots"):
        store.delete(key)
    assert list_store(fleet).missing == ()
    assert metric_of(fleet, "cutline_missing_restore_points") == 0
    assert conflicts_of(store) == []


def test_what_has_failed_is_not_missed(fleet: Fleet, store: ObjectStore) -> None:
    intent = new_operation("create", "daily", 3, ("a",))
    begin(store, intent)
    record_outcome(store, intent, "failed", "node-unreachable")
    assert list_store(fleet).missing == ()


def test_conflicts_that_stand_are_counted_whatever_was_checked_since_and_told_before_a_restore(
    fleet: Fleet, store: ObjectStore
) -> None:
    assert metric_of(fleet, "cutline_snapshots_with_conflicts") == 0
    ended(store, 1, point("daily", 2, "conflicts"))
    ended(store, 2, point("weekly", 0))
    ended(store, 3, point("daily", 2, "inconclusive", full=False))
    assert metric_of(fleet, "cutline_snapshots_with_conflicts") == 1
    (doubt,) = doubts_of(store)
    assert doubt.startswith("a check of daily up to increment 2, which ended at ")
    ended(store, 4, point("daily", 2))
    assert metric_of(fleet, "cutline_snapshots_with_conflicts") == 0
    assert doubts_of(store) == ()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_what_is_left_before_a_commit_that_is_damaged_or_gone_is_named(store: ObjectStore, *, is_damaged: bool) -> None:
    key = commit_key("daily", 2 if is_damaged else 1)
    store.delete(key)
    if is_damaged:
        store.create(key, b"{}")
    with pytest.raises((ManifestError, SnapshotMissingError)) as raised:
        read_restorable(store, "daily", None)
    last = 1 if is_damaged else 0
    assert raised.value.hint.endswith(
        f"increments that can still be restored: 0 to {last}; to restore the newest:"
        f" snapshot restore daily --increment {last}"
    )
    assert read_restorable(store, "daily", last).last.increment == last
    store.delete(commit_key("daily", 0))
    with pytest.raises((ManifestError, SnapshotMissingError)) as raised:
        read_restorable(store, "daily", None)
    assert "can still be restored" not in raised.value.hint


def test_what_a_damaged_mark_may_have_said_is_not_missed(fleet: Fleet, store: ObjectStore) -> None:
    store.create(only_full_key("daily"), b"{")
    store.delete(commit_key("daily", 2))
    assert list_store(fleet).missing == ()


def test_what_a_listing_lacks_is_looked_for_by_its_key(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    list_children = InMemoryStore.list_children
    monkeypatch.setattr(
        InMemoryStore, "list_children", lambda store, key: [] if key == "snapshots" else list_children(store, key)
    )
    listing = list_store(fleet)
    assert listing.entries == ()
    assert listing.missing == ()


def test_only_what_is_gone_is_missing_of_a_chain(fleet: Fleet, store: ObjectStore) -> None:
    store.delete(commit_key("daily", 0))
    assert [one.increment for one in list_store(fleet).missing] == [0]
    put_mark(store, mark(only_full=True))
    for number in (1, 2):
        store.delete(commit_key("daily", number))
    assert [one.increment for one in list_store(fleet).missing] == [0]


def test_of_a_deleted_snapshot_its_mark_is_read_once(
    fleet: Fleet, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_mark(store, mark())
    for key in store.list("snapshots"):
        store.delete(key)
    asked: list[str] = []
    monkeypatch.setattr(listing, "is_deleted", lambda store, name: asked.append(name) or is_deleted(store, name))
    assert list_store(fleet).missing == ()
    assert asked == ["daily"]


def test_what_is_gone_within_a_chain_is_named_once_by_the_snapshot(fleet: Fleet, store: ObjectStore) -> None:
    store.delete(commit_key("daily", 1))
    listing = list_store(fleet)
    assert [one.state for one in listing.entries] == ["broken"]
    assert listing.missing == ()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_restore_points_before_a_gap_are_listed_and_can_be_restored(*, is_damaged: bool) -> None:
    made = new_fleet(FLEET)
    times = [f"2026-11-20T0{hour}:00:00Z" for hour in range(5)]
    store_chain(made, "daily", *times)
    store, gone = made.store.open(), commit_key("daily", 3)
    store.delete(gone)
    if is_damaged:
        store.create(gone, b"{}" * 1000)
    listing = list_store(made)
    (entry,) = listing.entries
    assert (entry.state, [one.increment for one in entry.summaries]) == ("broken", [1, 2])
    assert gone in str(entry.problem)
    document = entry_document(entry)
    assert [(one["number"], one["created_at"]) for one in document["increments"]] == [(1, times[1]), (2, times[2])]
    for number in range(3):
        assert plan_restore(made, made, RestoreRequest("daily", number)).report().increment == number
    assert metric_of(made, "cutline_restore_points") == 3


def test_increments_that_are_pruned_while_a_check_reads_them_are_no_bug(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_pruned(*_: object) -> Chain:
        raise increments_pruned_error("daily")

    monkeypatch.setattr(structure, "read_from_merge", read_pruned)
    with pytest.raises(SnapshotMissingError, match="were pruned"):
        check_structure(store, "", "daily", None, {"op-daily-1": 1})


def test_commands_in_the_output_name_the_fleet_file_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'name = "shop"\nstore = "{tmp_path}/store"\n[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1"\n')
    fleet = load_fleet(file)
    ensure_identity(fleet.store.open(), fleet)
    assert run(["--fleet", str(file), "list"]) == 0
    assert f"take one: snapshot --fleet {file} create NAME" in capsys.readouterr().out
