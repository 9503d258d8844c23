"""What the metrics say of snapshots, nodes and the store, and the names and labels that they have."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from cutline.fleet.config import Retention
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.restore.estimates.estimate import RestoreStep
from cutline.snapshots.fold import limits
from cutline.snapshots.listing import metrics, metrics_gathering
from cutline.snapshots.listing.listing import age_problem, newest_cut
from cutline.snapshots.listing.metrics_endpoint import render
from cutline.snapshots.listing.metrics_gathering import (
    EntryReader,
    MetricsGatherer,
    archived_positions,
    chains_by_cut,
    read_facts,
    samples_of_nodes,
    samples_of_store,
)
from cutline.snapshots.operations.ended_operations import EndedReader
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import cut_time, read_chain
from cutline.snapshots.removal.earlier_objects import drop_earlier_objects, plan_drop
from cutline.storage.location import StoreLocation
from cutline.wal.drain.lags import FleetLags, NodeLags, ReplayLag, SlotLag
from tests.unit import made_checks
from tests.unit.document_kinds import FLEET
from tests.unit.made_chains import FLEET as SHARD_FLEET
from tests.unit.made_commits import unused_url
from tests.unit.made_fleets import new_fleet, store_chain
from tests.unit.metric_values import METRICS, of, read
from tests.unit.test_merged_repairs import merge, new_shard

NOW = datetime.now(UTC)


def test_names_units_and_labels_follow_prometheus_conventions() -> None:
    assert len({one.name for one in METRICS}) == len(METRICS)
    for one in METRICS:
        assert one.name.startswith("cutline_"), one.name
        # A gauge is no counter, and has base units.
        assert not one.name.endswith(("_total", "_count", "_sum", "_bucket", "_info")) or one is metrics.BUILD_INFO
        assert not any(word in one.name for word in ("milli", "micro", "minute", "hour", "_kb", "_mb", "percent"))
        assert one.help.endswith(".")
        assert metrics.FLEET not in one.labels


def test_steps_are_those_of_a_restore() -> None:
    assert tuple(RestoreStep) == metrics.RESTORE_STEPS
    assert metrics.WAL_STEP == RestoreStep.FOLD


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", 'x"} 1\ncutline_up{a="', "日本", "\\n", ""])
def test_hostile_names_stay_in_their_label(name: str) -> None:
    text = render(name, [metrics.SNAPSHOT_BYTES.of(5, name), metrics.SNAPSHOT_BYTES.of(6, "other")])
    (family,) = text_string_to_metric_families(text.decode())
    assert [(one.labels, one.value) for one in family.samples] == [
        ({"fleet": name, "snapshot": name}, 5.0),
        ({"fleet": name, "snapshot": "other"}, 6.0),
    ]
    assert family.documentation == metrics.SNAPSHOT_BYTES.help


def test_a_sample_has_the_labels_of_its_metric() -> None:
    with pytest.raises(ValueError, match="labels"):
        metrics.NODE_UP.of(1, "a")


def test_the_newest_cut_and_the_sizes_are_those_of_the_commits() -> None:
    fleet = new_fleet(SHARD_FLEET)
    times = [f"2026-11-20T0{hour}:00:00Z" for hour in range(3)]
    store_chain(fleet, "daily", *times)
    store_chain(fleet, "weekly", "2026-11-19T00:00:00Z")
    facts = read_facts(fleet, EndedReader(100))
    found = read(samples_of_store(facts, NOW))
    commits = {one.name: [*one.chain.commits] for one in facts.entries if one.chain}
    assert of(metrics.RESTORE_POINTS, found) == {"": 4}
    assert of(metrics.SNAPSHOT_INCREMENTS, found) == {"daily": 2, "weekly": 0}
    assert of(metrics.SNAPSHOTS, found)["complete"] == 2
    last = commits["daily"][-1]
    cut_at = datetime.fromisoformat(times[-1]).timestamp() + last.seconds
    assert of(metrics.NEWEST_CUT, found) == {"": pytest.approx(cut_at)}
    sizes = of(metrics.SNAPSHOT_BYTES, found)
    assert of(metrics.COMMITTED_BYTES, found) == {"": sum(sizes.values())}
    assert set(of(metrics.SUCCESS, found)) == {"full", "increment"}
    # The outcomes of what has committed are not read.
    assert facts.ended.found == ()


def test_the_newest_cut_is_one_that_can_be_restored() -> None:
    fleet = new_fleet(SHARD_FLEET)
    store_chain(fleet, "daily", "2026-11-20T00:00:00Z")
    store_chain(fleet, "later", "2026-11-21T00:00:00Z")
    facts = read_facts(fleet, EndedReader(100))
    daily, later = facts.entries
    assert later.chain
    without_rows = structs.replace(later, chain=Chain(structs.replace(later.chain.full, only_cut=True)))
    cut_at = datetime.fromisoformat("2026-11-20T00:00:00Z").timestamp() + later.chain.full.seconds
    for other in (without_rows, structs.replace(later, problem="commit 1 is missing")):
        found = read(samples_of_store(structs.replace(facts, entries=(daily, other)), NOW))
        assert of(metrics.NEWEST_CUT, found) == {"": pytest.approx(cut_at)}
        nothing = read(samples_of_store(structs.replace(facts, entries=(other,)), NOW))
        assert metrics.NEWEST_CUT.name not in nothing


def test_restore_points_that_were_given_up_after_a_merge_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # The merge has no session.
    monkeypatch.setattr(limits, "CHANGES_MAX", 100)
    shard, reader = new_shard(), EntryReader()
    shard.take()

    def gathered() -> Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]:
        return read(samples_of_store(read_facts(shard.fleet, EndedReader(100), reader), NOW))

    assert of(metrics.RESTORE_POINTS, gathered()) == {"": 4}
    for increment, left in ((1, 3), (2, 2)):
        counts = merge(shard, increment).merge.counts
        drop_earlier_objects(shard.store, plan_drop(shard.store, "daily"), Silent())
        found = gathered()
        assert of(metrics.RESTORE_POINTS, found) == {"": left}
        assert of(metrics.SNAPSHOT_INCREMENTS, found) == {"daily": left}
        following = read_chain(shard.store, "daily").commits_after(increment)
        assert of(metrics.COMMITTED_BYTES, found) == {
            "": counts["bytes"] + sum(commit.counts["bytes"] for commit in following)
        }


def test_a_cut_in_the_future_does_not_hide_that_there_are_no_new_ones() -> None:
    """A clock was wrong when it was made. Alone, it counts."""
    fleet, now = new_fleet(SHARD_FLEET), datetime.fromisoformat("2026-11-22T00:00:00Z")
    store_chain(fleet, "ahead", "2098-01-01T00:00:00Z")
    store_chain(fleet, "daily", "2026-11-20T00:00:00Z", "2026-11-20T01:00:00Z")
    facts = read_facts(fleet, EndedReader(100))
    ahead, daily = facts.entries
    for entries, chain in (((ahead, daily), daily.chain), ((ahead,), ahead.chain)):
        assert chain
        cut_at = cut_time(chain.last)
        found = read(samples_of_store(structs.replace(facts, entries=entries), now))
        assert of(metrics.NEWEST_CUT, found) == {"": pytest.approx(cut_at.timestamp())}
        assert newest_cut(entries, now) == cut_at
    limited = Retention(max_age_seconds=3600)
    assert "is 47.0 h old" in age_problem(newest_cut((ahead, daily), now), limited, now)


def test_a_check_counts_up_to_the_cut_that_it_has_read() -> None:
    fleet = new_fleet()
    store = fleet.store.open()
    store_chain(fleet, "old", "2026-11-19T00:00:00Z", "2026-11-19T01:00:00Z")
    store_chain(fleet, "new", "2026-11-20T00:00:00Z", "2026-11-20T01:00:00Z", "2026-11-20T02:00:00Z")

    old, new = ([cut_time(one).timestamp() for one in read_chain(store, name).commits] for name in ("old", "new"))

    def newest_checked() -> dict[str, float]:
        return of(metrics.CHECKED_CUT, read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW)))

    assert newest_checked() == {}
    made_checks.ended(store, 1, made_checks.point("old", 1))
    made_checks.ended(store, 2, made_checks.point("new", 2, "conflicts"), made_checks.point("new", 2, full=False))
    assert newest_checked() == {"": old[1]}
    made_checks.ended(store, 3, made_checks.point("new", 1))
    assert newest_checked() == {"": new[1]}
    # The check of the older snapshot ended later.
    made_checks.ended(store, 4, made_checks.point("old", 1))
    assert newest_checked() == {"": new[1]}


def test_of_many_snapshots_only_the_newest_are_named() -> None:
    fleet = new_fleet(SHARD_FLEET)
    for number in range(1, 24):
        store_chain(fleet, f"n{number:02d}", f"2026-11-{number:02d}T00:00:00Z")
    found = read(samples_of_store(read_facts(fleet, EndedReader(100)), NOW))
    assert set(of(metrics.SNAPSHOT_BYTES, found)) == {f"n{number:02d}" for number in range(4, 24)}
    assert of(metrics.RESTORE_POINTS, found) == {"": 23}


def lags_of(lags: NodeLags) -> FleetLags:
    return FleetLags(FLEET, {}, {"a": lags})


def test_what_is_not_known_of_a_node_is_absent() -> None:
    (node,) = FLEET.nodes
    away = read(samples_of_nodes(lags_of(NodeLags("a", "no answer")), {"a": Lsn(5)}))
    assert set(away) == {metrics.NODE_UP.name, metrics.RETAINED_LIMIT.name, metrics.PROMOTED.name}
    assert of(metrics.NODE_UP, away) == {"a/primary": 0}
    lags = NodeLags("a", position=Lsn(1000), slots=(SlotLag("cutline_x", 300, 400),))
    there = read(samples_of_nodes(lags_of(lags), {}))
    assert of(metrics.SLOT_LAG, there) == {"a/cutline_x": 300}
    assert of(metrics.RETAINED, there) == {"a/cutline_x": 400}
    assert of(metrics.SLOT_UNUSABLE, there) == {"a/cutline_x": 0}
    assert of(metrics.PROMOTED, there) == {"a": 0}
    assert of(metrics.RETAINED_LIMIT, there) == {"a": node.retained_wal_bytes_max}
    assert metrics.ARCHIVE_LAG.name not in there
    assert metrics.REPLAY_LAG.name not in there
    archived = read(samples_of_nodes(lags_of(lags), {"a": Lsn(900)}))
    assert of(metrics.ARCHIVE_LAG, archived) == {"a": 100}
    late = structs.replace(lags, is_in_recovery=True, replay=ReplayLag(50, None))
    standby = read(samples_of_nodes(lags_of(late), {}))
    assert of(metrics.REPLAY_LAG, standby) == {"a": 50}
    assert metrics.REPLAY_LAG_SECONDS.name not in standby


def test_the_archive_is_as_far_as_the_newest_commit_says_not_the_highest_position() -> None:
    fleet = new_fleet(SHARD_FLEET)
    store_chain(fleet, "old", "2026-11-19T00:00:00Z", "2026-11-19T01:00:00Z")
    store_chain(fleet, "new", "2026-11-20T00:00:00Z")
    facts = read_facts(fleet, EndedReader(100))
    old, new = facts.chains
    assert [old.name, new.name] == ["old", "new"]
    node = next(iter(new.full.parts))
    expected = new.last.segments[node][-1].through
    assert archived_positions([old, new])[node] == expected
    assert chains_by_cut(reversed(facts.entries)) == [old, new]


def test_a_store_that_is_not_there_is_down_and_nodes_are_told_all_the_same(tmp_path: Path) -> None:
    fleet = replace(FLEET, nodes=(replace(FLEET.nodes[0], dsn=f"host={tmp_path} dbname=x"),))
    fleet = replace(fleet, store=StoreLocation(unused_url()))
    gathered = MetricsGatherer().gather(fleet)
    found = read(gathered.samples)
    assert of(metrics.STORE_UP, found) == {"": 0}
    assert of(metrics.NODE_UP, found) == {"a/primary": 0}
    assert metrics.SNAPSHOTS.name not in found
    assert metrics.OPEN_OPERATIONS.name not in found
    assert len(gathered.problems) == 2


def test_a_store_that_hangs_keeps_one_thread_and_no_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer = threading.Event()
    fleet = replace(new_fleet(), nodes=(replace(FLEET.nodes[0], dsn=f"host={tmp_path} dbname=x"),))
    asked: list[float] = []

    def hang(*_: object) -> object:
        asked.append(time.monotonic())
        answer.wait(30)
        return read_facts(fleet, EndedReader(1))

    monkeypatch.setattr(metrics_gathering, "read_facts", hang)
    gatherer = MetricsGatherer()
    began = time.monotonic()
    for _ in range(3):
        assert of(metrics.STORE_UP, read(gatherer.gather(fleet, 0.2).samples)) == {"": 0}
    assert time.monotonic() - began < 30
    assert len(asked) == 1
    answer.set()
    deadline = time.monotonic() + 30
    while of(metrics.STORE_UP, read(gatherer.gather(fleet, 5.0).samples)) != {"": 1}:
        assert time.monotonic() < deadline
