"""A terminal snapshot is the final state of a fleet that is written to; whatever goes wrong, writes come back."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from check.verify import CheckRequest, check_snapshots
from embedded.bank_workload import BankStoppedError, BankWorkload
from fleet.progress import Silent
from fleet.read_only.resume import FleetFrozenError, resume_fleet
from snapshots.create.full import create_full
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.create.terminal import FinalStateError
from snapshots.listing.name_templates import new_name, newest_name
from snapshots.operations.crash_points import FULL_POINTS, PER_NODE, CrashPoint, terminal_crash_points
from snapshots.operations.operation import pending_operations
from snapshots.records.commits import SnapshotExistsError, read_chain
from storage.errors import SnapshotError
from tests.cli_runs import run_here
from tests.integration.read_only.entry_writers import ENTRY, TABLE, check_final, restored, value, writing
from tests.integration.read_only.frozen_nodes import WRITE, execute, may_write, state
from tests.integration.test_waits import gids
from tests.snapshot_runs import Runs, names_of_snapshots, runs_on, sorted_copies
from tests.watching import Reached, Watching
from wal.slots.waiting import SlotWaitError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embedded.fleet import EmbeddedFleet
    from fleet.config import Fleet, Node
    from storage.store import ObjectStore

NEXT = "SELECT nextval('entry_number_seq')"
INSISTING = "-c default_transaction_read_only=off"


@pytest.fixture(scope="module")
def runs(servers: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute(TABLE)
    with runs_on(servers, tmp_path_factory.mktemp("terminal-store"), spark) as found:
        yield found


@pytest.fixture(autouse=True)
def writable_in_the_end(runs: Runs) -> Iterator[None]:
    """What a test that failed has left keeps no other one from writing."""
    yield
    with suppress(SnapshotError):
        resume_fleet(runs.fleet, Silent())
    for node in runs.fleet.primaries:
        for gid in gids(node):
            execute(node, f"ROLLBACK PREPARED '{gid}'")


def taken(runs: Runs, name: str, watching: Watching, *, incremental: bool = False, wait: float = 20.0) -> Any:
    request = CreateRequest(name, terminal=True, wait_seconds=wait)
    return (create_increment if incremental else create_full)(runs.fleet, request, runs.spark, watching)


def store_of(runs: Runs) -> ObjectStore:
    return runs.fleet.store.open()


def settings(fleet: Fleet) -> list[Any]:
    return [state(node) for node in fleet.primaries]


def test_a_terminal_snapshot_is_the_final_state_and_the_chain_goes_on_after_it(runs: Runs) -> None:
    dsns = [node.dsn for node in runs.fleet.primaries]
    was, watching = settings(runs.fleet), Watching()
    with writing(*dsns) as writers:
        workload = BankWorkload(dsns, clients=2, pause_seconds=0.005)
        workload.start()
        commit = taken(runs, "last", watching)
        with pytest.raises(BankStoppedError):
            workload.stop()
        assert commit.terminal
        assert [one.undecided for one in commit.cut.nodes] == [(), ()]
        twice = PER_NODE | {CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED}
        assert [one.point for one in watching.reached_points] == [
            point for point in terminal_crash_points(FULL_POINTS) for _ in range(2 if point in twice else 1)
        ]
        check_final(runs, "last", writers)
        # An ordinary one has the same state, and says what it finds; a terminal one would lose the way back.
        notes = Watching()
        create_increment(runs.fleet, CreateRequest("last"), runs.spark, notes)
        assert any("read-only since" in note and "snapshot resume" in note for note in notes.notes)
        with pytest.raises(FleetFrozenError):
            taken(runs, "last", Watching(), incremental=True)
        assert not may_write(dsns[0])
        before = len(writers[0].acknowledged)
        assert len(resume_fleet(runs.fleet, Silent()).results) == 2
        assert settings(runs.fleet) == was
        assert may_write(dsns[0])
        while len(writers[0].acknowledged) == before:
            writers[0].stop.wait(0.05)
        workload = BankWorkload(dsns, clients=2, pause_seconds=0.005)
        workload.start()
        assert not runs.increment("last").terminal
        assert taken(runs, "last", Watching(), incremental=True).terminal
        with pytest.raises(BankStoppedError):
            workload.stop()
        check_final(runs, "last", writers)
    chain = read_chain(store_of(runs), "last")
    assert [commit.terminal for commit in chain.commits] == [True, False, False, True]
    code, listed = run_here(runs.fleet, "list")
    (entry,) = [one for one in listed["snapshots"] if one["name"] == "last"]
    assert (code, entry["terminal"], [one["terminal"] for one in entry["increments"]]) == (
        0, True, [False, False, True]
    )  # fmt: skip
    (report,) = check_snapshots(runs.fleet, CheckRequest("last", metadata_only=True), runs.spark, Silent()).snapshots
    assert report.conflicts == []
    resume_fleet(runs.fleet, Silent())


def after_a_failure(runs: Runs, name: str, was: list[Any]) -> None:
    """Nothing is committed, everybody may write, all is set as before, and nothing is left to settle."""
    assert name not in names_of_snapshots(runs.fleet)
    assert settings(runs.fleet) == was
    assert all(may_write(node.dsn) for node in runs.fleet.primaries)
    assert pending_operations(store_of(runs)) == []


def at(point: CrashPoint, act: Callable[[], object], count: int = 1) -> Watching:
    """Do it when the point is reached."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (point, count):
            act()

    return Watching(then)


def insist(node: Node) -> None:
    with psycopg.connect(node.dsn, options=INSISTING) as connection:
        connection.execute(ENTRY, (uuid.uuid4(),))


def prepare(session: psycopg.Connection[Any], gid: str) -> None:
    session.execute("BEGIN")
    session.execute(ENTRY, (uuid.uuid4(),))
    session.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_client_that_insists_on_writing_is_found(runs: Runs) -> None:
    first, second = runs.fleet.primaries
    was = settings(runs.fleet)
    with pytest.raises(
        FinalStateError, match=rf"node {first.id}: tables were written after writes had ended: public.entry"
    ) as caught:
        taken(runs, "insisted", at(CrashPoint.STARTS_WRITTEN, lambda: insist(first)))
    assert caught.value.exit_code == 3
    assert caught.value.details == {"node": first.id, "groups": ["public.entry"]}
    after_a_failure(runs, "insisted", was)
    with writing(second.dsn, options=INSISTING) as (writer,):
        with pytest.raises(FinalStateError, match=f"node {second.id}: "):
            taken(runs, "insisted", Watching())
        before = len(writer.acknowledged)
        while len(writer.acknowledged) == before:
            writer.stop.wait(0.05)
    after_a_failure(runs, "insisted", was)
    with pytest.raises(FinalStateError, match=rf"node {first.id}: 1 changes were written after the cut"):
        taken(runs, "insisted", at(CrashPoint.ARCHIVED, lambda: insist(first)))
    after_a_failure(runs, "insisted", was)


def test_a_node_that_somebody_makes_writable_meanwhile_is_found(runs: Runs) -> None:
    was, (node, _) = settings(runs.fleet), runs.fleet.primaries
    reset = "ALTER DATABASE bank RESET default_transaction_read_only"
    with pytest.raises(FinalStateError, match=rf"node {node.id}: it was made writable again before the commit"):
        taken(runs, "reset", at(CrashPoint.ARCHIVED, lambda: execute(node, reset)))
    after_a_failure(runs, "reset", was)


def test_nobody_is_disturbed_for_what_is_prepared_for_ever(runs: Runs) -> None:
    runs.full("doubt")
    was, (node, _) = settings(runs.fleet), runs.fleet.primaries
    watching = Watching()
    with closing(psycopg.connect(node.dsn, autocommit=True)) as session:
        prepare(session, "in-doubt")
        try:
            with pytest.raises(SlotWaitError, match="'in-doubt'"):
                taken(runs, "doubt", watching, incremental=True, wait=1)
            assert CrashPoint.FROZEN not in {one.point for one in watching.reached_points}
            session.execute(WRITE)
        finally:
            session.execute("ROLLBACK PREPARED 'in-doubt'")
    after_a_failure(runs, "doubt at 1", was)
    assert read_chain(store_of(runs), "doubt").last.increment == 0


def test_what_sessions_leave_prepared_when_they_are_ended_is_waited_for(runs: Runs) -> None:
    runs.full("left")
    was, (node, _) = settings(runs.fleet), runs.fleet.primaries
    with closing(psycopg.connect(node.dsn, autocommit=True)) as session:
        leaving = at(CrashPoint.FROZEN, lambda: prepare(session, "left-1"), 2)
        with pytest.raises(SlotWaitError, match=r"the last cut: .*'left-1'"):
            taken(runs, "left", leaving, incremental=True, wait=1)
    after_a_failure(runs, "left at 1", was)
    execute(node, "ROLLBACK PREPARED 'left-1'")

    def decide() -> None:
        # A read-only session may do that.
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            connection.execute("COMMIT PREPARED 'left-2'")

    with ExitStack() as stack:
        session = stack.enter_context(closing(psycopg.connect(node.dsn, autocommit=True)))
        timer = threading.Timer(0.5, decide)

        def then(reached: Reached) -> None:
            if (reached.point, reached.count) == (CrashPoint.FROZEN, 2):
                prepare(session, "left-2")
            elif (reached.point, reached.count) == (CrashPoint.SESSIONS_ENDED, 2):
                timer.start()

        entries = value(node, "SELECT count(*) FROM entry")
        assert taken(runs, "left", Watching(then), incremental=True).terminal
        timer.join()
        assert value(node, "SELECT count(*) FROM entry") == entries + 1
        with restored(runs, "left") as copies:
            assert sorted_copies(copies[0].dsn) == sorted_copies(node.dsn)
    resume_fleet(runs.fleet, Silent())


@pytest.mark.parametrize(
    "point", [CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED, CrashPoint.FINISHES_WRITTEN, CrashPoint.SEQUENCES_READ]
)
def test_ctrl_c_brings_the_writes_back(runs: Runs, point: CrashPoint) -> None:
    was = settings(runs.fleet)
    with pytest.raises(KeyboardInterrupt):
        taken(runs, "stopped", at(point, interrupt))
    after_a_failure(runs, "stopped", was)


def test_names_and_the_freeze_on_the_command_line(runs: Runs) -> None:
    was = settings(runs.fleet)
    code, document = run_here(runs.fleet, "create", "move-{n}", "--terminal", "--dry-run")
    assert (code, document["snapshot"]) == (0, "move-1")
    assert settings(runs.fleet) == was
    runs.full("move-1")
    code, document = run_here(runs.fleet, "create", "move-{n}", "--incremental", "--terminal", spark=runs.spark.running)
    assert (code, document["snapshot"], document["increment"], document["terminal"]) == (0, "move-1", 1, True)
    assert run_here(runs.fleet, "show", "move-{n}")[1]["name"] == "move-1"
    code, document = run_here(runs.fleet, "create", "move-{n}", "--terminal", "--dry-run")
    assert (code, document["error"]) == (3, "fleet-frozen")
    code, document = run_here(runs.fleet, "resume")
    assert code == 0
    assert [(one["node"], one["snapshot"]) for one in document["nodes"]] == [
        (node.id, "move-1") for node in runs.fleet.primaries
    ]
    assert run_here(runs.fleet, "resume") == (
        0, {"schema": "cutline/resume/1", "asked": [node.id for node in runs.fleet.primaries], "nodes": []}
    )  # fmt: skip
    assert settings(runs.fleet) == was


def test_of_two_creates_that_made_the_same_name_the_second_says_so(runs: Runs) -> None:
    template = "both-{n}"
    first, second = new_name(runs.fleet, template), new_name(runs.fleet, template)
    assert first == second == "both-1"
    # The second one has made its checks when the first one begins, and is over.
    watching = at(CrashPoint.CHECKED, lambda: runs.full(first))
    with pytest.raises(SnapshotExistsError, match="snapshot both-1 exists already") as caught:
        create_full(runs.fleet, CreateRequest(second), runs.spark, watching)
    assert caught.value.exit_code == 3
    assert CrashPoint.INTENT_STORED not in {one.point for one in watching.reached_points}
    assert new_name(runs.fleet, template) == "both-2"
    assert newest_name(runs.fleet, template) == "both-1"
