"""Merges of real chains: a restore of any increment equals what the primaries were, before and after a merge.

Expected rows come from the live servers (COPY), and expected results of checks from what was done to the chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.check.merged_base import prove_merge
from cutline.embedded.fleet import EmbeddedFleet, stop_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.merge.running import MergeReport, plan_merge, run_merge
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import VALID
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STANDBYS = ("s1-b1", "s2-b1")
TABLES = (
    "DROP TABLE IF EXISTS seen, bag, events, wide, quiet, altered, copied, gone, parted, fresh CASCADE",
    "DROP SEQUENCE IF EXISTS numbers",
    "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
    "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
    "CREATE TABLE bag (a text, n int)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag SELECT 'b' || n % 3, n % 2 FROM generate_series(1, 30) n",
    "INSERT INTO bag VALUES ('commit-later', 5), ('commit-later', 5), ('roll-back-later', 5)",
    "CREATE TABLE events (text text)",
    "INSERT INTO events SELECT 'before' FROM generate_series(1, 5)",
    "CREATE TABLE wide (id int PRIMARY KEY, n int, large text)",
    "ALTER TABLE wide ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO wide SELECT n, 0, repeat(n::text, 9000) FROM generate_series(1, 9) n",
    "INSERT INTO wide VALUES (1046, 0, repeat('later', 900)), (1047, 0, repeat('never', 900))",
    "CREATE TABLE quiet (id int PRIMARY KEY, text text)",
    "INSERT INTO quiet SELECT n, repeat('quiet', 50) FROM generate_series(1, 500) n",
    "CREATE TABLE altered (id int PRIMARY KEY, a text, b text)",
    "INSERT INTO altered SELECT n, 'a' || n, 'b' FROM generate_series(1, 20) n",
    "CREATE TABLE copied (id int PRIMARY KEY, a text)",
    "INSERT INTO copied SELECT n, 'a' || n FROM generate_series(1, 20) n",
    "CREATE TABLE gone (id int PRIMARY KEY)",
    "INSERT INTO gone SELECT generate_series(1, 20)",
    "CREATE TABLE parted (id int PRIMARY KEY, text text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_low PARTITION OF parted FOR VALUES FROM (0) TO (100)",
    "CREATE TABLE parted_high PARTITION OF parted FOR VALUES FROM (100) TO (10000)",
    "INSERT INTO parted SELECT n, 'p' FROM generate_series(90, 110) n",
    "CREATE SEQUENCE numbers",
)
MORE = """
[groups]
append_only = ["public.events"]
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedFleet, EmbeddedFleet]]:
    folder = tmp_path_factory.mktemp("merge")
    try:
        fleet = start_fleet(folder / "fleet", shards=2, backups=1)
        target = start_fleet(folder / "target", shards=2, backups=0, like_shared=True)
        yield fleet, target
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


@pytest.fixture
def place(
    servers: tuple[EmbeddedFleet, EmbeddedFleet], tmp_path: Path, spark: SparkSession
) -> Iterator[ChangingFleet]:
    source, target = servers
    fleet = configure_fleet(source, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=MORE)
    into = configure_fleet(target, tmp_path / "target.toml", f"file://{tmp_path}/other-store")
    found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), tmp_path)
    for node in ("s1", "s2"):
        found.execute(node, *TABLES)
    for standby in STANDBYS:
        found.await_replay(standby)
    with dropping_slots(fleet):
        found.runs.init()
        try:
            yield found
        finally:
            for standby in STANDBYS:
                found.start(standby)


def merge(place: ChangingFleet, increment: int | None = None) -> MergeReport:
    plan = plan_merge(place.fleet, "chain", increment, Silent())
    return run_merge(place.fleet, plan, place.runs.spark, Silent(), prove_merge)


def write(place: ChangingFleet) -> None:
    """Change rows of tables of all kinds, by round."""
    place.write()
    n = place.written
    for node in place.live:
        place.execute(
            node,
            f"INSERT INTO bag VALUES ('b1', 1), ('round', {n})",
            "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = 'b2' LIMIT 1)",
            "UPDATE bag SET n = n + 10 WHERE ctid IN (SELECT ctid FROM bag WHERE a = 'b0' LIMIT 2)",
            f"INSERT INTO events VALUES ('round {n}')",
            f"UPDATE wide SET n = {n} WHERE id < 1000 AND id % 2 = {n % 2}",
            f"UPDATE wide SET id = id + 100 WHERE id = {n}",
            f"INSERT INTO parted VALUES ({n + 50}, 'low'), ({n + 150}, 'high')",
            f"UPDATE parted SET id = id + 200 WHERE id = {n + 90}",
            f"UPDATE altered SET a = 'round {n}' WHERE id % 4 = {n % 4}",
            f"UPDATE copied SET a = 'round {n}' WHERE id % 5 = {n % 5}",
            "SELECT nextval('numbers')",
        )


def prepare(place: ChangingFleet, gid: str, key: int) -> None:
    """Prepare a global transaction that changes tables with and without a key."""
    for node in place.live:
        place.execute(
            node,
            "BEGIN; "
            f"INSERT INTO seen VALUES ({key}, '{gid}'); DELETE FROM seen WHERE id = {key - 9000}; "
            f"INSERT INTO bag VALUES ('{gid}', 1); "
            f"DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = '{gid}' AND n = 5 LIMIT 1); "
            f"UPDATE wide SET n = {key} WHERE id = {key - 8000}; "
            f"PREPARE TRANSACTION '{gid}'",
        )


def decide(place: ChangingFleet, gid: str, verb: str) -> None:
    for node in place.live:
        place.execute(node, f"{verb} PREPARED '{gid}'")


def test_states_before_and_after_a_merge(place: ChangingFleet) -> None:
    place.runs.full("chain")
    place.states[0] = place.live_state()
    write(place)
    place.increment()
    prepare(place, "commit-later", 9046)
    prepare(place, "roll-back-later", 9047)
    for node in place.live:
        place.execute(
            node,
            "ALTER TABLE altered ADD c int DEFAULT 7",
            "ALTER TABLE altered RENAME a TO first",
            "ALTER TABLE altered RENAME first TO a",
            "DROP TABLE gone",
            "ALTER TABLE copied ADD CONSTRAINT named UNIQUE (id, a)",
            "TRUNCATE parted_low",
        )
    write(place)
    place.increment()
    write(place)
    at = place.increment()
    assert {len(cut.undecided) for cut in at.cut.nodes} == {2}

    report = merge(place)
    assert report.is_new
    chain = read_from_merge(place.fleet.store.open(), "chain")
    assert (chain.full.increment, len(chain.increments)) == (3, 0)
    assert place.check().result == VALID
    assert place.check(2).result == VALID
    place.check_restores(2, 3)

    decide(place, "commit-later", "COMMIT")
    write(place)
    place.increment()
    decide(place, "roll-back-later", "ROLLBACK")
    for node in place.live:
        place.execute(
            node,
            "ALTER TABLE altered DROP COLUMN b",
            "CREATE TABLE fresh (id int PRIMARY KEY)",
            "INSERT INTO fresh VALUES (1)",
        )
    write(place)
    place.increment()
    chain = read_from_merge(place.fleet.store.open(), "chain")
    assert (chain.full.increment, len(chain.increments)) == (3, 2)
    place.check_restores(4, 5)
    assert place.check().result == VALID
    place.check_restores(1, 2, 3)

    again = merge(place, 4)
    assert again.is_new
    assert read_from_merge(place.fleet.store.open(), "chain", 3).full.increment == 3
    assert read_from_merge(place.fleet.store.open(), "chain").full.increment == 4
    assert place.check().result == VALID
    place.check_restores(3, 4, 5)
    # A table that was copied on its own, and has not changed since, keeps its object.
    assert merge(place).merge.counts["carried_objects"] == 4
    place.check_restores(5)
    assert place.check().result == VALID
