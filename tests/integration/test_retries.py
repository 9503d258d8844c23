"""Disturbed cuts are retried with every cause kept, or given up with the right exit code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import cutline.snapshots.create.make_cut as cut_markers
import cutline.snapshots.create.make_cut as cutting
from cutline.cli.output.commit_document import document_of
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.embedded.server import stop_server
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import increment_numbers, read_commit
from cutline.storage.errors import SnapshotError
from cutline.wal.cut.markers import Marker, WrittenMarker
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import COMMAND_SECONDS_MAX, Ready, Runs, configure_fleet
from tests.run.by_spark import archiving_by_spark
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "retried"
# `snapshot` that writes no start markers, and takes the end of WAL for their positions.
WITHOUT_START_MARKERS = """
import cutline.snapshots.create.make_cut as cut_markers
from datetime import UTC, datetime
from cutline.fleet.lsn import Lsn
from cutline.wal.cut.markers import WrittenMarker
written = cut_markers.write_markers
def write_markers(connections, marker):
    if marker.kind == "finish":
        return written(connections, marker)
    query = "SELECT pg_current_wal_lsn()::text"
    now = datetime.now(UTC)
    return {
        node: WrittenMarker(Lsn.parse(found.execute(query).fetchone()[0]), now, now, now)
        for node, found in connections.items()
    }
cut_markers.write_markers = write_markers
from cutline.cli.main import main
main()
"""


class Notes(Silent):
    """Keeps the notes that a user would see."""

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
    """A full snapshot of these servers."""
    folder = servers.directory.parent
    runs = Runs(configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store"), Ready(spark))
    runs.init()
    runs.full(NAME)
    return runs


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PAUSE_SECONDS_FIRST", 0.05)


def increment(runs: Runs, retries: int, notes: Notes | None = None) -> Commit:
    return create_increment(runs.fleet, CreateRequest(NAME, retries=retries), runs.spark, notes or Notes())


def committed_increments(runs: Runs) -> list[int]:
    return increment_numbers(runs.fleet.store.open(), NAME)


def disturb_after_start(monkeypatch: pytest.MonkeyPatch, disturb: Callable[[], None]) -> list[str]:
    """Call `disturb` after every start marker, before the finish; return the cuts whose start marker was written."""
    original = cut_markers.write_markers
    started: list[str] = []

    def write(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, WrittenMarker]:
        positions = original(connections, marker)
        if marker.kind == "start":
            started.append(marker.cut)
            disturb()
        return positions

    monkeypatch.setattr(cut_markers, "write_markers", write)
    return started


def update_rows(servers: EmbeddedFleet) -> None:
    for dsn in servers.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute("UPDATE account SET balance = balance WHERE id % 100 = 0")


def test_a_primary_killed_between_its_markers_costs_one_attempt(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_rows(servers)
    victim = servers.node("s2")

    def restart() -> None:
        if len(started) == 1:
            stop_server(victim, immediate=True)
            servers.start_node(victim)

    started = disturb_after_start(monkeypatch, restart)
    notes = Notes()
    commit = increment(chain, retries=1, notes=notes)
    assert (commit.cut.attempts, len(commit.cut.causes), len(started)) == (2, 1, 2)
    assert re.match("node s2: its session was lost while markers were being written", commit.cut.causes[0])
    assert any("attempt 1 of 2" in text and "node s2" in text for text in notes.texts)

    stored = read_commit(chain.fleet.store.open(), NAME, commit.increment)
    assert stored.cut.causes == commit.cut.causes
    output = document_of(commit)["cut"]
    assert (output["attempts"], output["causes"]) == (2, list(commit.cut.causes))
    _, document = run_here(chain.fleet, "show", NAME)
    assert document["cuts"][-1]["causes"] == list(commit.cut.causes)


def test_a_primary_that_stays_down_is_named_and_nothing_is_committed(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = committed_increments(chain)
    victim = servers.node("s2")
    started = disturb_after_start(monkeypatch, lambda: stop_server(victim, immediate=True))
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
    assert committed_increments(chain) == before


def test_a_primary_stopped_while_its_slot_is_read_costs_one_attempt(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_rows(servers)
    victim = servers.node("s1")
    run_tasks = cutting.run_tasks
    runs: list[int] = []

    def run_disturbed(*arguments: Any, **more: Any) -> Any:
        runs.append(len(runs))
        if len(runs) > 1:
            return run_tasks(*arguments, **more)
        stop_server(victim, immediate=True)
        try:
            return run_tasks(*arguments, **more)
        finally:
            servers.start_node(victim)

    monkeypatch.setattr(cutting, "run_tasks", run_disturbed)
    with archiving_by_spark():
        commit = increment(chain, retries=1)
    assert commit.cut.attempts == 2
    assert "node s1" in commit.cut.causes[0]
    assert "node s2" not in commit.cut.causes[0]
    assert commit.counts["changes"] >= 2
    assert chain.check(NAME).snapshots[0].conflicts == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_create_whose_markers_are_never_decoded_fails_after_all_attempts(
    chain: Runs, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    before = committed_increments(chain)
    original = cut_markers.write_markers
    attempts: list[str] = []

    def without_finish(connections: dict[str, psycopg.Connection[Any]], marker: Marker) -> dict[str, WrittenMarker]:
        if marker.kind == "start":
            attempts.append(marker.cut)
            return original(connections, marker)
        return original(connections, Marker(marker.chain, "another cut", marker.kind))

    monkeypatch.setattr(cut_markers, "write_markers", without_finish)
    notes = Notes()
    with pytest.raises(cutting.CutInconsistentError) as raised:
        increment(chain, retries=retries, notes=notes)
    assert len(attempts) == len(set(attempts)) == retries + 1
    assert raised.value.exit_code == 9
    causes = raised.value.details["attempts"]
    assert isinstance(causes, list)
    assert len(causes) == retries + 1
    assert all("its decoded WAL lacks the finish marker" in cause for cause in causes)
    assert len([text for text in notes.texts if text.startswith("cut attempt ")]) == retries + 1
    assert committed_increments(chain) == before


def test_an_inconsistent_cut_exits_with_code_9_and_lists_every_attempt(chain: Runs) -> None:
    before = committed_increments(chain)
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
    assert committed_increments(chain) == before

    # The segments that the attempts archived do not disturb the next increment.
    commit = increment(chain, retries=0)
    assert (commit.increment, commit.cut.attempts, commit.cut.causes) == (len(before) + 1, 1, ())


def test_a_primary_that_comes_back_on_another_timeline_is_not_retried(
    servers: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this module: the standby does not follow the new timeline."""
    before, victim = committed_increments(chain), servers.node("s1")

    def restart_on_new_timeline() -> None:
        stop_server(victim)
        (victim.data_directory / "standby.signal").touch()
        servers.start_node(victim)
        with psycopg.connect(victim.dsn(), autocommit=True) as connection:
            assert connection.execute("SELECT pg_promote()").fetchone() == (True,)

    started = disturb_after_start(monkeypatch, restart_on_new_timeline)
    with pytest.raises(SnapshotError) as raised:
        increment(chain, retries=3)
    assert (raised.value.slug, raised.value.exit_code) == ("server-promoted", 6)
    assert "timeline was 1" in raised.value.message
    assert len(started) == 1
    assert committed_increments(chain) == before
    monkeypatch.undo()
    # The server was shut down, so it has all WAL of the chain.
    assert increment(chain, retries=3).timelines == {"s1": 2}
