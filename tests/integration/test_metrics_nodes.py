"""Lags and metrics of real nodes: what is told equals what PostgreSQL says, also of nodes that are away."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pytest

import cutline.wal.drain.lags as module
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.publications import publication_names, read_own_names
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics_gathering import MetricsGatherer
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.store_identity import read_identity
from cutline.wal.drain.lags import LagsQuery, NodeLags
from tests.commands.in_process import run_here, run_with_stderr
from tests.commands.snapshot_runs import Runs, command_line, runs_on, slots_of
from tests.commands.watching import Watching
from tests.faults.ports import HOST, free_ports
from tests.faults.stalled_network import execute
from tests.unit.metric_values import of, read, values_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 60.0
# Nodes that answer do so within this, though the machine may be busy.
ASKING_SECONDS_MAX = 30.0
POSITION = "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text"
SLOT = "SELECT confirmed_flush_lsn::text, restart_lsn::text FROM pg_replication_slots WHERE slot_name = %s"
AGE = "SELECT extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float"
FILLER = "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 300000)), pg_current_xact_id()"
Found = TypeVar("Found")


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with runs_on(shared_fleet, tmp_path_factory.mktemp("metrics"), spark) as found:
        found.full("daily")
        yield found


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKING_SECONDS_MAX", ASKING_SECONDS_MAX)


def value(dsn: str, query: str, *arguments: Any) -> tuple[Any, ...]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode(), arguments).fetchone() or ()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def at_rest(fleet: Fleet, ask: Callable[[], Found]) -> tuple[Found, dict[str, Lsn]]:
    """What `ask` finds, and the positions of the nodes, which are the same before and after it: it is of these."""
    found: list[tuple[Found, dict[str, Lsn]]] = []

    def positions() -> dict[str, Lsn]:
        return {node.id: Lsn.parse(value(node.dsn, POSITION)[0]) for node in fleet.nodes}

    def nobody_writes() -> bool:
        before = positions()
        found[:] = [(ask(), before)]
        return positions() == before

    until(nobody_writes)
    return found[0]


@contextmanager
def paused_replay(dsn: str) -> Iterator[None]:
    execute(dsn, "SELECT pg_wal_replay_pause()")
    try:
        until(lambda: value(dsn, "SELECT pg_get_wal_replay_pause_state()") == ("paused",))
        yield
    finally:
        execute(dsn, "SELECT pg_wal_replay_resume()")


def lags_of(fleet: Fleet) -> Mapping[str, NodeLags]:
    return LagsQuery(fleet).lags().nodes


def test_slots_and_standbys_lag_by_what_postgresql_says(runs: Runs) -> None:
    primary, standby = runs.fleet.node("s1"), runs.fleet.node("s1-b1")
    (slot,) = slots_of(primary.dsn)
    until(lambda: value(standby.dsn, POSITION) == value(primary.dsn, POSITION))
    assert lags_of(runs.fleet)["s1-b1"].replay is not None
    with paused_replay(standby.dsn):
        execute(primary.dsn, FILLER)
        (earlier, found, later), positions = at_rest(
            runs.fleet, lambda: (value(standby.dsn, AGE)[0], lags_of(runs.fleet), value(standby.dsn, AGE)[0])
        )
        at, replayed = positions["s1"], positions["s1-b1"]
        confirmed, restart = map(Lsn.parse, value(primary.dsn, SLOT, slot))
        (one,) = found["s1"].slots
        assert (one.slot, one.lag_bytes, one.retained_bytes) == (slot, at - confirmed, at - restart)
        assert one.lag_bytes is not None
        assert one.lag_bytes > 300_000
        assert (found["s1"].is_in_recovery, found["s1-b1"].is_in_recovery) == (False, True)
        replay = found["s1-b1"].replay
        assert replay is not None
        assert replay.size_bytes == at - replayed > 300_000
        assert replay.seconds is not None
        assert 0 < earlier <= replay.seconds <= later
        (standby_lag,) = found["s1-b1"].slots
        assert standby_lag.lag_bytes == replayed - Lsn.parse(value(standby.dsn, SLOT, slot)[0])
    until(lambda: value(standby.dsn, POSITION) == value(primary.dsn, POSITION))
    until(lambda: (lag := lags_of(runs.fleet)["s1-b1"].replay) is not None and (lag.size_bytes, lag.seconds) == (0, 0))
    assert all(one.replay is None for one in lags_of(runs.fleet).values() if not one.is_in_recovery)


def test_status_says_how_far_the_nodes_are(runs: Runs) -> None:
    execute(runs.fleet.node("s1").dsn, FILLER)
    (code, document), positions = at_rest(runs.fleet, lambda: run_here(runs.fleet, "status", "--nodes"))
    assert code == 0
    nodes = {one["node"]: one for one in document["nodes"]}
    assert {name: one["role"] for name, one in nodes.items()} == {
        "s1": "primary", "s2": "primary", "s1-b1": "standby", "s2-b1": "standby",
    }  # fmt: skip
    chain = read_chain(runs.fleet.store.open(), "daily")
    for name, one in nodes.items():
        archived = chain.last.segments[name][-1].through
        assert Lsn.parse(one["position"]) == positions[name]
        assert one["archive_lag_bytes"] == positions[name] - archived
        (slot,) = one["slots"]
        assert slot["slot"] in slots_of(runs.fleet.node(name).dsn)
        assert (slot["snapshot"], slot["chain"], slot["chain_state"]) == ("daily", chain.full.chain, "complete")
        assert (slot["problem"], one["server"]) == ("", name)
        assert (one["replay_lag_bytes"] is None) == (one["role"] == "primary")
        assert (one["holder"], one["problem"]) == (None, None)
        assert one["lock"] == ("free" if one["role"] == "primary" else None)
    assert nodes["s1"]["archive_lag_bytes"] > 300_000


def test_what_another_store_has_left_on_the_nodes_is_named_until_the_statements_have_run(runs: Runs) -> None:
    lost, slot = (
        ("cutline_0badcafe", "cutline_0badcafe_append_only"),
        "cutline_20200101t000000z_0badcafe00",
    )
    primaries = runs.fleet.primaries
    for node in primaries:
        drop_other_publications(runs.fleet, node)
        for name in lost:
            execute(node.dsn, f"CREATE PUBLICATION {name}")
    execute(primaries[0].dsn, f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, true)")
    # What the record of a terminal snapshot is on, and what has another name, is left alone.
    for name in ("cutline_0badf00d", "cutline_mine"):
        execute(primaries[1].dsn, f"CREATE PUBLICATION {name}")
    execute(primaries[1].dsn, "COMMENT ON PUBLICATION cutline_0badf00d IS 'kept'")
    try:
        _, document = run_here(runs.fleet, "status", "--nodes")
        of_slot, of_publications = (text for text in document["unknown"] if "0badcafe" in text)
        assert of_slot == (
            f"slot {slot} on s1: not of this store; if the store that made it is gone, run there:"
            f" SELECT pg_drop_replication_slot('{slot}')"
        )
        assert of_publications == (
            f"publications {' and '.join(lost)} on s1, s2: not of this store; if the store that made them is gone, run"
            f" there: DROP PUBLICATION {', '.join(lost)}"
        )
        assert not any("0badf00d" in text or "mine" in text for text in document["unknown"])
        watching = Watching()
        initialise(runs.fleet, watching)
        assert of_publications in watching.notes
        assert any(f"pg_drop_replication_slot('{slot}')" in text for text in watching.notes)
        for node in primaries:
            execute(node.dsn, of_publications.partition("run there: ")[2])
        execute(primaries[0].dsn, of_slot.partition("run there: ")[2])
        _, document = run_here(runs.fleet, "status", "--nodes")
        assert not any("0badcafe" in text for text in document["unknown"])
    finally:
        execute(primaries[1].dsn, "DROP PUBLICATION cutline_0badf00d, cutline_mine")
        for node in primaries:
            execute(node.dsn, f"DROP PUBLICATION IF EXISTS {', '.join(lost)}")
        if slot in slots_of(primaries[0].dsn):
            execute(primaries[0].dsn, f"SELECT pg_drop_replication_slot('{slot}')")


def drop_other_publications(fleet: Fleet, node: Node) -> None:
    """Drop what stores of other tests have left in the database."""
    own = publication_names(read_identity(fleet.store.open(), fleet).fleet_id)
    with psycopg.connect(node.dsn) as connection:
        names = [name for name in read_own_names(connection) if name not in own]
    if names:
        execute(node.dsn, f"DROP PUBLICATION {', '.join(names)}")


def test_the_newest_cut_says_when_nodes_last_committed(runs: Runs) -> None:
    runs.increment("daily")
    cut = read_chain(runs.fleet.store.open(), "daily").last.cut
    gathered = read(MetricsGatherer().gather(runs.fleet).samples)
    assert isinstance(cut.safe_at, str)
    assert of(metrics.SAFE_TIME, gathered) == {"": pytest.approx(datetime.fromisoformat(cut.safe_at).timestamp())}
    assert of(metrics.NODE_LAST_COMMIT, gathered) == {
        one.node: pytest.approx(datetime.fromisoformat(one.last_commit_at).timestamp())
        for one in cut.nodes
        if isinstance(one.last_commit_at, str)
    }
    assert of(metrics.SUCCESS_RETRIES, gathered) == {"full": 0, "increment": 0}
    assert of(metrics.CLOCK_SKEW, gathered) == {"": cut.skew_seconds}


def away(fleet: Fleet, node: str) -> Fleet:
    """The fleet with a node where nobody listens."""
    (port,) = free_ports(1)
    nodes = [replace(one, dsn=f"host={HOST} port={port} dbname=x") if one.id == node else one for one in fleet.nodes]
    return replace(fleet, nodes=tuple(nodes))


def test_of_a_node_that_is_away_nothing_else_is_told(runs: Runs) -> None:
    gathered = MetricsGatherer().gather(away(runs.fleet, "s1"))
    found = read(gathered.samples)
    assert of(metrics.NODE_UP, found) == {
        "s1/primary": 0, "s2/primary": 1, "s1-b1/standby": 1, "s2-b1/standby": 1,
    }  # fmt: skip
    assert set(of(metrics.NODE_IN_RECOVERY, found)) == {"s2", "s1-b1", "s2-b1"}
    assert set(of(metrics.ARCHIVE_LAG, found)) == {"s2", "s1-b1", "s2-b1"}
    # Without its primary nobody knows how far a standby is behind.
    assert set(of(metrics.REPLAY_LAG, found)) == {"s2-b1"}
    assert of(metrics.STORE_UP, found) == {"": 1}
    (problem,) = gathered.problems
    assert problem.startswith("node s1: ")


def test_a_node_that_never_answers_is_waited_for_only_so_long(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKING_SECONDS_MAX", 5.0)
    with psycopg.connect(runs.fleet.node("s2").dsn) as connection:
        (server,) = connection.execute("SELECT current_setting('data_directory')").fetchone() or ("",)
    process = int(Path(server, "postmaster.pid").read_text().splitlines()[0])
    subprocess.run(["kill", "-STOP", str(process)], check=True)
    try:
        began = time.monotonic()
        found = read(MetricsGatherer().gather(runs.fleet).samples)
        assert time.monotonic() - began < 30
    finally:
        subprocess.run(["kill", "-CONT", str(process)], check=True)
    assert of(metrics.NODE_UP, found)["s2/primary"] == 0
    assert of(metrics.NODE_UP, found)["s1/primary"] == 1


def metrics_of(file: Path) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found = values_of(file.read_bytes())
    file.unlink()
    return found


def test_commands_leave_metrics_behind_however_they_end(
    runs: Runs, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cutline.prom"
    option = ("--metrics", str(file))
    assert run_here(runs.fleet, "create", "daily", "--incremental", *option, spark=spark)[0] == 0
    found = metrics_of(file)
    last = read_chain(runs.fleet.store.open(), "daily").last
    assert of(metrics.COMMAND_CODE, found) == {"create": 0}
    assert of(metrics.SUCCESS_BYTES, found)["increment"] == last.counts["bytes"]
    assert of(metrics.SUCCESS_SECONDS, found)["increment"] == pytest.approx(last.seconds)
    assert of(metrics.CUT_SECONDS, found) == {"": pytest.approx(last.cut.seconds)}
    # A refusal.
    assert run_here(runs.fleet, "create", "daily", *option)[0] == 3
    found = metrics_of(file)
    assert of(metrics.COMMAND_CODE, found) == {"create": 3}
    assert of(metrics.LAST_CODE, found)["increment"] == 0
    assert run_here(runs.fleet, "check", "daily", "--metadata-only", *option)[0] == 4
    found = metrics_of(file)
    assert (of(metrics.COMMAND_CODE, found), of(metrics.LAST_CODE, found)["check"]) == ({"check": 4}, 4)
    assert "check" not in of(metrics.SUCCESS, found)
    assert run_here(runs.fleet, "gc", "--yes", *option)[0] == 0
    assert set(of(metrics.SUCCESS, metrics_of(file))) == {"full", "increment", "gc"}
    for words in (
        ("gc", "--dry-run"),
        ("prune", "--keep-last", "3", "--dry-run"),
        ("create", "daily", "--incremental", "--dry-run"),
    ):
        assert run_here(runs.fleet, *words, *option)[0] == 0
        assert not file.exists()
    assert run_here(runs.fleet, "prune", "--keep-last", "3", "--yes", *option)[0] == 0
    assert of(metrics.COMMAND_CODE, metrics_of(file)) == {"prune": 0}


def test_the_file_of_the_fleet_is_written_and_an_option_names_another(runs: Runs, tmp_path: Path) -> None:
    own, other = tmp_path / "own.prom", tmp_path / "other.prom"
    path = tmp_path / "fleet.toml"
    path.write_text(f'{runs.fleet.path.read_text()}\n[metrics]\nfile = "{own}"\n')
    fleet = replace(runs.fleet, path=path)
    assert run_here(fleet, "gc", "--yes")[0] == 0
    assert of(metrics.COMMAND_CODE, metrics_of(own)) == {"gc": 0}
    assert run_here(fleet, "gc", "--yes", "--metrics", str(other))[0] == 0
    assert other.exists()
    assert not own.exists()


def test_a_file_that_cannot_be_written_fails_no_command(runs: Runs, tmp_path: Path) -> None:
    import io

    err = io.StringIO()
    code, out = run_with_stderr(err, runs.fleet, "gc", "--yes", "--metrics", str(tmp_path / "missing" / "cutline.prom"))
    assert code == 0
    assert out
    assert (
        f"warning: the metrics could not be written to {tmp_path}/missing/cutline.prom: No such file" in err.getvalue()
    )


def test_an_interrupted_command_leaves_metrics_behind(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "cutline.prom"
    with psycopg.connect(runs.fleet.node("s1").dsn) as older:
        older.execute("SELECT pg_current_xact_id()")
        words = ("create", "stopped", "--wait", str(SECONDS_MAX), "--metrics", str(file))
        with subprocess.Popen(
            command_line(runs.fleet, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            until(lambda: any(len(slots_of(node.dsn)) > 1 for node in runs.fleet.nodes))
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 8, errors
    found = metrics_of(file)
    assert of(metrics.COMMAND_CODE, found) == {"create": 8}
    assert of(metrics.LAST_CODE, found)["full"] == 8
    assert of(metrics.ENDED, found)["8/full"] == 1
