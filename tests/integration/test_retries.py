"""Cuts that are disturbed: made again with every cause kept, and given up with the right code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import snapshots.create.make_cut as cutting
from cli.commands.create import document_of
from embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from fleet.lsn import Lsn
from fleet.progress import Silent
from snapshots.create.increment import create_increment
from snapshots.create.request import CreateRequest
from snapshots.records.commit import Commit
from snapshots.records.commits import increment_numbers, read_commit
from storage.errors import SnapshotError
from tests.cli_runs import run_here
from tests.snapshot_runs import COMMAND_SECONDS_MAX, Ready, Runs, described
from wal.cut.markers import Marker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "retried"
# `snapshot` whose start markers are never written: what it takes for their positions is where the WAL ends.
WITHOUT_START_MARKERS = """
import snapshots.create.make_cut as cutting
from fleet.lsn import Lsn
written = cutting.write_markers
def write_markers(connections, marker):
    if marker.kind == "finish":
        return written(connections, marker)
    query = "SELECT pg_current_wal_lsn()::text"
    return {node: Lsn.parse(found.execute(query).fetchone()[0]) for node, found in connections.items()}
cutting.write_markers = write_markers
from cli.main import main
main()
"""


class Notes(Silent):
    """Keeps what a person would have been told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """Two primaries that these tests stop and start."""
    directory = tmp_path_factory.mktemp("retries") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=0)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture(scope="module")
def chain(servers: EmbeddedFleet, spark: SparkSession) -> Runs:
    """A full snapshot of them."""
    folder = servers.directory.parent
    runs = Runs(described(servers, folder / "fleet.toml", f"file://{folder}/store"), Ready(spark))
    runs.init()
    runs.full(NAME)
    return runs


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PAUSE_SECONDS_FIRST", 0.05)


def increment(runs: Runs, retries: int, notes: Notes | None = None) -> Commit:
    return create_increment(runs.fleet, CreateRequest(NAME, retries=retries), runs.spark, notes or Notes())


def committed(runs: Runs) -> list[int]:
    return increment_numbers(runs.fleet.store.open(), NAME)


def after_start(monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None]) -> list[str]:
    """Do `disturb` after every start marker, before the finish; returns the cuts whose start was written."""
    written = cutting.write_markers
    started: list[str] = []

    def write(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, Lsn]:
        positions = written(connections, marker)
        if marker.kind == "start":
            started.append(marker.cut)
            disturb()
        return positions

    monkeypatch.setattr(cutting, "write_markers", write)
    return started


def change(servers: EmbeddedFleet) -> None:
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE account SET balance = balance WHERE id % 100 = 0")


def test_a_primary_killed_between_its_markers_costs_one_attempt(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(servers)
    victim = servers.node("s2")

    def restart() -> None:
        if len(started) == 1:
            servers.stop_node(victim, immediate=True)
            servers.start_node(victim)

    started = after_start(monkeypatch, restart)
    notes = Notes()
    commit = increment(chain, retries=1, notes=notes)
    assert (commit.cut.attempts, len(commit.cut.causes), len(started)) == (2, 1, 2)
    assert re.match("node s2: its session was lost while markers were written", commit.cut.causes[0])
    assert any("attempt 1 of 2" in text and "node s2" in text for text in notes.texts)

    stored = read_commit(chain.fleet.store.open(), NAME, commit.increment)
    assert stored.cut.causes == commit.cut.causes
    told = document_of(commit)["cut"]
    assert (told["attempts"], told["causes"]) == (2, list(commit.cut.causes))
    _, document = run_here(chain.fleet, "show", NAME)
    assert document["cuts"][-1]["causes"] == list(commit.cut.causes)


def test_a_primary_that_stays_down_is_named_and_nothing_is_committed(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = committed(chain)
    victim = servers.node("s2")
    started = after_start(monkeypatch, lambda: servers.stop_node(victim, immediate=True))
    try:
        with pytest.raises(SnapshotError) as raised:
            increment(chain, retries=2)
    finally:
        servers.start_node(victim)
    assert (raised.value.exit_code, raised.value.details["node"]) == (6, "s2")
    assert "node s2" in raised.value.message
    attempts = raised.value.details["attempts"]
    assert isinstance(attempts, list)
    assert len(attempts) == 3
    assert all("s2" in cause for cause in attempts)
    assert len(started) == 1
    assert committed(chain) == before


def test_a_primary_that_goes_while_its_slot_is_read_costs_one_attempt(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(servers)
    victim = servers.node("s1")
    run_tasks = cutting.run_tasks
    runs: list[int] = []

    def disturbed(*arguments: Any) -> Any:
        runs.append(len(runs))
        if len(runs) > 1:
            return run_tasks(*arguments)
        servers.stop_node(victim, immediate=True)
        try:
            return run_tasks(*arguments)
        finally:
            servers.start_node(victim)

    monkeypatch.setattr(cutting, "run_tasks", disturbed)
    commit = increment(chain, retries=1)
    assert commit.cut.attempts == 2
    assert "node s1" in commit.cut.causes[0]
    assert "s2" not in commit.cut.causes[0]
    assert commit.counts["changes"] >= 2
    assert chain.check(NAME).snapshots[0].conflicts == []


@pytest.mark.parametrize("retries", [0, 2])
def test_markers_that_never_come_out_end_it_after_all_attempts(
    chain: Runs, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    before = committed(chain)
    written = cutting.write_markers
    attempts: list[str] = []

    def without_finish(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, Lsn]:
        if marker.kind == "start":
            attempts.append(marker.cut)
            return written(connections, marker)
        return written(connections, Marker(marker.chain, "another cut", marker.kind))

    monkeypatch.setattr(cutting, "write_markers", without_finish)
    notes = Notes()
    with pytest.raises(cutting.CutInconsistentError) as raised:
        increment(chain, retries=retries, notes=notes)
    assert len(attempts) == len(set(attempts)) == retries + 1
    assert raised.value.exit_code == 9
    causes = raised.value.details["attempts"]
    assert isinstance(causes, list)
    assert len(causes) == retries + 1
    assert all("its decoded WAL lacks the finish marker" in cause for cause in causes)
    assert len([text for text in notes.texts if text.startswith("attempt ")]) == retries + 1
    assert committed(chain) == before


def test_a_script_sees_code_9_and_every_attempt(chain: Runs) -> None:
    before = committed(chain)
    words = ["--fleet", str(chain.fleet.path), "create", NAME, "--incremental", "--retries", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_START_MARKERS, *words],
        capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert (done.returncode, document["code"], document["error"]) == (9, 9, "cut-inconsistent"), done.stderr
    assert len(document["details"]["attempts"]) == 2
    for cause in document["details"]["attempts"]:
        assert re.fullmatch(r"node s[12]: its decoded WAL lacks the start marker", cause)
    assert "attempt 1 of 2" in done.stderr
    assert "attempt 2 of 2" in done.stderr
    assert committed(chain) == before

    # What the attempts archived is no trouble to the next increment.
    commit = increment(chain, retries=0)
    assert (commit.increment, commit.cut.attempts, commit.cut.causes) == (len(before) + 1, 1, ())


def test_a_primary_that_comes_back_as_another_ends_it_at_once(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of this module: nothing goes on after it."""
    before, victim = committed(chain), servers.node("s1")

    def on_a_new_timeline() -> None:
        servers.stop_node(victim)
        (victim.data_directory / "standby.signal").touch()
        servers.start_node(victim)
        with psycopg.connect(victim.dsn(), autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    started = after_start(monkeypatch, on_a_new_timeline)
    with pytest.raises(SnapshotError) as raised:
        increment(chain, retries=3)
    assert (raised.value.slug, raised.value.exit_code) == ("baseline-changed", 3)
    assert "timeline was 1" in raised.value.message
    assert len(started) == 1
    assert committed(chain) == before
