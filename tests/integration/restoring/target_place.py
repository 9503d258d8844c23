"""A chain of three shards, a target on the same servers, and what stands there."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.operations.open_operations import read_open_intents
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHARDS, NAME, DATABASE = 3, "daily", "shop"
KILL_SECONDS_MAX = 600
ROOT = Path(__file__).parents[3]
# Large values, updates that leave them out, a table without a key, and a partition key that changes.
TABLES = """
CREATE TABLE item (id int PRIMARY KEY, n int, body text);
ALTER TABLE item ALTER body SET STORAGE EXTERNAL;
INSERT INTO item SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 300) AS i;
CREATE TABLE log (what text);
ALTER TABLE log REPLICA IDENTITY FULL;
INSERT INTO log SELECT 'line ' || i % 20 FROM generate_series(1, 200) AS i;
CREATE INDEX ON item (n);
CREATE VIEW total AS SELECT sum(n) FROM item;
CREATE SEQUENCE numbers;
SELECT setval('numbers', 77)
"""
CHANGES = """
UPDATE item SET n = n + 1 WHERE id % 3 = 0;
UPDATE item SET id = id + 1000 WHERE id % 50 = 0;
DELETE FROM log WHERE what = 'line 3';
INSERT INTO log VALUES ('more'), ('more');
SELECT setval('numbers', 99)
"""
OLD = "CREATE TABLE old (id int PRIMARY KEY); INSERT INTO old VALUES (1)"


@dataclass(frozen=True, slots=True)
class Place:
    """The source, and the target: another database on the same servers."""

    servers: EmbeddedFleet
    fleet: Fleet
    target: Fleet
    spark: SparkSession
    truth: list[dict[str, bytes]]

    def dsns(self) -> list[str]:
        return [node.dsn for node in self.target.primaries]

    def states(self) -> list[str]:
        return [state_of(dsn) for dsn in self.dsns()]

    def rows(self, shard: int) -> int:
        """How many rows the shard has at the cut: COPY writes a line for each."""
        return sum(body.count(b"\n") for body in self.truth[shard].values())

    @property
    def stored(self) -> Path:
        """The folder of the store."""
        return self.fleet.path.with_name("store")

    def databases(self) -> set[str]:
        """The databases of all servers that a restore has made or set aside."""
        return {name for node in self.target.primaries for name in self.databases_of(node)}

    def databases_of(self, node: Node) -> list[str]:
        with psycopg.connect(with_database(node, "postgres").dsn) as connection:
            found = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'shop%'").fetchall()
        return [name for (name,) in found]

    def comments(self) -> list[str]:
        query = "SELECT description FROM pg_shdescription WHERE classoid = 'pg_database'::regclass"
        found: list[str] = []
        for dsn in self.dsns():
            with psycopg.connect(dsn) as connection:
                found += [text for (text,) in connection.execute(query) if "cutline" in text]
        return found


def maintenance_of(place: Place, shard: int) -> str:
    """The dsn of the shard's server, in its maintenance database."""
    return with_database(place.target.primaries[shard], "postgres").dsn


def beside(place: Place, shard: int, middle: str) -> str:
    """The only database of the shard's server with `middle` in its name."""
    (name,) = [one for one in place.databases_of(place.target.primaries[shard]) if middle in one]
    return name


def state_of(dsn: str) -> str:
    """Which database answers: `old`, `new`, or `none`."""
    try:
        with psycopg.connect(dsn, connect_timeout=5) as connection:
            row = connection.execute(
                "SELECT to_regclass('old') IS NOT NULL, to_regclass('total') IS NOT NULL"
            ).fetchone()
    except psycopg.OperationalError as error:
        said = str(error)
        assert any(text in said for text in ("does not exist", "not currently accepting", "terminating", "closed")), (
            said
        )
        return "none"
    assert row in ((True, False), (False, True)), row
    return "old" if row[0] else "new"


def make_place(servers: EmbeddedFleet, fleet: Fleet, spark: SparkSession) -> Place:
    """Take a full snapshot and an increment; the target is another database of the same servers."""
    runs = Runs(fleet, Ready(spark))
    for dsn in servers.dsns():
        execute(dsn, TABLES)
    runs.init()
    runs.full(NAME)
    for dsn in servers.dsns():
        execute(dsn, CHANGES)
    runs.increment(NAME)
    path = fleet.path.with_name("target.toml")
    path.write_text(fleet.path.read_text().replace("/bank", f"/{DATABASE}"))
    return Place(servers, fleet, load_fleet(path), spark, [sorted_copies(node.dsn) for node in fleet.primaries])


@contextmanager
def old_databases(place: Place) -> Iterator[None]:
    """Have an old database on every shard; drop everything at the end."""
    for node in place.target.primaries:
        execute(with_database(node, "postgres").dsn, f"CREATE DATABASE {DATABASE}")
        execute(node.dsn, OLD)
    try:
        yield
    finally:
        drop_databases(place)


@contextmanager
def hidden(place: Place, key: str) -> Iterator[None]:
    """Take an object out of the store while the block runs."""
    file = Path(place.fleet.store.open().url.removeprefix("file://")) / key
    aside = file.with_name("aside")
    file.rename(aside)
    try:
        yield
    finally:
        aside.rename(file)


def drop_databases(place: Place) -> None:
    for node in place.target.primaries:
        with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
            names = connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'shop%'").fetchall()
            for (name,) in names:
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def restore_killed(place: Place, point: RestoreCrashPoint, count: int, how: str = "--replace") -> None:
    """Run `restore --replace` as a process that is killed at the point."""
    words = ["restore", NAME, "--to", str(place.target.path), how, "--yes"]
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGKILL", str(point), str(count), "--"]
    done = subprocess.run(
        [*program, "--fleet", str(place.fleet.path), *words],
        capture_output=True, text=True, timeout=KILL_SECONDS_MAX, cwd=ROOT, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.returncode == -9, (done.returncode, done.stdout, done.stderr)


def await_sessions_over(place: Place) -> None:
    """Wait until the servers have noticed that the killed command is gone."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'cutline%'"
    for node in place.target.primaries:
        deadline = time.monotonic() + KILL_SECONDS_MAX
        with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
            while connection.execute(query).fetchone() != (0,):
                assert time.monotonic() < deadline
                time.sleep(0.1)


def plain_restore(place: Place) -> UnfinishedRestoreError | None:
    """Try a restore without more words; return the error if it names an unfinished one."""
    plan = plan_restore(place.fleet, place.target, RestoreRequest(NAME, replace=True))
    try:
        with pytest.raises(StoppedError):
            restore_fleet(plan, NoSession(), Silent(), stop_here)
    except UnfinishedRestoreError as error:
        return error
    return None


class StoppedError(Exception):
    """All checks have passed."""


class NoSession:
    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        raise AssertionError

    def session(self) -> SparkSession:
        raise AssertionError


def stop_here(_lines: list[str]) -> None:
    raise StoppedError


def assert_restored(place: Place, *, keeps_records: bool = False) -> None:
    assert [sorted_copies(dsn) for dsn in place.dsns()] == place.truth
    for dsn in place.dsns():
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT last_value FROM numbers").fetchone() == (99,)
            assert connection.execute("SELECT count(*) FROM pg_indexes WHERE tablename = 'item'").fetchone() == (2,)
    assert not any("_restoring_" in name for name in place.databases())
    assert keeps_records or place.comments() == []
    assert open_restores(place) == []


def assert_old(place: Place) -> None:
    assert place.states() == ["old"] * SHARDS
    assert place.databases() == {DATABASE}
    assert open_restores(place) == []


def open_restores(place: Place) -> list[str]:
    return [one.operation for one in read_open_intents(place.fleet.store.open()) if one.kind == "restore"]
