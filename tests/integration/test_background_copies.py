"""A large standby is copied in the background of increments: some tables after each commit, until it is compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from msgspec import structs

from cutline.check.report import Findings, SnapshotReport
from cutline.check.spanning import check_spanning
from cutline.cli.process.detaching import PROGRAM
from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import create_standby, delete_server, stop_server
from cutline.fleet.config import Fleet
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.base_copy import copy_slots
from cutline.snapshots.create.archive_ahead import archive_ahead
from cutline.snapshots.create.background_copies import StandbyNeededError, UnderwayCopy, read_underway
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.operations.slot_guard import SlotRuling, read_kept_chains, rule_on_slots
from cutline.snapshots.records.background_records import CopyStep, read_steps, steps_prefix
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import CopiedLater, Increment
from cutline.snapshots.records.operation_records import CREATE, VALID
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.removal import garbage_rules
from cutline.snapshots.removal.gc import collect_garbage, find_garbage
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import copy_slot_name, create_exported_slot
from cutline.wal.segments.archive import Segment, archive_prefix
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import read_events
from tests.commands.changing_fleet import SEEN, ChangingFleet, absent_names, changing_fleet
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Runs, configure_fleet, slots_of
from tests.commands.watching import Reached, Watching
from tests.faults.stalled_network import Notes
from tests.integration.promoting import fleet_with_chain, follow, promote
from tests.servers.dealt import start_pair
from tests.stores.damage import flip_byte
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBY = "s1-b1"
ROOT = Path(__file__).parents[2]
# Each step copies one table.
STEPWISE = '[copies]\nbackground_from = "8 KiB"\nbackground_for = "1s"\n'
WATCHED = '[watch]\nname = "chain-{n}"\nevery = "10s"\nfull = "never"\n'
TABLES = (
    *SEEN,
    "DROP TABLE IF EXISTS one, two, three, four",
    *(f"CREATE TABLE {name} (id int PRIMARY KEY, text text)" for name in ("one", "two", "three", "four")),
    *(
        f"INSERT INTO {name} SELECT n, '{name} ' || n FROM generate_series(1, 300) n"
        for name in ("one", "two", "three")
    ),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    with start_pair(tmp_path_factory.mktemp("background")) as pair:
        yield pair


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession, request: pytest.FixtureRequest
) -> Iterator[ChangingFleet]:
    with changing_fleet(*servers, tmp_path, spark, tables=TABLES, more=getattr(request, "param", STEPWISE)) as found:
        # Each create in this process copies one step.
        found.runs = Runs(replace(found.fleet, background_seconds=0.001), found.runs.spark)
        yield found


def next_increment(place: ChangingFleet) -> Increment:
    place.write()
    commit = place.increment()
    assert isinstance(commit, Increment)
    return commit


def change(place: ChangingFleet, round_number: int) -> None:
    """Change rows of all tables of both shards, as far as they exist."""
    for shard in ("s1", "s2"):
        for name in ("one", "two", "three", "four"):
            place.execute(
                shard,
                f"DO $$ BEGIN IF to_regclass('{name}') IS NOT NULL THEN"
                f" UPDATE {name} SET text = 'round {round_number}' WHERE id % 7 = {round_number} % 7;"
                f" DELETE FROM {name} WHERE id = {round_number + 1};"
                f" INSERT INTO {name} (id, text) VALUES ({1000 + round_number}, 'new') ON CONFLICT DO NOTHING;"
                " END IF; END $$",
            )


def finish_copy(place: ChangingFleet, most: int = 12) -> Increment:
    """Take increments until the copy is part of the chain; rows change between them."""
    for round_number in range(most):
        change(place, 50 + round_number)
        commit = next_increment(place)
        if STANDBY in commit.renewed:
            return commit
        assert STANDBY in commit.copying
        assert absent_names(commit) == {STANDBY}
    raise AssertionError(f"{commit.copying} after {most} increments")


def is_proven(place: ChangingFleet, *increments: int) -> None:
    """Check the chain with both copies, and compare what the copies of the standby restore with the live shards."""
    report = place.check()
    assert report.result == VALID, report
    place.check_restores(*increments)
    place.check_restores_without("s1", *increments)


def assert_status_is_of_now(place: ChangingFleet, commit: Increment) -> None:
    """`status --nodes` counts the tables that were copied after the commit, too."""
    steps = read_steps(place.fleet.store.open(), "chain", STANDBY, commit.copying[STANDBY].operation)
    copied, wanted = sum(len(step.rows) for step in steps), commit.copying[STANDBY].wanted
    assert copied > commit.copying[STANDBY].copied
    nodes = {one["node"]: one["copying"] for one in run_here(place.fleet, "status", "--nodes")[1]["nodes"]}
    (shown,) = nodes.pop(STANDBY)
    assert (shown["snapshot"], shown["tables"], shown["tables_wanted"]) == ("chain", copied, wanted)
    assert set(map(tuple, nodes.values())) == {()}
    line = f"being copied for snapshot chain: {copied} of {wanted} tables"
    assert line in " ".join(run_and_capture(place.fleet, "status", "--nodes")[1].split())


def test_a_rebuilt_standby_is_copied_while_tables_change(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.rebuild(STANDBY)
    first = next_increment(place)
    assert first.copying.keys() == {STANDBY}
    assert first.copying[STANDBY].copied == 0
    assert not first.renewed
    change(place, 1)
    second = next_increment(place)
    assert second.copying[STANDBY].copied > 0
    assert second.copying[STANDBY].operation == first.operation
    assert_status_is_of_now(place, second)
    # Changed, gone and new while the copy is made: those that are copied already, and those that are not.
    place.execute(
        "s1",
        "ALTER TABLE four ADD COLUMN more int DEFAULT 7",
        "ALTER TABLE three ADD COLUMN more int DEFAULT 8",
        "DROP TABLE two",
        "CREATE TABLE added (id int PRIMARY KEY, text text)",
        "INSERT INTO added SELECT n, 'added' FROM generate_series(1, 40) n",
    )
    change(place, 2)
    third = next_increment(place)
    assert third.copying[STANDBY].operation == first.operation
    change(place, 3)
    place.execute("s1", "ALTER TABLE one ALTER text TYPE varchar(60)", "ALTER TABLE one ADD COLUMN last int")
    next_increment(place)
    collect_garbage(place.fleet, 0.0, Silent())
    assert check_documents(place.fleet.store.open())[CopyStep.__name__] > 1
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == first.operation
    assert len({later.position for later in done.renewed[STANDBY].later}) > 2
    last = next_increment(place)
    assert not last.absent
    assert not last.copying
    collect_garbage(place.fleet, 0.0, Silent())
    is_proven(place, done.increment, last.increment)


def run_create(place: ChangingFleet, *signalled: str) -> subprocess.CompletedProcess[str]:
    """Take an increment in a process of its own; it sends itself a signal at a point, if one is given."""
    module = ("tests.faults.signalled_command", *(signalled or ("SIGTERM", "never", "0")), "--")
    words = ["--fleet", str(place.fleet.path), "create", "chain", "--incremental"]
    return subprocess.run(
        [sys.executable, "-m", *module, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
    )


def run_ok(place: ChangingFleet, *words: str) -> None:
    code, document = run_here(place.fleet, *words, spark=place.runs.spark.running)
    assert code == 0, json.dumps(document)


def second_store(place: ChangingFleet, folder: Path, name: str) -> str:
    """Write a fleet file for a second store, and return its path."""
    return str(configure_fleet(place.servers, folder / f"{name}.toml", f"file://{folder}/{name}").path)


def steps(place: ChangingFleet, operation: str) -> int:
    return len(place.fleet.store.open().list_children(steps_prefix("chain", STANDBY, operation)))


# In the increment that begins the copy: before its commit, during a table, and between two tables.
POINTS = (
    (CrashPoint.SLOT_MADE, 1, "killed before the commit"),
    (CrashPoint.PREPARED_OVER, 1, "killed before the commit"),
    (CrashPoint.RELEASED, 1, "committed"),
    (CrashPoint.COPY_SLOTS_DROPPED, 1, "committed"),
    (CrashPoint.BASE_COPIED, 1, "committed"),
    (CrashPoint.STEP_STORED, 1, "committed"),
)


@pytest.mark.timeout(900)
def test_a_create_that_is_killed_while_it_copies_loses_at_most_a_table(place: ChangingFleet) -> None:
    place.runs.full("chain")
    slot = place.drop_slot(STANDBY)
    operations = set[str]()
    for point, count, _ in POINTS:
        change(place, count)
        place.write()
        done = run_create(place, "SIGKILL", str(point), str(count))
        assert done.returncode == -signal.SIGKILL, done.stderr
        newest = read_chain(place.fleet.store.open(), "chain").last
        operations |= {copying.operation for copying in newest.copying.values()}
    # The first that committed began the copy.
    (operation,) = operations
    assert steps(place, operation) == 1
    # An interrupt ends only the background part, and not the command.
    place.write()
    done = run_create(place, "SIGTERM", str(CrashPoint.STEP_STORED), "1")
    assert done.returncode in (0, 4), done.stderr
    assert steps(place, operation) == 2
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == operation
    for node in place.fleet.nodes:
        assert slots_of(node.dsn) == [slot]
    assert not read_open_operations(place.fleet.store.open())
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def test_a_copy_whose_slot_is_lost_restarts(place: ChangingFleet) -> None:
    place.runs.full("chain")
    slot = place.drop_slot(STANDBY)
    first = next_increment(place)
    second = next_increment(place)
    assert second.copying[STANDBY].copied > 0
    place.execute(STANDBY, f"SELECT pg_drop_replication_slot('{slot}')")
    third = next_increment(place)
    assert third.copying[STANDBY].operation == third.operation
    assert third.copying[STANDBY].copied == 0
    assert "restarts" in third.copying[STANDBY].reason
    # What was copied for the first is garbage, and what is copied for the second is not.
    collect_garbage(place.fleet, 0.0, Silent())
    assert not steps(place, first.operation)
    assert steps(place, third.operation)
    done = finish_copy(place)
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def complete(place: ChangingFleet) -> UnderwayCopy:
    """Take increments until all tables are copied; the next one would add the copy to the chain."""
    for _ in range(12):
        place.write()
        place.increment()
        if (copy := underway(place)).is_complete:
            return copy
    raise AssertionError(copy)


def underway(place: ChangingFleet) -> UnderwayCopy:
    store = place.fleet.store.open()
    return read_underway(store, read_chain(store, "chain"), STANDBY)


def test_rows_that_the_store_has_lost_are_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    copied = complete(place).copied
    lost, cut_off = [step.objects[0] for step in copied.steps if step.objects][:2]
    (place.folder / "store" / lost.key).unlink()
    path = place.folder / "store" / cut_off.key
    path.write_bytes(path.read_bytes()[:-1])
    second = next_increment(place)
    assert second.copying[STANDBY].operation == first.operation
    assert second.copying[STANDBY].copied == len(copied.copied) - 2
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == first.operation
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def test_a_copy_whose_archive_is_damaged_restarts(place: ChangingFleet) -> None:
    place.runs.full("chain")
    slot = place.drop_slot(STANDBY)
    operation = next_increment(place).operation
    for has_all in (False, True):
        complete(place)
        segment = sorted((place.folder / "store" / archive_prefix("chain", STANDBY, operation)).iterdir())[1]
        if has_all:
            segment.write_bytes(segment.read_bytes()[:-100] + b"x" * 100)
        else:
            segment.unlink()
        commit = next_increment(place)
        assert commit.copying[STANDBY].operation == commit.operation
        assert absent_names(commit) == {STANDBY}
        operation = commit.operation
    reason = commit.copying[STANDBY].reason
    # Why it began at first, and only the newest problem.
    assert f"slot {slot} does not exist" in reason
    assert reason.count("restarts") == 1
    assert "damaged" in reason
    done = finish_copy(place)
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


@pytest.mark.parametrize("damage", [flip_byte, Path.unlink])
def test_a_copy_whose_archive_is_damaged_while_it_is_completed_restarts(
    place: ChangingFleet, damage: Callable[[Path], None]
) -> None:
    """The checks have read the archive before; it is read again at the commit, which must not fail."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    operation = next_increment(place).operation

    def lose(reached: Reached) -> None:
        if reached.point == CrashPoint.INTENT_STORED:
            damage(sorted((place.folder / "store" / archive_prefix("chain", STANDBY, operation)).iterdir())[0])

    def take(fleet: Fleet) -> Increment:
        place.write()
        commit = create_increment(fleet, CreateRequest("chain"), place.runs.spark, Watching(lose))
        assert isinstance(commit, Increment)
        place.states[commit.increment] = place.live_state()
        return commit

    complete(place)
    commit = take(place.fleet)
    assert absent_names(commit) == {STANDBY}
    assert not commit.copying
    assert not commit.renewed
    # The next one begins another copy.
    operation = next_increment(place).operation
    complete(place)
    required = replace(place.fleet, standbys_min=None)
    with pytest.raises(ObjectDamagedError, match=STANDBY):
        take(required)
    place.runs = Runs(required, place.runs.spark)
    done = next_increment(place)
    assert (done.renewed[STANDBY].began_by, done.copying) == ("", {})
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)
    place.check_restores(commit.increment)


# When the server is promoted that is being copied: between two steps, or during one, with its rows stored or not.
PROMOTED_AT = ("between steps", CrashPoint.SLOT_MADE, CrashPoint.BASE_COPIED)


@pytest.mark.parametrize("at", PROMOTED_AT)
def test_the_standby_that_is_being_copied_is_promoted(tmp_path: Path, spark: SparkSession, at: str) -> None:
    """It continues the archive of the primary; the copy of the standby restarts on the server that takes its place."""
    with fleet_with_chain(tmp_path, spark, 1, 1) as place:
        first = begin_stepwise(place)

        def fail_over() -> None:
            place.await_replay(STANDBY)
            place.stop("s1")
            promote(place, STANDBY)

        def act(reached: Reached) -> None:
            is_committed = CrashPoint.COMMITTED in [one.point for one in watching.reached_points]
            if is_committed and reached.point == at and not place.promoted:
                fail_over()

        watching = Watching(act)
        place.write()
        place.await_replay(STANDBY)
        commit = create_increment(place.fleet, CreateRequest("chain"), place.runs.spark, watching)
        place.states[commit.increment] = place.live_state()
        assert commit.copying[STANDBY].operation == first.operation
        if not place.promoted:
            fail_over()
        place.write()
        after = place.increment()
        assert after.absent.keys() == {STANDBY}
        assert not after.renewed
        assert after.timelines == {"s1": 2}
        old = place.servers.node("s1")
        delete_server(old)
        create_standby(place.servers._programs(old), old, place.servers.node(STANDBY))
        place.start("s1")
        finish_stepwise(place)


def test_another_standby_is_promoted_while_one_is_being_copied(tmp_path: Path, spark: SparkSession) -> None:
    with fleet_with_chain(tmp_path, spark, 1, 2) as place:
        first = begin_stepwise(place)
        place.write()
        assert place.increment().copying[STANDBY].copied > 0
        for standby in (STANDBY, "s1-b2"):
            place.await_replay(standby)
        place.stop("s1")
        promote(place, "s1-b2")
        stop_server(place.servers.node(STANDBY))
        follow(place, STANDBY, "s1-b2")
        place.write()
        place.await_replay(STANDBY)
        commit = place.increment()
        assert commit.timelines["s1"] == 2
        # What was copied on the timeline before is not used.
        assert commit.copying[STANDBY].operation != first.operation
        finish_stepwise(place)


def begin_stepwise(place: ChangingFleet) -> Increment:
    """Begin to copy the standby of s1 in steps of one table."""
    for number in range(2):
        place.execute(
            "s1", f"CREATE TABLE t{number} (id int PRIMARY KEY)", f"INSERT INTO t{number} SELECT generate_series(1, 9)"
        )
    place.await_replay(STANDBY)
    stepwise = replace(place.fleet, background_bytes_min=8192, background_seconds=0.001, standbys_min=0)
    place.runs = Runs(stepwise, place.runs.spark)
    place.drop_slot(STANDBY)
    commit = next_increment(place)
    assert commit.copying.keys() == {STANDBY}
    return commit


def finish_stepwise(place: ChangingFleet) -> None:
    """Take increments until the copy of the standby of s1 is part of the chain, and prove all of them."""
    # On a busy machine, some steps give up their wait for a slot.
    for _ in range(20):
        commit = next_increment(place)
        if STANDBY in commit.renewed:
            break
    assert STANDBY in commit.renewed
    last = next_increment(place)
    assert STANDBY not in {*last.absent, *last.copying}
    assert not place.check().conflicts
    place.check_restores(*place.states)
    place.check_restores_without("s1", commit.increment, last.increment)


def test_other_creates_leave_the_slot_of_a_step_alone(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    node, slot = place.fleet.node(STANDBY), copy_slot_name(first.operation)

    def rulings() -> list[SlotRuling]:
        with open_sessions(place.fleet, place.fleet.nodes) as sessions:
            chains = read_kept_chains(place.fleet.store.open(), sessions, Silent())
        return [rule_on_slots(kept, place.fleet, ended=False) for kept in chains if kept.slot == slot]

    create_exported_slot(node, place.fleet.node("s1"), slot, 30).connection.close()
    assert rulings() == [SlotRuling()]
    before = steps(place, first.operation)
    # A step replaces the slot that a process has left which was killed.
    next_increment(place)
    assert steps(place, first.operation) == before + 1
    assert slot not in slots_of(node.dsn)
    done = finish_copy(place)
    create_exported_slot(node, place.fleet.node("s1"), slot, 30).connection.close()
    (ruling,) = rulings()
    assert [node.id for node in ruling.nodes] == [STANDBY]
    last = next_increment(place)
    assert slot not in slots_of(node.dsn)
    is_proven(place, done.increment, last.increment)


def test_a_copy_restarts_if_the_tables_of_its_primary_are_copied_again(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    next_increment(place)
    place.drop_slot("s1")
    third = next_increment(place)
    copying = third.copying[STANDBY]
    assert third.renewed.keys() == {"s1"}
    assert (copying.operation, copying.copied) == (first.operation, 0)
    assert copying.reason.endswith("restarts: all tables of s1 are copied again")
    # Its first table is copied after the commit.
    assert 0 < len(underway(place).copied.copied) < copying.wanted
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == first.operation
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def test_the_slot_of_a_standby_that_is_removed_while_it_is_copied_is_named(place: ChangingFleet) -> None:
    place.runs.full("chain")
    slot = place.drop_slot(STANDBY)
    next_increment(place)
    fewer = replace(place.fleet, nodes=tuple(node for node in place.fleet.nodes if node.id != STANDBY))
    notes = Notes()
    commit = create_increment(fewer, CreateRequest("chain"), place.runs.spark, notes)
    assert isinstance(commit, Increment)
    assert not commit.copying
    (note,) = [note for note in notes.notes if "not in fleet.toml any more" in note]
    assert STANDBY in note
    assert f"SELECT pg_drop_replication_slot('{slot}')" in note
    notes = Notes()
    create_increment(fewer, CreateRequest("chain"), place.runs.spark, notes)
    assert not any("not in fleet.toml any more" in note for note in notes.notes)


def test_a_copy_is_kept_while_the_standby_that_is_required_meanwhile_is_away(
    tmp_path: Path, spark: SparkSession
) -> None:
    with fleet_with_chain(tmp_path, spark, 1, 2) as place:
        place.execute("s1", *(f"CREATE TABLE t{number} (id int PRIMARY KEY)" for number in range(4)))
        whole = replace(place.fleet, background_bytes_min=8192, background_seconds=0.001, standbys_min=1)
        place.runs = Runs(whole, place.runs.spark)
        place.drop_slot(STANDBY)
        first = next_increment(place)
        assert first.copying.keys() == {STANDBY}
        place.stop("s1-b2")
        with pytest.raises(StandbyNeededError, match=r"node s1-b2: .* standby s1-b1 is still being"):
            place.increment()
        place.start("s1-b2")
        assert next_increment(place).copying[STANDBY].operation == first.operation
        complete(place)
        # With a complete copy, the other standby is not needed.
        place.stop("s1-b2")
        done = next_increment(place)
        assert done.renewed[STANDBY].began_by == first.operation
        assert absent_names(done) == {"s1-b2"}


def test_a_copy_of_a_standby_that_misses_changes_of_tables_restarts(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    place.stop(STANDBY)
    second = next_increment(place)
    # Nothing has happened that its archive would lack.
    assert second.copying[STANDBY] == first.copying[STANDBY]
    place.start(STANDBY)
    third = next_increment(place)
    assert third.copying[STANDBY].operation == first.operation
    place.stop(STANDBY)
    place.execute("s1", "ALTER TABLE four ADD COLUMN more int")
    fourth = next_increment(place)
    assert not fourth.copying
    place.start(STANDBY)
    fifth = next_increment(place)
    assert fifth.copying[STANDBY].operation == fifth.operation
    done = finish_copy(place)
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def test_a_standby_that_was_added_is_copied_in_the_background(place: ChangingFleet) -> None:
    whole = place.fleet
    fewer = replace(whole, nodes=tuple(node for node in whole.nodes if node.id != STANDBY))
    place.runs = Runs(fewer, place.runs.spark)
    place.runs.full("chain")
    next_increment(place)
    place.runs = Runs(whole, place.runs.spark)
    second = next_increment(place)
    assert second.copying.keys() == {STANDBY}
    assert STANDBY not in second.segments
    done = finish_copy(place)
    assert done.renewed[STANDBY].is_new
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)


def test_two_creates_do_not_copy_the_same_table(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    done: list[subprocess.CompletedProcess[str]] = []
    threads = [threading.Thread(target=lambda: done.append(run_create(place))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # One of them may have found the fleet busy.
    assert any(one.returncode in (0, 4) for one in done), done
    found = read_chain(place.fleet.store.open(), "chain")
    assert found.copying[STANDBY].operation == first.operation
    completed = finish_copy(place)
    last = next_increment(place)
    is_proven(place, completed.increment, last.increment)


@pytest.mark.parametrize(
    "place", ['[watch]\nname = "chain-{n}"\nevery = "10s"\nfull = "never"\n' + STEPWISE], indirect=True
)
@pytest.mark.timeout(600)
def test_the_increments_of_a_watch_do_not_wait_for_a_table_that_is_copied(place: ChangingFleet, tmp_path: Path) -> None:
    place.runs.full("chain-1")
    place.rebuild(STANDBY)

    def last() -> Increment | None:
        commit = read_chain(place.fleet.store.open(), "chain-1").last
        return commit if isinstance(commit, Increment) else None

    def await_commit(is_awaited: Callable[[Increment], bool]) -> Increment:
        deadline = time.monotonic() + 240
        while (commit := last()) is None or not is_awaited(commit):
            assert watch.poll() is None, log.read_text()
            assert time.monotonic() < deadline, (commit and commit.copying, log.read_text())
            time.sleep(0.2)
        return commit

    log = tmp_path / "watch.log"
    program = [sys.executable, *PROGRAM, "--json", "--fleet", str(place.fleet.path), "watch"]
    with log.open("wb") as output:
        watch = subprocess.Popen(program, stdout=output, stderr=output, cwd=ROOT)
    copying: list[int] = []
    try:
        deadline = time.monotonic() + 120
        while not (copying := children(watch.pid, "standby_copies")):
            assert watch.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        # It has hardly begun: it takes longer to import its modules.
        os.kill(copying[0], signal.SIGSTOP)
        begun = await_commit(lambda commit: STANDBY in commit.copying)
        later = await_commit(lambda commit: commit.increment >= begun.increment + 2)
        # Nothing is copied meanwhile: the increments themselves copy no table.
        assert later.copying[STANDBY].copied == begun.copying[STANDBY].copied < later.copying[STANDBY].wanted
        os.kill(copying[0], signal.SIGCONT)
        await_commit(lambda commit: STANDBY not in commit.absent)
    finally:
        for process in copying:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        watch.send_signal(signal.SIGTERM)
        assert watch.wait(120) == 0, log.read_text()
    assert place.check(name="chain-1").result == VALID


def children(parent: int, part: str) -> list[int]:
    """Return the processes that a process has started, and whose command lines contain the part."""
    found = []
    for thread in Path(f"/proc/{parent}/task").iterdir():
        with suppress(OSError):
            for process in map(int, (thread / "children").read_text().split()):
                if part in Path(f"/proc/{process}/cmdline").read_text():
                    found.append(process)
    return found


def test_a_small_standby_is_copied_at_once(place: ChangingFleet) -> None:
    place.runs = Runs(replace(place.fleet, background_bytes_min=1 << 30), place.runs.spark)
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    commit = next_increment(place)
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.copying
    assert not commit.renewed[STANDBY].later


def test_a_standby_that_is_required_is_copied_at_once(place: ChangingFleet) -> None:
    place.runs = Runs(replace(place.fleet, standbys_min=None), place.runs.spark)
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    commit = next_increment(place)
    assert commit.renewed.keys() == {STANDBY}
    assert not commit.copying


def test_global_transactions_are_whole_in_a_copy_made_in_the_background(place: ChangingFleet) -> None:
    dsns = [node.dsn for node in place.fleet.primaries]
    with BankWorkload(dsns, clients=3, cross_shard_ratio=1.0, pause_seconds=0.02):
        place.runs.full("chain")
        place.drop_slot(STANDBY)
        for _ in range(14):
            commit = place.runs.increment("chain")
            assert isinstance(commit, Increment)
            if commit.renewed:
                break
        assert commit.renewed.keys() == {STANDBY}
        place.runs.increment("chain")
    assert place.check().result == VALID
    folders = [place.folder / "store/snapshots/chain" / part / "s1" for part in ("base", "wal")]
    for folder in folders:
        folder.rename(folder.with_suffix(".away"))
    place.runs.restore("chain", place.target, commit.increment, use_backup_copies=True)
    invariants = read_invariants([node.dsn for node in place.target.primaries])
    assert invariants.hold
    assert sum(invariants.transfers) > 0


def test_merges_second_stores_and_exact_times_of_a_chain_with_such_a_copy(place: ChangingFleet, tmp_path: Path) -> None:
    """A merge while the copy is made, what lies before it is removed, and another merge when it is complete."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    change(place, 1)
    next_increment(place)
    run_ok(place, "merge", "chain", "--drop-earlier", "--yes")
    collect_garbage(place.fleet, 0.0, Silent())
    change(place, 2)
    between = next_increment(place)
    assert between.copying[STANDBY].operation == first.operation
    run_ok(place, "copy", "chain", "--to", second_store(place, tmp_path, "second"))
    # Archiving ahead drains the standby's slot, too.
    for shard in ("s1", "s2"):
        place.execute(shard, "INSERT INTO seen SELECT n, repeat('x', 900) FROM generate_series(5000, 8000) n")
    place.await_replay(STANDBY)
    assert archive_ahead(place.fleet, "chain", Silent()).bytes > 0
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == first.operation
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)
    run_ok(place, "merge", "chain", "--drop-earlier", "--yes")
    collect_garbage(place.fleet, 0.0, Silent())
    change(place, 3)
    newest = next_increment(place)
    is_proven(place, last.increment, newest.increment)
    run_ok(place, "copy", "chain", "--to", second_store(place, tmp_path, "third"))


def test_what_is_archived_ahead_stays_when_a_merge_from_the_time_of_the_copy_gives_up_what_is_earlier(
    place: ChangingFleet,
) -> None:
    """The archive began before the merge and became part of the chain after it; the next increment continues it."""
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    run_ok(place, "merge", "chain")
    done = finish_copy(place)
    assert done.renewed[STANDBY].began_by == first.operation
    for shard in ("s1", "s2"):
        place.execute(shard, "INSERT INTO seen SELECT n, repeat('x', 900) FROM generate_series(5000, 8000) n")
    place.await_replay(STANDBY)
    assert archive_ahead(place.fleet, "chain", Silent()).bytes > 0
    run_ok(place, "merge", "chain", "--to", str(first.increment), "--drop-earlier", "--yes")
    collect_garbage(place.fleet, 0.0, Silent())
    last = next_increment(place)
    assert not last.renewed
    is_proven(place, done.increment, last.increment)


def needed_keys(place: ChangingFleet) -> set[str]:
    chain = read_chain(place.fleet.store.open(), "chain")
    return {key for commit in chain.commits for key in commit.object_sizes}


def garbage_keys(place: ChangingFleet) -> set[str]:
    report = find_garbage(place.fleet.store.open(), 0.0, Silent())
    return {one.key for garbage in report.garbage for one in garbage.objects}


def test_gc_keeps_a_copy_that_becomes_part_of_a_chain_that_ends_meanwhile(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    next_increment(place)
    done: list[Increment] = []

    def read_and_go_on(store: ObjectStore, name: str) -> Chain:
        chain = read_chain(store, name)
        if not done:
            done.append(finish_copy(place))
            run_ok(place, "end", "chain", "--yes")
        return chain

    monkeypatch.setattr(garbage_rules, "read_chain", read_and_go_on)
    # The first gc has listed only some of the objects, and the second all of them.
    assert not garbage_keys(place) & needed_keys(place)
    assert not garbage_keys(place) & needed_keys(place)
    is_proven(place, done[0].increment)


def test_a_copy_that_an_ended_chain_has_begun_stays_until_no_create_can_need_it(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    first = next_increment(place)
    change(place, 1)
    next_increment(place)
    run_ok(place, "end", "chain", "--yes")
    copied = {key for key in place.fleet.store.open().list("snapshots/chain") if f"{STANDBY}/{first.operation}" in key}
    assert {key.split("/")[2] for key in copied} >= {"base", "copies", "wal"}
    assert not garbage_keys(place) & copied
    monkeypatch.setattr(garbage_rules, "ENDED_SECONDS", 0.0)
    assert garbage_keys(place) == copied
    # A create that had passed its checks before the mark was stored may have stored its intent.
    store = place.fleet.store.open()
    late = new_operation(CREATE, "chain", 3, tuple(node.id for node in place.fleet.nodes))
    begin(store, late)
    assert not garbage_keys(place) & copied
    record_outcome(store, late, "failed")
    assert garbage_keys(place) == copied


def test_a_transaction_that_is_prepared_before_a_table_is_copied_and_decided_after_it_counts(
    place: ChangingFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.runs.full("chain")
    place.drop_slot(STANDBY)
    next_increment(place)
    for number in range(3):
        for shard in ("s1", "s2"):
            place.execute(
                shard,
                f"BEGIN; UPDATE three SET text = 'prepared {number}' WHERE id = {100 + number};"
                f" INSERT INTO one VALUES ({2000 + number}, 'prepared');"
                f" UPDATE two SET text = 'prepared {number}' WHERE id = {200 + number};"
                f" PREPARE TRANSACTION 'spanning-{number}'",
            )
        next_increment(place)
        for shard in ("s1", "s2"):
            place.execute(shard, f"{'ROLLBACK' if number == 1 else 'COMMIT'} PREPARED 'spanning-{number}'")
            place.execute(shard, f"UPDATE three SET text = 'after' WHERE id = {100 + number}")
    done = finish_copy(place)
    last = next_increment(place)
    is_proven(place, done.increment, last.increment)
    check_listed(place, done, monkeypatch)


def check_listed(place: ChangingFleet, done: Increment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check compares the transactions of every step of the copy, and reads the events of its archive once."""
    store, read = place.fleet.store.open(), list[Segment]()
    chain, renewal = read_chain(store, "chain"), done.renewed[STANDBY]
    assert len({later.position for later in renewal.later}) > 2

    def read_and_count(store: ObjectStore, segment: Segment) -> pa.Table:
        read.append(segment)
        return read_events(store, segment)

    monkeypatch.setattr(copy_slots, "read_events", read_and_count)

    def conflicts(later: tuple[CopiedLater, ...]) -> int:
        forged = structs.replace(done, renewed={STANDBY: structs.replace(renewal, later=later)})
        findings = Findings(SnapshotReport("chain", done.increment))
        increments = tuple(forged if one.increment == done.increment else one for one in chain.increments)
        check_spanning(structs.replace(chain, increments=increments), store, findings, done.increment - 1)
        return len(findings.report.conflicts)

    assert conflicts(renewal.later) == 0
    assert sorted(one.key for one in read) == sorted(one.key for one in done.segments[STANDBY])
    for number, one in enumerate(renewal.later):
        more = structs.replace(one, pending=(Lsn(1), *one.pending))
        assert conflicts((*renewal.later[:number], more, *renewal.later[number + 1 :])) == 1
