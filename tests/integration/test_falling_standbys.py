"""Full snapshots go on if a standby fails in the middle, and keep what they have copied on all other nodes.

Servers are stopped at crash points. Expected rows come from the live servers (COPY).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from msgspec.structs import replace

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.nodes.baseline import FleetTopologyError
from cutline.nodes.connections import NodeUnreachableError, database_name, with_database
from cutline.nodes.problems import NodeUnfitError
from cutline.nodes.read_only import resume_fleet
from cutline.snapshots.base_copy import copy_ranges
from cutline.snapshots.base_copy.copy_ranges import RowUnreadableError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full, preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.records.commit import BASE, FullSnapshot
from cutline.snapshots.records.operation_records import INCONCLUSIVE, VALID
from cutline.storage.errors import UnreachableError
from cutline.wal.drain.slots import slot_name
from tests.commands.changing_fleet import ChangingFleet, absent_names, changing_fleet
from tests.commands.snapshot_runs import Ready, Runs, slots_of
from tests.commands.watching import Reached, Watching
from tests.faults.awaited import await_none
from tests.run.by_spark import in_driver
from tests.servers.dealt import start_pair

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBY, OTHER = "s1-b1", "s2-b1"
COPYING, ARCHIVING = "copy", "archive WAL"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("falling")) as pair:
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
                found.servers.start_node(found.servers.node(standby))
                resume_replay(found, standby)
                found.await_replay(standby)


def resume_replay(place: ChangingFleet, standby: str) -> None:
    with psycopg.connect(with_database(place.fleet.node(standby), "postgres").dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_wal_replay_resume()")


@dataclass(slots=True)
class Stopping(Watching):
    """Calls `act` once, when a step or a crash point is reached for the first time."""

    at: str = ""
    act: Callable[[], object] = lambda: None
    is_over: bool = field(default=False)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        self._see(name)

    def reached(self, point: str, *, node: str = "") -> None:
        # Named: a dataclass with slots has no zero-argument super().
        Watching.reached(self, point, node=node)
        self._see(str(point))

    def _see(self, name: str) -> None:
        if name == self.at and not self.is_over:
            self.is_over = True
            self.act()


def take_full(place: ChangingFleet, at: str, **options: object) -> tuple[FullSnapshot, Stopping]:
    """Take the full snapshot `chain` while the standby stops at this step or crash point."""
    progress = Stopping(at=at, act=lambda: place.stop(STANDBY))
    request = replace(CreateRequest("chain", retries=0), **options)  # type: ignore[arg-type]
    commit = create_full(place.fleet, request, place.runs.spark, progress)
    assert progress.is_over
    assert isinstance(commit, FullSnapshot)
    return commit, progress


def unlisted_objects(place: ChangingFleet, commit: FullSnapshot) -> set[str]:
    """The nodes with base objects in the store that the commit does not list."""
    listed = {entry.key for entry in (*commit.copied, *commit.lists) if entry.kind == BASE}
    root = place.folder / "store"
    found = {str(path.relative_to(root)): path for path in (root / "snapshots/chain/base").rglob("*.parquet")}
    return {path.parent.parent.name for key, path in found.items() if key not in listed}


POINTS = [CrashPoint.LOCKED, CrashPoint.SLOT_MADE, COPYING, CrashPoint.BASE_COPIED, CrashPoint.PREPARED_OVER, ARCHIVING]


@pytest.mark.parametrize(("at", "is_here"), [*((at, True) for at in POINTS), (COPYING, False), (ARCHIVING, False)])
def test_a_full_snapshot_goes_on_without_a_standby_that_fails(place: ChangingFleet, at: str, *, is_here: bool) -> None:
    if is_here:
        place.runs = Runs(place.fleet, Ready(in_driver(place.runs.spark.session())))
    commit, progress = take_full(place, at)
    place.states[0] = place.live_state()
    assert absent_names(commit) == {STANDBY}
    assert commit.parts.keys() == {"s1", "s2", OTHER}
    assert any(note.startswith(f"standby {STANDBY} is left out: ") for note in progress.notes), progress.notes
    # What the other nodes had copied was not copied again.
    assert unlisted_objects(place, commit) <= {STANDBY}
    place.write()
    assert absent_names(place.increment()) == {STANDBY}
    place.start(STANDBY)
    place.write()
    increment = place.increment()
    assert not absent_names(increment)
    assert slots_of(place.fleet.node(STANDBY).dsn) == [slot_name(commit.operation)]
    assert place.check().result == VALID
    place.check_restores(0, 1, 2)


@pytest.mark.parametrize("place", ['[copies]\nresume_from = "1 KiB"\n'], indirect=True, ids=["resumable"])
def test_a_standby_that_fails_after_the_copy_does_not_give_up_what_a_repetition_resumes(place: ChangingFleet) -> None:
    def fail() -> None:
        place.stop(STANDBY)
        raise NodeUnreachableError(f"node {STANDBY}: it is gone", hint="start it", details={"node": STANDBY})

    progress = Stopping(at=CrashPoint.DDL_STORED, act=fail)
    with pytest.raises(NodeUnreachableError, match=f"{STANDBY}: it is gone"):
        create_full(place.fleet, CreateRequest("chain"), place.runs.spark, progress)
    (interrupted,) = read_open_operations(place.fleet.store.open(), "chain")
    commit = create_full(place.fleet, CreateRequest("chain"), place.runs.spark, Watching())
    assert isinstance(commit, FullSnapshot)
    assert (commit.operation, absent_names(commit)) == (interrupted.id, {STANDBY})
    # What the other nodes had copied was not copied again.
    assert unlisted_objects(place, commit) <= {STANDBY}
    place.states[0] = place.live_state()
    place.check_restores(0)


LARGE = (
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1001, 4000) n",
    "ALTER TABLE seen ALTER text SET STORAGE EXTERNAL",
    "INSERT INTO seen SELECT n, repeat('x', 5000) FROM generate_series(5001, 5020) n",
)


@pytest.mark.parametrize("toast", [False, True])
def test_a_full_snapshot_goes_on_without_a_standby_whose_data_is_damaged(place: ChangingFleet, *, toast: bool) -> None:
    place.runs = Runs(place.fleet, Ready(in_driver(place.runs.spark.session())))
    place.execute("s1", *LARGE)
    place.damage(STANDBY, "seen", toast=toast)
    watching = Watching()
    commit = create_full(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, watching)
    place.states[0] = place.live_state()
    assert isinstance(commit, FullSnapshot)
    assert commit.parts.keys() == {"s1", "s2", OTHER}
    (note,) = [note for note in watching.notes if note.startswith(f"standby {STANDBY} is left out: ")]
    damaged = f"{STANDBY} is left out: its data is damaged: table public.seen: PostgreSQL can't print a row for COPY: "
    assert damaged in note
    assert ("missing chunk" if toast and "invalid page" not in note else "invalid page") in note
    (left_out,) = [out for out in commit.left_out if out.name == STANDBY]
    assert "its data is damaged: table public.seen" in left_out.why
    assert not any(slot == slot_name(commit.operation) for slot in slots_of(place.fleet.node(STANDBY).dsn))
    assert unlisted_objects(place, commit) <= {STANDBY}

    place.execute("s1", "UPDATE seen SET text = 'new' WHERE id = 1")
    increment = place.increment()
    assert absent_names(increment) == {STANDBY}
    assert "its data is damaged" in increment.left_out[0].why
    assert place.check().result == INCONCLUSIVE
    place.check_restores(0, 1)

    # A new copy of the table's file on the standby, from the WAL.
    place.execute("s1", "VACUUM FULL seen")
    place.await_replay(STANDBY)
    assert not absent_names(place.increment())
    assert place.check().result == VALID
    place.check_restores(2)


@pytest.mark.parametrize("place", ['[copies]\nrequire = "all"\n'], indirect=True)
def test_a_required_standby_whose_data_is_damaged_ends_the_full_snapshot(place: ChangingFleet) -> None:
    place.execute("s1", *LARGE)
    place.damage(STANDBY, "seen")
    with pytest.raises(RowUnreadableError, match=f"node {STANDBY}: its data is damaged: table public.seen") as raised:
        create_full(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, Watching())
    assert "rebuild the standby from its primary" in str(raised.value.hint)
    assert not slots_of(place.fleet.node(STANDBY).dsn)
    place.execute("s1", "VACUUM FULL seen")


def test_a_table_that_is_damaged_on_a_standby_alone_is_added(place: ChangingFleet) -> None:
    """The increment that copies the table leaves the standby out."""
    place.runs.full("chain")
    place.execute(
        "s1",
        "CREATE TABLE added (id int PRIMARY KEY, text text)",
        "INSERT INTO added SELECT n, 'text ' || n FROM generate_series(1, 4000) n",
    )
    place.damage(STANDBY, "added")
    increment = place.increment()
    assert absent_names(increment) == {STANDBY}
    assert increment.absent[STANDBY].has_ended
    assert "its data is damaged: table public.added" in increment.absent[STANDBY].reason
    place.execute("s1", "VACUUM FULL added")
    place.await_replay(STANDBY)
    assert place.increment().renewed.keys() == {STANDBY}
    assert place.check().result == VALID
    place.check_restores(1, 2)


@pytest.mark.parametrize("place", ['[copies]\nresume_from = "8 KiB"\n'], indirect=True)
def test_ddl_is_not_why_a_standby_ends_a_copy(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table was created meanwhile, which a base copy tolerates: it does not begin again."""
    lock_tables, is_stopped = copy_ranges.lock_tables, threading.Event()

    def lock_and_stop(connection: Any, node: Node, ranges: Any) -> Any:
        found = lock_tables(connection, node, ranges)
        if node.id == STANDBY and not is_stopped.is_set():
            is_stopped.set()
            place.execute("s1", "CREATE TABLE added (id int PRIMARY KEY)", "INSERT INTO added VALUES (1)")
            place.stop(STANDBY)
        return found

    monkeypatch.setattr(copy_ranges, "lock_tables", lock_and_stop)
    place.runs = Runs(place.fleet, Ready(in_driver(place.runs.spark.session())))
    progress = Watching()
    commit = create_full(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, progress)
    assert is_stopped.is_set()
    place.states[0] = place.live_state()
    assert isinstance(commit, FullSnapshot)
    assert absent_names(commit) == {STANDBY}
    assert [one.node for one in progress.reached_points if one.point == CrashPoint.SLOT_MADE].count("s2") == 1
    place.check_restores(0)


@pytest.mark.parametrize("place", ["", '[copies]\nbase = "prefer-standby"\n'], indirect=True, ids=["both", "standby"])
def test_a_copy_that_replay_ends_leaves_out_the_standby(place: ChangingFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay needs an exclusive lock on a table that the copy has locked on the standby."""
    lock_tables, is_locked = copy_ranges.lock_tables, threading.Event()

    def lock_and_conflict(connection: Any, node: Node, ranges: Any) -> Any:
        found = lock_tables(connection, node, ranges)
        if node.id == STANDBY and not is_locked.is_set():
            is_locked.set()
            with psycopg.connect(place.fleet.node("s1").dsn, autocommit=True) as other:
                # A table that the primary's own copy has locked is locked once that is over.
                other.execute("BEGIN; LOCK TABLE seen; COMMIT")
            place.await_replay(STANDBY)
        return found

    standby = with_database(place.fleet.node(STANDBY), "postgres").dsn
    with psycopg.connect(standby, autocommit=True) as connection:
        for statement in ("ALTER SYSTEM SET max_standby_streaming_delay = 0", "SELECT pg_reload_conf()"):
            connection.execute(statement)
    monkeypatch.setattr(copy_ranges, "lock_tables", lock_and_conflict)
    place.runs = Runs(place.fleet, Ready(in_driver(place.runs.spark.session())))
    try:
        commit = create_full(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, Watching())
    finally:
        with psycopg.connect(standby, autocommit=True) as connection:
            for statement in ("ALTER SYSTEM RESET max_standby_streaming_delay", "SELECT pg_reload_conf()"):
                connection.execute(statement)
    assert is_locked.is_set()
    place.states[0] = place.live_state()
    assert isinstance(commit, FullSnapshot)
    assert absent_names(commit) == {STANDBY}
    place.check_restores(0)
    # The next increment copies it.
    assert not absent_names(place.increment())
    (report,) = place.runs.check("chain", 1).snapshots
    assert report.conflicts == []
    # What was read once, on the other shard's standby, can't be compared.
    assert {one.what for one in report.skipped} <= {"base rows of shard s2"}


def test_a_standby_that_executors_cannot_reach_lets_the_create_begin_again(place: ChangingFleet) -> None:
    begun: list[int] = []

    class Checking(Ready):
        def begin(self, *_: object) -> None:
            begun.append(1)
            if len(begun) == 1:
                raise NodeUnreachableError("node s1-b1: gone", hint="start it", details={"node": STANDBY})

    progress = Watching()
    commit = create_full(place.fleet, CreateRequest("chain"), Checking(place.runs.spark.session()), progress)
    assert isinstance(commit, FullSnapshot)
    assert "node s1-b1: gone; the create begins again" in progress.notes


def test_a_standby_that_is_back_has_no_slot_for_a_table(place: ChangingFleet) -> None:
    """It failed while a table that was created meanwhile was copied, and is there again before the commit."""
    seen: list[str] = []

    def act(reached: Reached) -> None:
        seen.append(reached.point)
        if reached.point == CrashPoint.PREPARED_OVER:
            place.execute("s1", "CREATE TABLE added (id int PRIMARY KEY)", "INSERT INTO added VALUES (1)")
        after_copy = CrashPoint.PREPARED_OVER in seen
        if (reached.point, reached.node) == (CrashPoint.SLOT_MADE, STANDBY) and after_copy:
            place.stop(STANDBY)
        if reached.point == CrashPoint.SEQUENCES_READ:
            place.start(STANDBY)

    commit = create_full(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, Watching(act))
    assert isinstance(commit, FullSnapshot)
    assert absent_names(commit) == {STANDBY}
    assert slots_of(place.fleet.node(STANDBY).dsn) == []


@pytest.mark.parametrize("at", [CrashPoint.LOCKED, CrashPoint.SETTLED, CrashPoint.SLOTS_DROPPED, CrashPoint.CHECKED])
def test_an_increment_goes_on_without_a_standby_that_fails_in_the_checks(place: ChangingFleet, at: str) -> None:
    place.runs.full("chain")
    place.write()
    progress = Stopping(at=at, act=lambda: place.stop(STANDBY))
    commit = create_increment(place.fleet, CreateRequest("chain", retries=0), place.runs.spark, progress)
    assert absent_names(commit) == {STANDBY}


def test_a_standby_that_falls_after_the_cut_has_a_copy(place: ChangingFleet) -> None:
    commit, _ = take_full(place, CrashPoint.SEQUENCES_READ)
    assert absent_names(commit) == set()
    assert STANDBY in commit.parts
    place.start(STANDBY)
    place.write()
    assert not place.increment().absent
    assert place.check().result == VALID


@pytest.mark.parametrize("at", [CrashPoint.SLOT_MADE, COPYING, ARCHIVING])
@pytest.mark.parametrize("place", ['[copies]\nrequire = "all"\n'], indirect=True)
def test_a_required_standby_that_fails_ends_the_full_snapshot(place: ChangingFleet, at: str) -> None:
    with pytest.raises(UnreachableError, match=STANDBY):
        take_full(place, at)


def test_a_standby_whose_replay_is_paused_in_the_middle_is_left_out(place: ChangingFleet) -> None:
    def pause() -> None:
        place.execute(STANDBY, "SELECT pg_wal_replay_pause()")
        place.execute("s1", "INSERT INTO seen VALUES (7000, 'paused')")

    progress = Stopping(at=CrashPoint.STARTS_WRITTEN, act=pause)
    commit = create_full(place.fleet, CreateRequest("chain", wait_seconds=3), place.runs.spark, progress)
    assert absent_names(commit) == {STANDBY}
    place.states[0] = place.live_state()
    place.check_restores(0)


@dataclass(slots=True)
class Holding(Stopping):
    """Measures how long the fleet's lock is held after `act`."""

    began_at: float = 0.0
    held_seconds: float = 0.0

    def _see(self, name: str) -> None:
        Stopping._see(self, name)
        if name == CrashPoint.CHECKED:
            self.began_at = time.monotonic()
        if name == CrashPoint.RELEASED:
            self.held_seconds = time.monotonic() - self.began_at


def walreceivers(place: ChangingFleet) -> list[int]:
    """The processes that receive WAL on the standbys."""
    pids: list[int] = []
    for standby in (STANDBY, OTHER):
        with psycopg.connect(place.fleet.node(standby).dsn) as connection:
            pids += [pid for (pid,) in connection.execute("SELECT pid FROM pg_stat_wal_receiver").fetchall()]
    return pids


@pytest.mark.parametrize("place", ['[copies]\nwait = "4s"\n'], indirect=True)
@pytest.mark.parametrize(("how", "seconds_max"), [("paused", 4.0), ("stopped", 8.0)])
def test_standbys_that_fall_behind_in_an_increment_hold_the_lock_no_longer_than_copies_wait(
    place: ChangingFleet, how: str, seconds_max: float
) -> None:
    """All late ones together: they are waited for once; one whose replay is paused is not waited for at all."""
    place.runs.full("chain")
    place.write()
    receivers = walreceivers(place)

    def fall_behind() -> None:
        if how == "paused":
            for standby in (STANDBY, OTHER):
                place.execute(standby, "SELECT pg_wal_replay_pause()")
        else:
            for pid in receivers:
                os.kill(pid, signal.SIGSTOP)

    progress = Holding(at=CrashPoint.CHECKED, act=fall_behind)
    try:
        commit = create_increment(place.fleet, CreateRequest("chain", wait_seconds=60), place.runs.spark, progress)
    finally:
        if how == "stopped":
            for pid in receivers:
                os.kill(pid, signal.SIGCONT)
    assert absent_names(commit) == {STANDBY, OTHER}
    assert 0 < progress.held_seconds < seconds_max
    for standby in (STANDBY, OTHER):
        assert any(f"standby {standby} is left out" in note for note in progress.notes)
        resume_replay(place, standby)
        place.await_replay(standby)
    assert absent_names(place.increment()) == set()
    assert place.check().result == VALID


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "increment"])
def test_a_terminal_snapshot_goes_on_without_a_standby_that_fails(place: ChangingFleet, *, is_full: bool) -> None:
    try:
        if is_full:
            commit, _ = take_full(place, ARCHIVING, terminal=True)
            number = 0
        else:
            place.runs.full("chain")
            place.write()
            progress = Stopping(at=ARCHIVING, act=lambda: place.stop(STANDBY))
            request = CreateRequest("chain", terminal=True, retries=0)
            commit, number = create_increment(place.fleet, request, place.runs.spark, progress), 1
        assert absent_names(commit) == {STANDBY}
        place.states[number] = place.live_state()
        place.check_restores(number)
    finally:
        place.start(STANDBY)
        resume_fleet(place.fleet, Watching())


@pytest.mark.parametrize("place", ["", '[copies]\nrequire = "all"\n'], indirect=True, ids=["spared", "required"])
def test_a_standby_whose_settings_do_not_fit_is_left_out(place: ChangingFleet, request: pytest.FixtureRequest) -> None:
    """It receives no WAL, and its primary has written none since, so it is not late."""

    def follow(conninfo: str) -> None:
        place.execute(STANDBY, f"ALTER SYSTEM SET primary_conninfo = '{conninfo}'", "SELECT pg_reload_conf()")

    with psycopg.connect(place.fleet.node(STANDBY).dsn, autocommit=True) as standby:
        ((conninfo,),) = standby.execute("SHOW primary_conninfo").fetchall()
        follow("")
        try:
            await_none(lambda: standby.execute("SELECT FROM pg_stat_wal_receiver").fetchall())
            if "required" in request.node.name:
                with pytest.raises(NodeUnfitError, match=f"{STANDBY}: it is not streaming"):
                    place.runs.full("chain")
                return
            progress = Watching()
            preview_full(place.fleet, CreateRequest("chain"), progress)
            assert f"standby {STANDBY} is left out: it is not streaming from its primary" in progress.notes
            assert absent_names(place.runs.full("chain")) == {STANDBY}
        finally:
            follow(conninfo.replace("'", "''"))


def await_late(place: ChangingFleet) -> None:
    """Wait until the standby has replayed what s1 has written, also if its database is gone."""
    with psycopg.connect(with_database(place.fleet.node("s1"), "postgres").dsn, autocommit=True) as primary:
        (position,) = primary.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone() or ("",)
    with psycopg.connect(with_database(place.fleet.node(STANDBY), "postgres").dsn, autocommit=True) as standby:
        query = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        await_none(lambda: standby.execute(query, (position,)).fetchone() != (True,))


@pytest.mark.parametrize("has_old", [True, False], ids=["has the old one", "has none"])
def test_a_standby_without_the_database_that_was_created_again_is_late(place: ChangingFleet, *, has_old: bool) -> None:
    """Every create leaves it out until it has replayed the new database, and then copies it."""
    place.runs.full("chain")
    name = database_name(place.fleet.node("s1").dsn)
    (slot,) = slots_of(place.fleet.node("s1").dsn)
    standby = with_database(place.fleet.node(STANDBY), "postgres").dsn

    def pause() -> None:
        await_late(place)
        with psycopg.connect(standby, autocommit=True) as connection:
            connection.execute("SELECT pg_wal_replay_pause()")

    with psycopg.connect(with_database(place.fleet.node("s1"), "postgres").dsn, autocommit=True) as primary:
        if has_old:
            pause()
        primary.execute("SELECT pg_drop_replication_slot(%s)", (slot,))
        primary.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
        if not has_old:
            pause()
        primary.execute(f'CREATE DATABASE "{name}" TEMPLATE template0'.encode())
    place.execute(
        "s1",
        "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
        "INSERT INTO seen SELECT n, 'again ' || n FROM generate_series(1, 50) n",
    )
    place.runs.init()
    preview_increment(place.fleet, CreateRequest("chain"), Watching())
    first = place.increment()
    assert absent_names(first) == {STANDBY}
    assert first.renewed.keys() == {"s1"}
    preview_full(place.fleet, CreateRequest("second"), Watching())
    assert absent_names(place.runs.full("second")) == {STANDBY}

    resume_replay(place, STANDBY)
    await_late(place)
    place.write()
    second = place.increment()
    assert second.renewed.keys() == {STANDBY}
    assert absent_names(second) == set()
    assert place.check().result == VALID
    place.check_restores(1, 2)


@pytest.mark.parametrize("place", ['[copies]\nrequire = "all"\n'], indirect=True)
def test_a_required_standby_without_the_database_is_named(place: ChangingFleet) -> None:
    name = database_name(place.fleet.node("s1").dsn)
    await_late(place)
    place.execute(STANDBY, "SELECT pg_wal_replay_pause()")
    with psycopg.connect(with_database(place.fleet.node("s1"), "postgres").dsn, autocommit=True) as primary:
        primary.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())
        primary.execute(f'CREATE DATABASE "{name}" TEMPLATE template0'.encode())
    with pytest.raises(FleetTopologyError, match="is not a copy of s1's"):
        place.runs.full("chain")
