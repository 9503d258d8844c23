"""Participants on real servers: named in gids and in messages, in parts of every kind, at restore points too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.restore_point import create_restore_point
from tests.commands.snapshot_runs import Runs, runs_on
from tests.integration.refusing import execute
from tests.integration.test_global_ids import NAME, Pair, pair, tag

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RULE = r"^(?P<global>order-\d+)(@(?P<participants>[^/]+))?/"
NAMES = "SELECT pg_logical_emit_message(true, 'snapshot.participants', '{}')"
MESSAGES, IN_GIDS, READING, SILENT_READING, TAGGED, UNNAMED = range(1, 7)


def take_both(two: Pair, transaction: int, gid: Callable[[int], str], *statements: str) -> None:
    for shard in (1, 2):
        two.run_part(transaction, shard, gid(shard), *statements)
    for shard in (1, 2):
        two.resolve("COMMIT", shard, gid(shard))


def read_only(two: Pair, shard: int, gid: str, *statements: str) -> None:
    execute(two.shards[shard], "BEGIN; SELECT count(*) FROM part", *statements, f"PREPARE TRANSACTION '{gid}'")
    two.resolve("COMMIT", shard, gid)


def stored_events(folder: Path, node: str) -> list[tuple[str, str | None, bytes]]:
    """The kind, global id and key of all events in a node's archive that belong to a global transaction."""
    tables = [
        pq.read_table(path) for path in sorted((folder / "store").glob(f"snapshots/{NAME}/wal/{node}/*/*.parquet"))
    ]
    rows = [row for table in tables for row in table.to_pylist() if chr(row["op"]) in "PCK" and row["global_id"]]
    return [(chr(row["op"]), row["global_id"], row["key"]) for row in rows]


def test_participants_are_archived_and_compared(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with pair(shared_fleet, spark, tmp_path, RULE) as two:
        first, second = (node.id for node in two.target.primaries)
        both = f"{first},{second}"
        take_both(two, 90, lambda shard: f"order-90@{first}+{second}/s{shard}")  # before the snapshot
        two.runs.full(NAME)
        take_both(two, MESSAGES, lambda shard: f"order-{MESSAGES}/s{shard}", NAMES.format(both))
        take_both(two, IN_GIDS, lambda shard: f"order-{IN_GIDS}@{first}+{second}/s{shard}")
        # A part that only reads is in the WAL if it writes the message.
        two.run_part(READING, 1, f"order-{READING}/1", NAMES.format(both))
        read_only(two, 2, f"order-{READING}/2", NAMES.format(both))
        two.resolve("COMMIT", 1, f"order-{READING}/1")
        two.run_part(TAGGED, 2, f"order-{TAGGED}/2", NAMES.format(both))
        two.run_part(TAGGED, 1, None, tag(f"order-{TAGGED}@{first}+{second}/1"))
        two.resolve("COMMIT", 2, f"order-{TAGGED}/2")
        take_both(two, UNNAMED, lambda shard: f"order-{UNNAMED}/s{shard}")
        two.runs.increment(NAME)
        report = two.runs.check_one(NAME)
        assert (report.conflicts, report.unknown_participants, report.foreign_participants) == ([], 1, ())
        assert report.compared.transactions == 5
        keys = {gid: key for op, gid, key in stored_events(tmp_path, first) if op != "K"}
        assert keys == {
            f"order-{MESSAGES}": both.encode(),
            f"order-{IN_GIDS}": f"{first}+{second}".encode(),
            f"order-{READING}": both.encode(),
            f"order-{TAGGED}": f"{first}+{second}".encode(),
            f"order-{UNNAMED}": b"",
        }

        # Without the message, the other shard's WAL has nothing of it: docs/check.md tells not to name that shard.
        two.run_part(SILENT_READING, 1, f"order-{SILENT_READING}@{first}+{second}/1")
        read_only(two, 2, f"order-{SILENT_READING}/2")
        two.resolve("COMMIT", 1, f"order-{SILENT_READING}@{first}+{second}/1")
        two.runs.increment(NAME)
        assert f"order-{SILENT_READING}" not in {gid for _, gid, _ in stored_events(tmp_path, second)}
        (missing,) = two.runs.check_one(NAME).conflicts
        assert (missing.kind, missing.global_id) == ("transaction", f"order-{SILENT_READING}")
        assert (missing.node, missing.other_node) == (second, first)
        assert "A part that only reads leaves no trace in WAL" in missing.detail


def test_names_of_shards_in_gids_are_mapped_by_the_fleet_file(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with pair(shared_fleet, spark, tmp_path, RULE) as two:
        two.runs.full(NAME)
        take_both(two, IN_GIDS, lambda shard: f"order-{IN_GIDS}@east+west/s{shard}")
        two.runs.increment(NAME)
        report = two.runs.check_one(NAME)
        assert (report.result, report.unknown_participants) == ("inconclusive", 1), "there are no standbys"
        assert report.foreign_participants == ("east", "west")
        first, second = (node.id for node in two.target.primaries)
        text = two.runs.fleet.path.read_text()
        for node, name in ((first, "east"), (second, "west")):
            text = text.replace(f"id = '{node}'\n", f"id = '{node}'\nknown_as = ['{name}']\n")
        two.runs.fleet.path.write_text(text)
        report = Runs(load_fleet(two.runs.fleet.path), two.runs.spark).check_one(NAME)
        assert (report.conflicts, report.unknown_participants, report.foreign_participants) == ([], 0, ())


def test_traffic_during_a_restore_point_and_a_full_snapshot_is_no_conflict(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    """Some transfers end on one shard before the slot of another is created, and some are in doubt at the cuts."""
    names = [primary.id for primary in shared_fleet.primaries]
    with (
        runs_on(shared_fleet, tmp_path, spark) as runs,
        BankWorkload(shared_fleet.dsns(), clients=4, cross_shard_ratio=0.9, names=names) as bank,
    ):
        create_restore_point(runs.fleet, CreateRequest("point"), Silent())
        runs.full(NAME)
        for _ in range(2):
            assert bank.wait(0.3)
            runs.increment(NAME)
        reports = [runs.check_one("point"), *(runs.check_one(NAME, number) for number in (0, 1, 2))]
    assert [(report.result, report.conflicts, report.unknown_participants) for report in reports] == [
        ("valid", [], 0)
    ] * 4
    assert reports[-1].compared.transactions > 0
