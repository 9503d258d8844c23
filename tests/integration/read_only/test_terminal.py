"""A terminal snapshot is the final state of a busy fleet; if anything goes wrong, the fleet accepts writes again."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.bank_workload import BankStoppedError, BankWorkload
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.read_only import FleetFrozenError, resume_fleet
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.terminal import FinalStateError
from cutline.snapshots.listing.name_templates import new_name, newest_name
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.records.proven_chains import SnapshotExistsError, read_chain
from cutline.storage.errors import SnapshotError, StoppedError
from cutline.wal.drain.open_transactions import SlotWaitError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Runs, names_of_snapshots, runs_on, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.faults.points import FULL_POINTS, PER_NODE, terminal_crash_points
from tests.integration.read_only.entry_writers import ENTRY, TABLE, assert_final, read_value, restored, writing
from tests.integration.read_only.frozen_nodes import WRITE, execute, may_write, read_settings
from tests.integration.test_waits import gids

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.fleet.config import Fleet, Node
    from cutline.storage.store import ObjectStore

INSISTING = "-c default_transaction_read_only=off"


@pytest.fixture(scope="module")
def runs(servers: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Runs]:
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute(TABLE)
    with runs_on(servers, tmp_path_factory.mktemp("terminal-store"), spark) as found:
        yield found


@pytest.fixture(autouse=True)
def writable_at_the_end(runs: Runs) -> Iterator[None]:
    """Let the fleet accept writes again after a test that failed, for the next test."""
    yield
    with suppress(SnapshotError):
        resume_fleet(runs.fleet, Silent())
    for node in runs.fleet.primaries:
        for gid in gids(node):
            execute(node, f"ROLLBACK PREPARED '{gid}'")


def create_terminal(runs: Runs, name: str, watching: Watching, *, incremental: bool = False, wait: float = 20.0) -> Any:
    request = CreateRequest(name, terminal=True, wait_seconds=wait)
    return (create_increment if incremental else create_full)(runs.fleet, request, runs.spark, watching)


def store_of(runs: Runs) -> ObjectStore:
    return runs.fleet.store.open()


def fleet_settings(fleet: Fleet) -> list[Any]:
    return [read_settings(node) for node in fleet.primaries]


def test_a_terminal_snapshot_is_the_final_state_and_the_chain_continues_after_it(runs: Runs) -> None:
    dsns = [node.dsn for node in runs.fleet.primaries]
    original, watching = fleet_settings(runs.fleet), Watching()
    with writing(*dsns) as writers:
        workload = BankWorkload(dsns, clients=2, pause_seconds=0.005)
        workload.start()
        commit = create_terminal(runs, "last", watching)
        with pytest.raises(BankStoppedError):
            workload.stop()
        assert commit.terminal
        assert [one.undecided for one in commit.cut.nodes] == [(), ()]
        twice = PER_NODE | {CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED}
        assert [one.point for one in watching.reached_points] == [
            point for point in terminal_crash_points(FULL_POINTS) for _ in range(2 if point in twice else 1)
        ]
        assert_final(runs, "last", writers)
        # An ordinary increment has the same state and a note; a terminal one would lose the settings to restore.
        notes = Watching()
        create_increment(runs.fleet, CreateRequest("last"), runs.spark, notes)
        assert any("read-only since" in note and "snapshot resume" in note for note in notes.notes)
        with pytest.raises(FleetFrozenError):
            create_terminal(runs, "last", Watching(), incremental=True)
        assert not may_write(dsns[0])
        before = len(writers[0].acknowledged)
        assert len(resume_fleet(runs.fleet, Silent()).results) == 2
        assert fleet_settings(runs.fleet) == original
        assert may_write(dsns[0])
        while len(writers[0].acknowledged) == before:
            writers[0].stop.wait(0.05)
        workload = BankWorkload(dsns, clients=2, pause_seconds=0.005)
        workload.start()
        assert not runs.increment("last").terminal
        assert create_terminal(runs, "last", Watching(), incremental=True).terminal
        with pytest.raises(BankStoppedError):
            workload.stop()
        assert_final(runs, "last", writers)
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


def assert_undone(runs: Runs, name: str, original: list[Any]) -> None:
    """Check that nothing is committed, everybody may write, the settings are as before, and no operation is open."""
    assert name not in names_of_snapshots(runs.fleet)
    assert fleet_settings(runs.fleet) == original
    assert all(may_write(node.dsn) for node in runs.fleet.primaries)
    assert read_open_intents(store_of(runs)) == []


def act_at(point: CrashPoint, act: Callable[[], object], count: int = 1) -> Watching:
    """Return a Watching that calls `act` when the point is reached."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (point, count):
            act()

    return Watching(then)


def insist_on_writing(node: Node) -> None:
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
    original = fleet_settings(runs.fleet)
    with pytest.raises(
        FinalStateError,
        match=rf"node {first.id}: tables were written to after all writes had been stopped: public.entry",
    ) as caught:
        create_terminal(runs, "insisted", act_at(CrashPoint.STARTS_WRITTEN, lambda: insist_on_writing(first)))
    assert caught.value.exit_code == 3
    assert caught.value.details == {"node": first.id, "groups": ["public.entry"]}
    assert_undone(runs, "insisted", original)
    with writing(second.dsn, options=INSISTING) as (writer,):
        with pytest.raises(FinalStateError, match=f"node {second.id}: "):
            create_terminal(runs, "insisted", Watching())
        before = len(writer.acknowledged)
        while len(writer.acknowledged) == before:
            writer.stop.wait(0.05)
    assert_undone(runs, "insisted", original)
    written = rf"node {first.id}: 1 changes were written to public\.entry after the cut"
    with pytest.raises(FinalStateError, match=written):
        create_terminal(runs, "insisted", act_at(CrashPoint.ARCHIVED, lambda: insist_on_writing(first)))
    assert_undone(runs, "insisted", original)


def test_a_node_that_somebody_makes_writable_meanwhile_is_found(runs: Runs) -> None:
    original, (node, _) = fleet_settings(runs.fleet), runs.fleet.primaries
    reset = "ALTER DATABASE bank RESET default_transaction_read_only"
    with pytest.raises(FinalStateError, match=rf"node {node.id}: it was made writable again before the commit"):
        create_terminal(runs, "reset", act_at(CrashPoint.ARCHIVED, lambda: execute(node, reset)))
    assert_undone(runs, "reset", original)


def test_no_session_is_ended_if_a_prepared_transaction_is_never_decided(runs: Runs) -> None:
    runs.full("doubt")
    original, (node, _) = fleet_settings(runs.fleet), runs.fleet.primaries
    watching = Watching()
    with closing(psycopg.connect(node.dsn, autocommit=True)) as session:
        prepare(session, "in-doubt")
        try:
            with pytest.raises(SlotWaitError, match="'in-doubt'"):
                create_terminal(runs, "doubt", watching, incremental=True, wait=1)
            assert CrashPoint.FROZEN not in {one.point for one in watching.reached_points}
            session.execute(WRITE)
        finally:
            session.execute("ROLLBACK PREPARED 'in-doubt'")
    assert_undone(runs, "doubt at 1", original)
    assert read_chain(store_of(runs), "doubt").last.increment == 0


def test_transactions_that_ended_sessions_left_prepared_are_awaited(runs: Runs) -> None:
    runs.full("left")
    original, (node, _) = fleet_settings(runs.fleet), runs.fleet.primaries
    with closing(psycopg.connect(node.dsn, autocommit=True)) as session:
        preparing = act_at(CrashPoint.FROZEN, lambda: prepare(session, "left-1"), 2)
        with pytest.raises(SlotWaitError, match=r"the last cut: .*'left-1'"):
            create_terminal(runs, "left", preparing, incremental=True, wait=1)
    assert_undone(runs, "left at 1", original)
    execute(node, "ROLLBACK PREPARED 'left-1'")

    def decide() -> None:
        # PostgreSQL allows COMMIT PREPARED in a read-only session.
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

        entries = read_value(node, "SELECT count(*) FROM entry")
        assert create_terminal(runs, "left", Watching(then), incremental=True).terminal
        timer.join()
        assert read_value(node, "SELECT count(*) FROM entry") == entries + 1
        with restored(runs, "left") as copies:
            assert sorted_copies(copies[0].dsn) == sorted_copies(node.dsn)
    resume_fleet(runs.fleet, Silent())


@pytest.mark.parametrize(
    "point", [CrashPoint.FROZEN, CrashPoint.SESSIONS_ENDED, CrashPoint.FINISHES_WRITTEN, CrashPoint.SEQUENCES_READ]
)
def test_after_ctrl_c_the_fleet_accepts_writes_again(runs: Runs, point: CrashPoint) -> None:
    original = fleet_settings(runs.fleet)
    with pytest.raises(StoppedError, match="nothing was committed"):
        create_terminal(runs, "stopped", act_at(point, interrupt))
    assert_undone(runs, "stopped", original)


def test_names_and_the_freeze_on_the_command_line(runs: Runs) -> None:
    original = fleet_settings(runs.fleet)
    code, document = run_here(runs.fleet, "create", "move-{n}", "--terminal", "--dry-run")
    assert (code, document["snapshot"]) == (0, "move-1")
    assert fleet_settings(runs.fleet) == original
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
    asked = [node.id for node in runs.fleet.primaries]
    expected = {"schema": "cutline/resume/1", "asked": asked, "nodes": [], "warnings": []}
    assert run_here(runs.fleet, "resume") == (0, expected)
    assert fleet_settings(runs.fleet) == original


def test_the_second_of_two_creates_that_chose_the_same_name_is_refused(runs: Runs) -> None:
    template = "both-{n}"
    first, second = new_name(runs.fleet, template), new_name(runs.fleet, template)
    assert first == second == "both-1"
    # The second has passed its checks before the first begins and ends.
    watching = act_at(CrashPoint.CHECKED, lambda: runs.full(first))
    with pytest.raises(SnapshotExistsError, match="snapshot both-1 already exists") as caught:
        create_full(runs.fleet, CreateRequest(second), runs.spark, watching)
    assert caught.value.exit_code == 3
    assert CrashPoint.INTENT_STORED not in {one.point for one in watching.reached_points}
    assert new_name(runs.fleet, template) == "both-2"
    assert newest_name(runs.fleet, template) == "both-1"
