"""Wherever a command waits, a cancel ends it within seconds: on a server, on the store, on a process of PostgreSQL.

What waits here would wait for minutes, or for ever. `make test` has some of the places; with `make all` all are
tried. Restores are in restoring/test_cancelled_restores.py, a wait for a slot in test_cancel.py.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, runs_on, slots_of
from tests.faults.awaited import await_none
from tests.faults.cancelled_command import cancel_when
from tests.integration.refusing import execute
from tests.run.soak import first
from tests.s3.proxy import Fault, S3Proxy, s3_proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.s3.server import S3Server

# Much longer than it takes: the machine may be busy.
CANCEL_SECONDS_MAX = 20.0
LARGE = """
CREATE TABLE large (id int PRIMARY KEY, body text);
INSERT INTO large SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, 300000) AS i
"""
LEFT_QUERY = """
SELECT format('%s %s', pid, left(query, 60)) FROM pg_stat_activity
 WHERE application_name LIKE 'cutline%'
"""


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store, and on its first shard a table that takes a moment to copy."""
    folder = tmp_path_factory.mktemp("cancel-places")
    with runs_on(shared_fleet, folder, spark) as found:
        execute(primary(found.fleet), LARGE)
        try:
            yield found
        finally:
            # A session that was open meanwhile may be gone: a command that is stopped ends those of its process.
            execute(primary(found.fleet), "DROP TABLE large")


def primary(fleet: Fleet) -> str:
    return fleet.primaries[0].dsn


def backend_of(fleet: Fleet, condition: str) -> int | None:
    """The process of Cutline's session, or of pg_dump's, of which this holds."""
    with psycopg.connect(primary(fleet)) as connection:
        row = connection.execute(f"SELECT pid FROM pg_stat_activity WHERE {condition}".encode()).fetchone()
        return row[0] if row else None


@contextmanager
def stopped(fleet: Fleet, condition: str) -> Iterator[Callable[[], object]]:
    """Yield a function that stops the first server process of which the condition holds: what it does never ends."""
    pids: list[int] = []

    def stop() -> bool:
        if pid := backend_of(fleet, condition):
            pids.append(pid)
            os.kill(pid, signal.SIGSTOP)
        return bool(pid)

    try:
        yield stop
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


PLACES = {
    "long-copy": "query ~ '^COPY .*large' AND state = 'active'",
    "dump": "application_name LIKE 'cutline pg_dump%'",
}


@pytest.mark.parametrize("place", first(PLACES))
def test_a_create_that_waits_for_a_server_ends_within_seconds(runs: Runs, place: str) -> None:
    with stopped(runs.fleet, PLACES[place]) as is_there:
        run = cancel_when(runs.fleet, is_there, "create", place, spark=runs.spark.running)
    print(f"{place}: {run.seconds:.1f} s")  # noqa: T201  # the figures
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    assert_nothing_left(runs.fleet)


# Objects of base copies are stored by executors, DDL and the commit by the driver.
@pytest.mark.parametrize("key", first(["/base/", "/schema/", "/wal/"]))
def test_a_create_whose_store_does_not_answer_ends_within_seconds(
    shared_fleet: EmbeddedFleet, s3: S3Server, spark: SparkSession, tmp_path: Path, key: str
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(s3_proxy(s3.endpoint_url))
        options = s3.options | {"endpoint_url": proxy.endpoint_url}
        bucket = s3.bucket(f"cancel-{key.strip('/')}")
        fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", bucket, options)
        stack.enter_context(dropping_slots(fleet))
        Runs(fleet, Ready(spark)).init()
        answers = threading.Event()
        stack.callback(answers.set)
        proxy.faults += [Fault(arrives=True, key=key, held=answers)] * 50
        run = cancel_when(fleet, lambda: held(proxy, key), "create", "silent", spark=spark)
        print(f"store, {key}: {run.seconds:.1f} s")  # noqa: T201  # the figures
        assert (run.code, run.results) == (8, ["cancelled"]), run.document
        assert run.seconds < CANCEL_SECONDS_MAX
        assert_nothing_left(fleet)


def held(proxy: S3Proxy, key: str) -> bool:
    return any(key in path for path in proxy.held_paths)


def assert_nothing_left(fleet: Fleet) -> None:
    for node in fleet.nodes:
        assert slots_of(node.dsn) == []

    def left() -> list[str]:
        with psycopg.connect(primary(fleet)) as connection:
            return [row[0] for row in connection.execute(LEFT_QUERY.encode())]

    await_none(left)


def test_a_check_that_waits_for_an_object_ends_within_seconds(runs: Runs) -> None:
    runs.full("whole")
    store = Path(runs.fleet.store.open().url.removeprefix("file://"))
    (first, *_) = sorted(store.glob("snapshots/whole/base/s1/*/*"))
    aside = first.with_name("aside")
    first.rename(aside)
    # Whoever opens it waits for a writer.
    os.mkfifo(first)
    try:
        tracker = runs.spark.running.sparkContext.statusTracker()
        run = cancel_when(runs.fleet, tracker.getActiveStageIds, "check", "whole", spark=runs.spark.running)
    finally:
        first.unlink()
        aside.rename(first)
    print(f"check: {run.seconds:.1f} s")  # noqa: T201  # the figures
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
