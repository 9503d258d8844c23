"""Increments go on while standbys are away, late, rebuilt, added or removed; a check says so until they are back.

Expected rows come from the live servers (COPY), and expected results of checks from what was done to the servers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

import cutline.check.resting as resting
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_gathering import gather_once
from cutline.snapshots.records.commit_rules import check_commit
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.snapshots.records.proven_chains import commit_key, read_as_committed, read_chain
from cutline.spark.needs import ExecutorNeeds, check_needs
from cutline.wal.drain.slots import COPY_SUFFIX
from cutline.wal.segments.archive import ArchiveError
from cutline.wal.segments.own_store import FLEET_KEY
from tests.commands.changing_fleet import ChangingFleet, absent_names, changing_fleet
from tests.commands.snapshot_runs import Ready, Runs, run_command, slots_of
from tests.commands.watching import Reached, Watching
from tests.servers.dealt import start_pair
from tests.unit.metric_values import of, read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBY, OTHER = "s1-b1", "s2-b1"
# The wait for a standby is ten seconds; a paused one is not waited for.
PAUSED_SECONDS_MAX = 6.0


class FailedError(Exception):
    """A test ends an increment."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("absent")) as pair:
        yield pair


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest
) -> Iterator[ChangingFleet]:
    with changing_fleet(*servers, tmp_path, spark, more=getattr(request, "param", "")) as found:
        try:
            yield found
        finally:
            for standby in (STANDBY, OTHER):
                found.start(standby)
                found.execute(standby, "SELECT pg_wal_replay_resume()")


def test_a_standby_that_is_away_is_left_out_and_catches_up(place: ChangingFleet) -> None:
    place.runs.full("chain")
    assert place.check().result == VALID
    place.stop(STANDBY)
    place.write()
    first = place.increment()
    place.write()
    second = place.increment()
    assert absent_names(first) == absent_names(second) == {STANDBY}
    assert [commit.absent[STANDBY].since for commit in (first, second)] == [1, 1]
    assert absent_metric(place) == {STANDBY: 1, OTHER: 0}
    report = place.check(since_last=True)
    assert report.result == INCONCLUSIVE
    assert [skipped.what for skipped in report.skipped if skipped.is_absent] == [f"the copy of {STANDBY}"]
    # The other shard has been compared nevertheless.
    assert report.compared.changes > 0

    place.start(STANDBY)
    place.write()
    third = place.increment()
    assert not third.absent
    assert not absent_names(third)
    assert absent_metric(place) == {STANDBY: 0, OTHER: 0}
    assert place.check(since_last=True).result == VALID
    assert place.check().result == VALID
    assert place.check(2).result == INCONCLUSIVE
    place.check_restores(1, 2, 3)


def absent_metric(place: ChangingFleet) -> dict[str, float]:
    return of(metrics.ABSENT_COPY, read(gather_once(place.fleet).samples))


def test_a_check_rests_on_a_check_without_the_same_copy(place: ChangingFleet) -> None:
    def check() -> tuple[int, bool]:
        """Return the exit code, and whether the check rests on an earlier one. Only commands leave records."""
        code, document = run_command(place.fleet, "check", "chain", "--since-last")
        return code, document["snapshots"][0]["rests_on"] is not None

    place.runs.full("chain")
    place.stop(STANDBY)
    place.write()
    place.increment()
    assert check() == (4, False)
    place.write()
    place.increment()
    assert check() == (4, True)
    place.start(STANDBY)
    place.write()
    place.increment()
    # Nothing has compared the standby's WAL of the time in between.
    assert check() == (0, False)


def test_a_standby_that_comes_back_within_a_limited_check_is_compared_as_a_whole(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that ended while it was away would leave the WAL of that time to be compared with nothing."""
    place.runs.full("chain")
    assert run_command(place.fleet, "check", "chain")[0] == 0
    place.stop(STANDBY)
    place.write()
    place.increment()
    place.start(STANDBY)
    place.write()
    assert not place.increment().absent
    monkeypatch.setattr(resting, "PART_BYTES", 0)
    (report,) = check_snapshots(
        place.fleet, CheckRequest("chain", seconds_max=600.0), place.runs.spark, Silent()
    ).snapshots
    assert report.rests_on is not None
    assert (report.result, report.conflicts, report.increment) == (VALID, [], 2)
    assert {(one.first, one.last) for one in report.uncompared_points} == {(1, 1)}


def test_a_paused_standby_is_not_waited_for(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.execute(STANDBY, "SELECT pg_wal_replay_pause()")
    place.write()
    began = time.monotonic()
    commit = place.increment()
    assert time.monotonic() - began < PAUSED_SECONDS_MAX
    assert commit.absent.keys() == {STANDBY}
    assert "paused" in commit.absent[STANDBY].reason
    place.execute(STANDBY, "SELECT pg_wal_replay_resume()")
    place.await_replay(STANDBY)
    assert not place.increment().absent
    assert place.check().result == VALID
    place.check_restores(1, 2)


def test_a_standby_lost_in_the_middle_is_left_out(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.write()

    class Stopping(Silent):
        def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
            if name == "archive WAL":
                place.stop(STANDBY)

    request = CreateRequest("chain", retries=0)
    commit = create_increment(place.fleet, request, place.runs.spark, Stopping())
    assert commit.absent.keys() == {STANDBY}
    place.states[1] = place.live_state()
    place.start(STANDBY)
    assert not place.increment().absent
    assert place.check().result == VALID
    place.check_restores(1, 2)


@pytest.mark.parametrize("back", [CrashPoint.ARCHIVED, CrashPoint.SEQUENCES_READ, None])
def test_a_standby_that_falls_while_tables_are_copied_keeps_no_slot_for_them(
    place: ChangingFleet, back: CrashPoint | None
) -> None:
    """It is dropped by the increment if the standby is back in time, committed or not, and otherwise by the next."""
    place.runs.full("chain")
    place.execute("s1", "CREATE TABLE added (id int PRIMARY KEY)")
    standby = place.fleet.node(STANDBY).dsn

    def copy_slots() -> list[str]:
        return [slot for slot in slots_of(standby) if slot.endswith(COPY_SUFFIX)]

    def fall(reached: Reached) -> None:
        if reached == Reached(CrashPoint.BASE_COPIED, 1):
            assert copy_slots()
            place.stop(STANDBY)
        elif reached.point == back and reached.count == 1:
            place.start(STANDBY)
            assert copy_slots()
            if back == CrashPoint.SEQUENCES_READ:
                raise FailedError

    if back == CrashPoint.SEQUENCES_READ:
        with pytest.raises(FailedError):
            create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, Watching(fall))
    else:
        commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, Watching(fall))
        assert absent_names(commit) == {STANDBY}
    if back is None:
        place.start(STANDBY)
        assert copy_slots()
        assert place.increment().renewed.keys() == {STANDBY}
    assert copy_slots() == []


def test_tables_that_change_meanwhile_end_the_copy(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.stop(STANDBY)
    place.execute("s1", "CREATE TABLE added (id int PRIMARY KEY)", "INSERT INTO added VALUES (1), (2)")
    place.execute("s2", "ALTER TABLE seen ADD COLUMN more int DEFAULT 7")
    place.write()
    commit = place.increment()
    assert commit.absent[STANDBY].has_ended
    assert "s1" in (commit.definition_changes.groups if commit.definition_changes else {})
    place.start(STANDBY)
    place.execute("s1", "INSERT INTO added VALUES (3)")
    place.write()
    second = place.increment()
    assert not second.absent
    assert second.renewed.keys() == {STANDBY}
    assert place.check(1).result == INCONCLUSIVE
    assert place.check().result == VALID
    place.check_restores(1, 2)
    place.check_restores_without("s1", 2)


def test_standbys_are_removed_and_added(place: ChangingFleet) -> None:
    place.runs.full("chain")
    whole = place.fleet
    fewer = replace(whole, nodes=tuple(node for node in whole.nodes if node.id != STANDBY))
    place.runs = Runs(fewer, place.runs.spark)
    place.write()
    commit = place.increment()
    assert commit.absent[STANDBY].has_ended
    assert place.check().result == INCONCLUSIVE

    place.runs.full("without")
    place.runs = Runs(whole, place.runs.spark)
    for name in ("chain", "without"):
        place.write()
        commit = place.increment(name)
        assert not commit.absent
        assert commit.renewed.keys() == {STANDBY}
        assert absent_names(commit) == set()
        assert place.check(name=name).result == VALID


def test_a_full_snapshot_does_without_a_standby(place: ChangingFleet) -> None:
    place.stop(STANDBY)
    full = place.runs.full("chain")
    assert absent_names(full) == {STANDBY}
    place.write()
    assert absent_names(place.increment()) == {STANDBY}
    report = place.check()
    assert report.result == INCONCLUSIVE
    assert not report.conflicts
    place.start(STANDBY)
    place.write()
    commit = place.increment()
    assert absent_names(commit) == set()
    assert commit.renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2)


def test_executors_connect_only_to_the_nodes_that_take_part(place: ChangingFleet) -> None:
    """What the executors of a cluster would examine is examined here, in the command's own process."""
    examined: list[set[str]] = []

    @dataclass(frozen=True, slots=True)
    class Examining(Ready):
        def begin(self, *given: object) -> None:
            needs = given[0]
            assert isinstance(needs, ExecutorNeeds)
            body = needs.store.open().read(FLEET_KEY)
            problem, _ = check_needs(structs.replace(needs, key=FLEET_KEY, body=body))
            assert problem is None, problem
            examined.append({node.id for node in needs.nodes})

    place.runs = Runs(place.fleet, Examining(place.runs.spark.running))
    place.runs.full("chain")
    place.stop(STANDBY)
    # Without more shards or much WAL, only copies of tables take executors.
    place.execute("s2", "CREATE TABLE added (id int PRIMARY KEY)")
    commit = place.increment()
    assert absent_names(commit) == {STANDBY}
    assert len(examined) > 1
    assert examined[0] == {"s1", "s2", STANDBY, OTHER}
    assert all(nodes == {"s1", "s2", OTHER} for nodes in examined[1:])


@pytest.mark.parametrize("place", ['[copies]\nrequire = "all"\n', "[copies]\nrequire = 1\n"], indirect=True)
def test_a_required_standby_is_waited_for(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.stop(STANDBY)
    place.write()
    with pytest.raises(NodeUnreachableError, match=STANDBY):
        place.increment()
    with pytest.raises(NodeUnreachableError, match=STANDBY):
        place.runs.full("another")
    place.start(STANDBY)
    assert not place.increment().absent
    assert place.check().result == VALID


def test_a_commit_that_contradicts_the_chain_about_absent_copies_is_refused(place: ChangingFleet) -> None:
    full = place.runs.full("chain")
    place.stop(STANDBY)
    for _ in range(2):
        place.write()
        place.increment()
    store = place.fleet.store.open()
    chain = read_as_committed(store, "chain")
    last = chain.increments[-1]
    copy = last.absent[STANDBY]
    path = place.folder / "store" / commit_key("chain", 2)
    before = path.read_bytes()
    other = structs.replace(copy.last, number=copy.last.number + 1, key=copy.last.key.replace("1.parquet", "2.parquet"))
    of_primary = structs.replace(copy, last=chain.increments[0].segments["s1"][-1])
    changes: list[tuple[str, dict[str, object]]] = [
        ("since is 2", {"absent": {STANDBY: structs.replace(copy, since=2)}}),
        ("since or reason", {"absent": {STANDBY: structs.replace(copy, since=3)}}),
        ("is not the last segment", {"absent": {STANDBY: structs.replace(copy, last=other)}}),
        ("lists segments of this node", {"absent": {STANDBY: copy, "s1": copy}}),
        ("is no standby", {"absent": {STANDBY: copy, "s1": of_primary}, "segments": {**last.segments, "s1": ()}}),
        ("its archive|gap|ends at", {"absent": {}}),
        ("timelines.s1", {"timelines": {"s1": 1}}),
        ("timelines.nobody", {"timelines": {"nobody": 2}}),
        ("switches.s1", {"switches": {"s1": {1: Lsn(1)}}}),
        ("switches.nobody", {"switches": {"nobody": {1: Lsn(1)}}}),
        ("switches.s1", {"timelines": {"s1": 3}, "switches": {"s1": {1: Lsn(2), 2: Lsn(1)}}}),
        ("switches.s1", {"timelines": {"s1": 2}, "switches": {"s1": {1: Lsn(1), 2: Lsn(2)}}}),
    ]
    for message, values in changes:
        path.write_bytes(seal(structs.replace(last, **values)))
        with pytest.raises((ManifestError, ArchiveError), match=message):
            read_chain(store, "chain").check_archive()
    path.write_bytes(before)
    read_chain(store, "chain").check_archive()
    with pytest.raises(ValueError, match="full snapshot"):
        check_commit(structs.replace(full, absent={STANDBY: copy}, segments={**full.segments, STANDBY: ()}))
