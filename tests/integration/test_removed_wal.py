"""WAL that a chain's slot needs is gone, although the slot is valid: the next increment copies the node again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

import cutline.snapshots.create.archive_ahead
import cutline.wal.drain.drain
from cutline.check.live.run import LiveRequest, check_live
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import start_server
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.snapshots.create.archive_ahead import ArchivedAhead, archive_ahead
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Increment
from cutline.snapshots.records.operation_records import VALID
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.slots import SlotLostError
from tests.commands.changing_fleet import ChangingFleet, changing_fleet
from tests.commands.snapshot_runs import slots_of
from tests.commands.watching import Reached, Watching
from tests.faults.pg_proxy import pg_proxies, route_through
from tests.servers.dealt import start_pair
from tests.servers.disasters import kill_server
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, SERVERS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARD, STANDBY = "s1", "s1-b1"
FILE_QUERY = """
SELECT timeline_id, restart_lsn::text FROM pg_control_checkpoint(), pg_replication_slots WHERE slot_name = %s
"""
GAP = "no time between increment 1 and this increment can be restored"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("removed")) as pair:
        yield pair


@pytest.fixture
def place(servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession) -> Iterator[ChangingFleet]:
    with changing_fleet(*servers, tmp_path, spark) as found:
        yield found


def next_increment(place: ChangingFleet) -> tuple[Increment, list[str]]:
    """Write, and take an increment; return its commit and notes."""
    place.write()
    progress = Watching()
    commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    assert isinstance(commit, Increment)
    place.states[commit.increment] = place.live_state()
    return commit, progress.notes


def first_file(place: ChangingFleet, node: str) -> Path:
    """Return the first WAL file that the node's only slot of Cutline needs; the server writes to a later one."""
    shard, dsn = place.fleet.node(node).shard, place.fleet.node(node).dsn
    place.execute(shard, "SELECT pg_switch_wal()", "INSERT INTO seen VALUES (99, 'in a later file')", "CHECKPOINT")
    if shard != node:
        place.await_replay(node)
    (slot,) = slots_of(dsn)
    with psycopg.connect(dsn) as connection:
        # A standby can't compute the name.
        row = connection.execute(FILE_QUERY, (slot,)).fetchone()
    timeline, position = row or (0, "0/0")
    high, low = (int(part, 16) for part in position.split("/"))
    return place.servers.node(node).data_directory / "pg_wal" / f"{timeline:08X}{high:08X}{low >> 24:08X}"


@pytest.mark.parametrize("version", MAJORS)
def test_a_chain_goes_on_with_a_gap_after_its_wal_was_reset(tmp_path: Path, spark: SparkSession, version: int) -> None:
    server = SERVERS.get(version)
    if server is None:
        pytest.skip(f"PostgreSQL {version} is not installed")
    with (
        fleet_of(tmp_path / "fleet", [server]) as source,
        fleet_of(tmp_path / "target", [server]) as target,
        changing_fleet(source, target, tmp_path, spark) as place,
    ):
        place.runs.full("chain")
        next_increment(place)
        place.execute(SHARD, "SELECT pg_switch_wal()", "INSERT INTO seen VALUES (99, 'lost')", "CHECKPOINT")
        node = source.node(SHARD)
        programs = source._programs(node)
        kill_server(node)
        (node.data_directory / "postmaster.pid").unlink(missing_ok=True)
        programs.run("pg_resetwal", "--force", f"--pgdata={node.data_directory}")
        start_server(programs, node)
        second, notes = next_increment(place)
        assert second.renewed.keys() == {SHARD}
        assert "the server lacks pg_wal/0000" in second.renewed[SHARD].reason
        assert any(GAP in note for note in notes), notes
        third, _ = next_increment(place)
        assert not third.renewed
        assert not place.check().conflicts
        place.check_restores(1, 2, 3)


def test_a_primary_whose_wal_file_was_removed_is_copied_again(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutline.snapshots.create.archive_ahead, "AHEAD_BYTES_MIN", 1)
    place.runs.full("chain")
    next_increment(place)
    file = first_file(place, SHARD)
    file.unlink()
    assert archive_ahead(place.fleet, "chain", Silent()) == ArchivedAhead(needs_increment=True)
    # It is not known whether the row that is new since the cut was written.
    (unproven,) = check_live(place.fleet, LiveRequest("chain"), place.runs.spark, Silent()).unproven
    assert (unproven.node, unproven.group, unproven.differing) == (SHARD, "public.seen", 1)
    assert f"the server lacks pg_wal/{file.name}" in unproven.why
    second, notes = next_increment(place)
    assert second.renewed.keys() == {SHARD}
    assert f"the server lacks pg_wal/{file.name}" in second.renewed[SHARD].reason
    assert any(GAP in note for note in notes), notes
    # No attempt at a cut was repeated: that would take longer, and help nothing.
    assert not any("cut attempt" in note for note in notes), notes
    assert not next_increment(place)[0].renewed
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)
    place.check_restores_without(SHARD, 2, 3)


def test_a_standby_whose_wal_file_was_removed_is_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    next_increment(place)
    first_file(place, STANDBY).unlink()
    second, notes = next_increment(place)
    assert second.absent.keys() == {STANDBY}
    assert second.absent[STANDBY].has_ended
    assert not any("cut attempt" in note for note in notes), notes
    third, _ = next_increment(place)
    assert (third.renewed.keys(), dict(third.absent)) == ({STANDBY}, {})
    assert not next_increment(place)[0].renewed
    assert place.check().result == VALID
    place.check_restores(1, 2, 3, 4)
    place.check_restores_without(SHARD, 3, 4)


@pytest.mark.parametrize("node", [SHARD, STANDBY])
def test_a_wal_file_that_is_back_in_a_moment_ends_no_copy(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    place.runs.full("chain")
    next_increment(place)
    file = first_file(place, node)
    away = file.with_suffix(".away")
    file.rename(away)

    class Time:
        """The time of the drain, which puts the file back when the drain pauses."""

        monotonic = staticmethod(cutline.wal.drain.drain.time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            assert seconds == cutline.wal.drain.drain.REMOVED_AGAIN_SECONDS
            away.rename(file)

    monkeypatch.setattr(cutline.wal.drain.drain, "time", Time)
    second, _ = next_increment(place)
    assert not away.exists()
    assert (dict(second.renewed), dict(second.absent)) == ({}, {})
    assert place.check().result == VALID
    place.check_restores(1, 2)


# What a German server says, as long as the English text that the proxy replaces.
TRANSLATED = b"has already been removed", b"wurde bereits entfernt! "


@pytest.mark.parametrize("reader", ["psycopg", "adbc"])
def test_a_missing_file_is_recognized_in_any_language(
    place: ChangingFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """ADBC, which reads much WAL, gives the text of the server's error alone."""
    monkeypatch.setattr(cutline.wal.drain.drain, "reads_with_psycopg", lambda *_: reader == "psycopg")
    place.runs.full("chain")
    next_increment(place)
    file = first_file(place, SHARD)
    file.unlink()
    with pg_proxies(place.servers) as proxies:
        for proxy in proxies.values():
            proxy.replaces = TRANSLATED
        fleet = route_through(proxies, place.fleet, tmp_path / "through.toml")
        place.write()
        commit = create_increment(fleet, CreateRequest("chain"), place.runs.spark, Watching())
    assert isinstance(commit, Increment)
    assert commit.renewed.keys() == {SHARD}
    assert f"the server lacks pg_wal/{file.name}" in commit.renewed[SHARD].reason


def remove_file(place: ChangingFleet, node: str, at: CrashPoint) -> Watching:
    """Return the progress of a create during which a WAL file that its slot needs is removed, once."""
    files = list[Path]()

    def remove(reached: Reached) -> None:
        if reached == Reached(at, 1) and not files:
            files.append(first_file(place, node))
            files[0].unlink()

    return Watching(remove)


def check_nothing_is_left(place: ChangingFleet) -> None:
    assert [slots_of(node.dsn) for node in place.fleet.nodes] == [[] for _ in place.fleet.nodes]


def check_begins_again(place: ChangingFleet, progress: Watching) -> None:
    """Fail the full snapshot because its WAL is gone; take it anew."""
    with pytest.raises(SlotLostError, match="the server lacks pg_wal/") as raised:
        create_full(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    assert raised.value.hint == "repeat the command: it begins again"
    check_nothing_is_left(place)
    place.write()
    again = Watching()
    create_full(place.fleet, CreateRequest("chain"), place.runs.spark, again)
    assert not any("interrupted" in note for note in again.notes), again.notes
    place.states[0] = place.live_state()
    next_increment(place)
    assert place.check().result == VALID
    place.check_restores(0, 1)


def test_a_full_snapshot_whose_wal_is_gone_is_taken_again(place: ChangingFleet) -> None:
    check_begins_again(place, remove_file(place, SHARD, CrashPoint.PREPARED_OVER))


def test_an_interrupted_snapshot_whose_wal_is_gone_is_taken_again(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession
) -> None:
    """It is not resumed for ever, each time with the same error."""

    def interrupt(reached: Reached) -> None:
        if reached == Reached(CrashPoint.PREPARED_OVER, 1):
            raise KeyboardInterrupt

    with changing_fleet(*servers, tmp_path, spark, more='[copies]\nresume_from = "8 KiB"\n') as place:
        with pytest.raises(SnapshotError, match="the nodes keep WAL for them"):
            create_full(place.fleet, CreateRequest("chain"), place.runs.spark, Watching(interrupt))
        assert slots_of(place.fleet.node(SHARD).dsn)
        check_begins_again(place, remove_file(place, SHARD, CrashPoint.PREPARED_OVER))


def test_a_full_snapshot_goes_on_without_a_standby_whose_wal_is_gone(place: ChangingFleet) -> None:
    progress = remove_file(place, STANDBY, CrashPoint.PREPARED_OVER)
    create_full(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    assert any(f"standby {STANDBY}" in note and "the server lacks pg_wal/" in note for note in progress.notes)
    place.states[0] = place.live_state()
    second, _ = next_increment(place)
    assert second.renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(0, 1)
