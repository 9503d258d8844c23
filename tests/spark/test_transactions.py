"""Comparing shards by the transactions that they share: prepared parts, and tagged one-phase commits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import cutline.check.transactions
from cutline.check.cuts import StoredEvents
from cutline.check.transactions import PairReport, compare_pairs
from cutline.columns.bytes_column import from_list
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.sources import SegmentSource, Source
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.segments.damage import HeldObjects
from cutline.wal.segments.segments import SEGMENT_SCHEMA, SegmentRange, create_segment, segment_key
from tests.commands.snapshot_runs import Ready
from tests.run.soak import first
from tests.stores.damage import flip_byte
from tests.wal import pgoutput_messages as pgoutput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NODES = ("s1", "s2", "s3", "s4")


def tagged_commit(lsn: int, gid: str | None) -> list[bytes]:
    tag = [pgoutput.message(lsn - 5, "snapshot.gid", gid.encode(), transactional=True)] if gid else []
    return [pgoutput.begin(lsn, lsn), *tag, pgoutput.commit(lsn, lsn + 9)]


def prepare(lsn: int, gid: str) -> list[bytes]:
    return [pgoutput.begin_prepare(lsn, lsn + 9, lsn, gid), pgoutput.prepare(lsn, lsn + 9, lsn, gid)]


def compare_shards(
    spark: SparkSession,
    folder: Path,
    shards: Sequence[tuple[list[bytes], int, frozenset[Lsn]]],
    damaged: str | None = None,
) -> PairReport:
    """Compare shards, given as WAL messages, position at the cut, and earlier transactions that the cut leaves out.

    The segment below the folder `damaged` is damaged before the comparison.
    """
    url = f"file://{folder}"
    store = open_store(url, {})
    sources = []
    for number, (messages, position, excluded) in enumerate(shards):
        events = Decoder(NODES[number], (), "exact").feed(from_list(messages)).events
        held = SegmentRange(NODES[number], "op", Lsn(0), Lsn(1000), None)
        none = pa.Table.from_batches([], SEGMENT_SCHEMA)
        segment = create_segment(store, str(number), 1, held, (none, events)).segment
        source = Source(segment.key, NODES[number], number, segment.size, segment.digest)
        sources.append(SegmentSource(source, segment, Lsn(position), excluded, {}))
    if damaged:
        flip_byte(folder / segment_key(damaged, 1))
    location = StoreLocation(url)
    found = compare_pairs(Ready(spark), NODES, tuple(sources), location)
    in_memory = StoredEvents(HeldObjects(location).open())
    held = compare_pairs(Ready(spark), NODES, tuple(sources), location, in_memory)
    # Of held objects, each has been verified before.
    assert damaged or held == found
    return found


@pytest.mark.parametrize(
    ("position", "excluded", "torn"),
    first([(200, frozenset({Lsn(100)}), ["g"]), (50, frozenset[Lsn](), ["g"]), (200, frozenset[Lsn](), [])], 2),
)
def test_a_tagged_commit_is_the_transactions_part_on_its_shard(
    spark: SparkSession, tmp_path: Path, position: int, excluded: frozenset[Lsn], torn: list[str]
) -> None:
    coordinator = [*tagged_commit(100, "g"), *tagged_commit(120, None), *tagged_commit(140, "alone")]
    other = [*prepare(100, "g"), *tagged_commit(120, None)]
    report = compare_shards(spark, tmp_path, [(coordinator, 200, frozenset()), (other, position, excluded)])
    assert report.transactions == 1
    assert [conflict.global_id for conflict in report.conflicts] == torn
    for conflict in report.conflicts:
        assert (conflict.node, conflict.other_node) == NODES[:2]
        assert conflict.detail == "it is included in the state on s1, but not in the state on s2"


def test_prepared_parts_are_compared(spark: SparkSession, tmp_path: Path) -> None:
    left = [*prepare(100, "both"), *prepare(120, "left out of one"), *prepare(140, "of one")]
    right = [*prepare(90, "both"), *prepare(110, "left out of one")]
    report = compare_shards(spark, tmp_path, [(left, 200, frozenset({Lsn(120)})), (right, 200, frozenset())])
    assert report.transactions == 2
    assert [conflict.global_id for conflict in report.conflicts] == ["left out of one"]
    assert report.conflicts[0].detail == "it is included in the state on s2, but not in the state on s1"


def test_of_many_shards_every_pair_is_compared(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transaction n has parts on the nodes of the bits of n; one in three is left out of the last of these."""
    monkeypatch.setattr(cutline.check.transactions, "PAIRS_AT_ONCE", 8)
    monkeypatch.setattr(cutline.check.transactions, "NAMED_MAX", 1)
    on = {number: [node for node in range(4) if number >> node & 1] for number in range(1, 16)}
    lsn = {number: 100 + 20 * number for number in on}
    torn = {number: nodes[-1] for number, nodes in on.items() if number % 3 == 0}
    shards = [
        (
            [
                message
                for number, nodes in on.items()
                if node in nodes
                for message in prepare(lsn[number], f"{number:02}")
            ],
            1000,
            frozenset(Lsn(lsn[number]) for number, last in torn.items() if last == node),
        )
        for node in range(4)
    ]
    report = compare_shards(spark, tmp_path, shards)
    assert report.transactions == sum(len(nodes) * (len(nodes) - 1) // 2 for nodes in on.values())
    expected = sorted(
        (NODES[node], NODES[last], f"{number:02}")
        for number, last in torn.items()
        for node in on[number]
        if node != last
    )
    by_pair = [[one for one in expected if one[:2] == pair][:1] for pair in sorted({one[:2] for one in expected})]
    found = [(one.node, one.other_node, one.global_id) for one in report.conflicts]
    assert found == [one for named in by_pair for one in named]
    assert len(found) < len(expected)


def test_a_damaged_object_is_a_problem_and_no_conflict(spark: SparkSession, tmp_path: Path) -> None:
    whole = [(prepare(100, "g"), 200, frozenset[Lsn]()), (prepare(90, "g"), 200, frozenset[Lsn]())]
    report = compare_shards(spark, tmp_path, whole, damaged="1")
    assert [one["details"]["node"] for one in report.problems] == ["s2"]
    assert (report.transactions, report.conflicts) == (0, [])
