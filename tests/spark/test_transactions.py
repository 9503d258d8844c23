"""Parts of transactions are compared in Spark jobs as in the command itself; tests/unit has the cases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cutline.check.cuts import StoredEvents
from cutline.check.report import Findings, SnapshotReport
from cutline.check.transaction_parts import PartRules, reduce_parts
from cutline.check.transactions import ReadsParts, compare_transactions, reading_here, reading_in_jobs
from cutline.fleet.progress import Silent
from cutline.snapshots.records.chain import Chain
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready
from tests.stores.damage import flip_byte
from tests.unit.made_shards import MadeShards, Row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def compare(chain: Chain, location: StoreLocation, read: ReadsParts, damaged: Path | None = None) -> SnapshotReport:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    rules, store = PartRules.of(chain, {}), location.open()
    stored = StoredEvents(store)
    reports = [
        reduce_parts(stored.read(segment), node, rules) for node in chain.baseline for segment in chain.segments(node)
    ]
    if damaged:
        flip_byte(damaged)
    compare_transactions(chain, rules, reports, read, findings)
    return findings.report


def test_a_job_finds_what_the_command_finds(spark: SparkSession, tmp_path: Path) -> None:
    """One part of each transaction names its participants, so all are compared one by one."""
    location = StoreLocation(f"file://{tmp_path}")
    gids = [f"g{number}" for number in range(12)]
    events = {
        node: [
            event
            for number, gid in enumerate(gids)
            for event in transaction(gid, 100 + 200 * number, participants="" if node == "s1" else "s1,s2")
        ]
        for node in ("s1", "s2", "s2-b")
    }

    def is_lost(node: str, one: Row) -> bool:
        return (node, one["global_id"]) in (("s1", "g3"), ("s1", "g7"), ("s2", "g9"))

    chain = MadeShards(events, {"s2-b": "s2"}, commits=3).chain(location.open(), is_lost, segments=2)
    here = compare(chain, location, reading_here(StoredEvents(location.open())))
    job = reading_in_jobs(Ready(spark), location, Silent())
    found = compare(chain, location, job)
    assert found.to_json() == here.to_json()
    assert [(one.node, one.other_node, one.global_id) for one in found.conflicts] == [
        ("s2", "s2-b", "g9"), ("s1", "s2", "g3"), ("s1", "s2", "g7"),
    ]  # fmt: skip
    # The rest of the report does not depend on an object that is damaged when it is read again.
    damaged = compare(chain, location, job, tmp_path / chain.segments("s1")[0].key)
    assert ("digest", "s1") in [(one.kind, one.node) for one in damaged.conflicts]
