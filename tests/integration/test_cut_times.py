"""What commits say of time: when each node last committed, by PostgreSQL's own clock, and the fleet's safe time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.record import Time
from cutline.snapshots.create.make_cut import LastCut
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "timed"
# Commits have times in milliseconds.
ROUNDED = timedelta(milliseconds=1)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    directory = tmp_path_factory.mktemp("times") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=1)
    finally:
        stop_fleet(directory, delete=True)


def clock(session: psycopg.Connection[tuple[datetime]]) -> datetime:
    (now,) = session.execute("SELECT clock_timestamp()").fetchone() or (datetime.min,)
    return now


def moment(text: object) -> datetime:
    assert isinstance(text, str)
    return datetime.fromisoformat(text)


def test_each_node_has_its_own_last_commit_and_an_idle_one_its_marker(
    servers: EmbeddedFleet, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = servers.directory.parent
    runs = Runs(configure_fleet(servers, folder / "fleet.toml", f"file://{folder}/store"), Ready(spark))
    busy, idle = servers.primaries
    with (
        psycopg.connect(busy.dsn(), autocommit=True) as on_busy,
        psycopg.connect(idle.dsn(), autocommit=True) as on_idle,
    ):
        on_idle.execute("CREATE TABLE seen (id int PRIMARY KEY)")
        on_busy.execute("CREATE TABLE seen (id int PRIMARY KEY)")
        runs.init()
        runs.full(NAME)
        on_idle.execute("INSERT INTO seen VALUES (1)")
        idle_at = clock(on_idle)
        first = runs.increment(NAME)
        before = clock(on_busy)
        on_busy.execute("INSERT INTO seen VALUES (1)")
        on_busy.execute("BEGIN")
        on_busy.execute("INSERT INTO seen VALUES (2)")
        on_busy.execute("PREPARE TRANSACTION 'a'")
        on_busy.execute("COMMIT PREPARED 'a'")
        after = clock(on_busy)
        second = runs.increment(NAME)
        third = runs.increment(NAME)
        ended = clock(on_busy)

    assert moment(first.cut.of(idle.id).last_commit_at) <= idle_at
    assert before - ROUNDED <= moment(second.cut.of(busy.id).last_commit_at) <= after
    # The idle node keeps its last commit, and counts with its marker.
    assert second.cut.of(idle.id).last_commit_at == first.cut.of(idle.id).last_commit_at
    for commit, earliest in ((second, after), (third, moment(second.cut.made_at))):
        assert earliest - ROUNDED <= moment(commit.cut.safe_at) <= ended
        marked = [moment(node.marked_at) for node in commit.cut.nodes]
        assert moment(commit.cut.safe_at) == min(marked)
        assert moment(commit.cut.safe_at) <= moment(commit.cut.made_at)
    # The times that commits have are those of the archived events.
    assert runs.check_one(NAME).result == "valid"
    # Servers of one machine have one clock. What is not known of a node's is its answer's time, which is a part of the
    # cut's, before and after; the skew is rounded to milliseconds.
    assert isinstance(third.cut.skew_seconds, float)
    assert third.cut.skew_seconds <= 2 * third.cut.seconds + 0.001
    # As if every node's clock had been an hour ahead at the cut before, and set back since.
    ahead = Time.of((ended + timedelta(hours=1)).astimezone(UTC))
    monkeypatch.setattr(
        "cutline.snapshots.create.context.LastCut", lambda *before: LastCut(*before[:3], last_commit_at=ahead)
    )
    fourth = runs.increment(NAME)
    assert [node.last_commit_at for node in fourth.cut.nodes] == [node.marked_at for node in fourth.cut.nodes]
    assert moment(fourth.cut.safe_at) <= moment(fourth.cut.made_at)
