"""Commands that are killed in the middle, without a chance to clean up: the next command settles what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

from fleet.config import Fleet
from fleet.connections import with_database
from fleet.embedded import EmbeddedFleet
from snapshots.manifest import Commit
from storage.errors import BusyError, SnapshotError
from tests.snapshot_runs import (
    Ready,
    Runs,
    chains_dropped,
    command_line,
    described,
    names_of_snapshots,
    slots_of,
    sorted_copies,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_SECONDS_MAX = 60


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextmanager
def killed_when(fleet: Fleet, condition: Callable[[], bool], *words: str) -> Iterator[None]:
    """Run `snapshot …` and kill it, with all it started, as soon as the condition holds."""
    with subprocess.Popen(
        command_line(fleet, *words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not condition():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
    yield


def pending_operations(fleet: Fleet) -> list[dict[str, Any]]:
    folder = Path(fleet.store_url.removeprefix("file://")) / "operations"
    return [
        json.loads((one / "intent.json").read_bytes())
        for one in sorted(folder.iterdir())
        if (one / "intent.json").exists() and not (one / "outcome.json").exists()
    ]


def outcome_of(fleet: Fleet, operation: str) -> str:
    folder = Path(fleet.store_url.removeprefix("file://")) / "operations" / operation
    return str(json.loads((folder / "outcome.json").read_bytes())["state"])


def stored(fleet: Fleet, pattern: str) -> bool:
    return any(Path(fleet.store_url.removeprefix("file://")).glob(pattern))


def test_a_killed_full_snapshot_is_settled_by_the_next_command(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = described(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    runs.init()
    with chains_dropped(fleet):
        # Slots are made and rows are copied; nothing is committed.
        with killed_when(fleet, lambda: stored(fleet, "snapshots/killed/base/*/*/*.parquet"), "create", "killed"):
            (died,) = pending_operations(fleet)
        assert names_of_snapshots(fleet) == []
        assert any(died["slot"] in slots_of(node.dsn) for node in fleet.nodes)
        once_free(lambda: runs.full("next"))
        assert outcome_of(fleet, died["operation"]) == "failed"
        for node in fleet.nodes:
            assert len(slots_of(node.dsn)) == 1
            assert died["slot"] not in slots_of(node.dsn)
        assert names_of_snapshots(fleet) == ["next"]
        runs.full("killed")
        assert runs.check().exit_code == 0


def test_a_killed_increment_goes_on_where_it_was(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = described(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(fleet, Ready(spark))
    runs.init()
    with chains_dropped(fleet):
        runs.full("chain")
        slots = slots_of(fleet.nodes[0].dsn)
        for sign in "+-":
            execute(shared_fleet.dsns()[0], f"UPDATE account SET balance = balance {sign} 1")
        archived = "snapshots/chain/wal/*/*/*2.parquet"
        with killed_when(fleet, lambda: stored(fleet, archived), "create", "chain", "--incremental"):
            (died,) = pending_operations(fleet)
        commit = once_free(lambda: runs.increment("chain"))
        assert commit.increment == 1
        assert outcome_of(fleet, died["operation"]) == "failed"
        assert slots_of(fleet.nodes[0].dsn) == slots
        assert commit.counts["changes"] >= 20_000
        assert runs.check("chain").exit_code == 0
        nodes = tuple(with_database(node, "settled") for node in fleet.primaries)
        target = replace(fleet, nodes=nodes)
        try:
            runs.restore("chain", target)
            for source, copy in zip(fleet.primaries, target.primaries, strict=True):
                assert sorted_copies(copy.dsn) == sorted_copies(source.dsn)
        finally:
            for node in nodes:
                execute(with_database(node, "postgres").dsn, "DROP DATABASE IF EXISTS settled WITH (FORCE)")


def once_free(work: Callable[[], Commit]) -> Commit:
    """Do it as soon as what a killed process left running has ended: until then it is refused as busy."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        try:
            return work()
        except SnapshotError as error:
            if error.exit_code != BusyError.exit_code or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
