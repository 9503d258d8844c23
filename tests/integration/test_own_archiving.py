"""Little WAL is archived by the command itself: no JVM starts, and an interrupt ends what waits for a node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from tests.commands.snapshot_runs import Runs, run_command, runs_on
from tests.integration.refusing import NoSpark, execute
from tests.run.by_spark import archiving_by_spark
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
SEEN_SECONDS_MAX, END_SECONDS_MAX = 60.0, 20.0
STANDBY = "s2-b1"
# What the command has imported when it ends.
IMPORTING = """
import json, sys
from cutline.cli.main import run
code = run(sys.argv[1:])
print(json.dumps([code, sorted({"pandas", "pyspark", "pyarrow"} & set(sys.modules))]))
"""
# A server that decodes for ever.
DECODING = """
import cutline.wal.drain.peek
cutline.wal.drain.peek.peek_query = lambda *_: "SELECT ''::bytea FROM pg_sleep(600)"
cutline.wal.drain.peek.PSYCOPG_WAL_BYTES = {}
from cutline.cli.main import main
main()
"""
COMMAND = "from cutline.cli.main import main; main()"


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a full snapshot `daily`."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("own"), spark) as found:
        found.full("daily")
        yield found


def update_accounts(runs: Runs) -> int:
    """Update accounts on every shard, also in a two-phase transaction of all; return the number of changes."""
    changes = 0
    for node in runs.fleet.primaries:
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            for statements in (
                ("UPDATE account SET balance = balance WHERE id % 100 = 0",),
                (
                    "BEGIN",
                    "UPDATE account SET balance = balance WHERE id % 100 = 1",
                    "PREPARE TRANSACTION 'own'",
                    "COMMIT PREPARED 'own'",
                ),
            ):
                for statement in statements:
                    changed = connection.execute(statement.encode())
                    changes += changed.rowcount if statement.startswith("UPDATE") else 0
    return changes


def test_little_wal_needs_no_spark_and_more_does(runs: Runs) -> None:
    changes = update_accounts(runs)
    commit = create_increment(runs.fleet, CreateRequest("daily"), NoSpark(), Silent())
    assert commit.counts["changes"] == changes > 0
    assert commit.cut.global_transactions == 1
    with archiving_by_spark(), pytest.raises(AssertionError, match="starts no Spark"):
        create_increment(runs.fleet, CreateRequest("daily"), NoSpark(), Silent())


def test_both_ways_archive_the_same(runs: Runs) -> None:
    rows: list[int] = []
    for by_spark in (False, True):
        changes = update_accounts(runs)
        with archiving_by_spark(wanted=by_spark):
            commit = runs.increment("daily")
        assert commit.counts["changes"] == changes
        rows.append(commit.counts["transactions"])
    assert rows[0] == rows[1] > 0
    assert runs.check("daily").exit_code == 0


def test_the_command_imports_neither_spark_nor_pandas(runs: Runs) -> None:
    update_accounts(runs)
    words = ["--quiet", "--fleet", str(runs.fleet.path), "create", "daily", "--incremental"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, *words], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, ["pyarrow"]], done.stderr


@contextmanager
def paused_replay(runs: Runs) -> Iterator[None]:
    """A standby that replays no WAL: a cut waits for it if it is required."""
    dsn = runs.fleet.node(STANDBY).dsn
    execute(dsn, "SELECT pg_wal_replay_pause()")
    try:
        yield
    finally:
        execute(dsn, "SELECT pg_wal_replay_resume()")


def requiring_standbys(runs: Runs) -> Path:
    """Return the fleet's file in which creates may leave out no standby."""
    path = runs.fleet.path.with_name("required.toml")
    path.write_text(runs.fleet.path.read_text() + '\n[copies]\nrequire = "all"\n')
    return path


def await_query(observer: psycopg.Connection[Any], pattern: str) -> None:
    """Wait until a session that began after the observer's runs this query: other tests leave sessions behind."""
    query = """
        SELECT 1 FROM pg_stat_activity AS a, pg_stat_activity AS observer
         WHERE observer.pid = pg_backend_pid() AND a.query LIKE %s AND a.backend_start > observer.backend_start
    """
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while not observer.execute(query, (pattern,)).fetchall():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "node", "pattern"),
    first(
        [
            pytest.param(DECODING.format(16 << 20), "s1", "%pg_sleep(600)%", id="decoding"),
            pytest.param(DECODING.format(-(1 << 60)), "s1", "%pg_sleep(600)%", id="decoding read by ADBC"),
            pytest.param(COMMAND, STANDBY, "%pg_last_wal_replay_lsn()::text%", id="replay"),
        ]
    ),
)
def test_an_interrupt_ends_what_waits_for_a_node(runs: Runs, program: str, node: str, pattern: str) -> None:
    update_accounts(runs)
    words = ["--fleet", str(requiring_standbys(runs)), "--json", "create", "daily", "--incremental"]
    with (
        paused_replay(runs) if node == STANDBY else nullcontext(),
        psycopg.connect(runs.fleet.node(node).dsn, autocommit=True) as observer,
        subprocess.Popen(
            [sys.executable, "-c", program, *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process,
    ):
        await_query(observer, pattern)
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=SEEN_SECONDS_MAX)
        assert time.monotonic() - interrupted < END_SECONDS_MAX
    assert (process.returncode, json.loads(output)["error"]) == (130, "interrupted")
    # It kept its lock to the end, and has recorded that it has cleaned up.
    _, document = run_command(runs.fleet, "history", "--last", "1")
    assert [(one["state"], one["code"]) for one in document["operations"]] == [("failed", 130)]
    assert runs.increment("daily").counts["changes"] > 0
