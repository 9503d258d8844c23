"""Check a snapshot's contents: read every object back, fold every copy, compare copies and shards.

Damaged objects are named, and everything else is still compared. What can't be compared because of damage is named too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutline.check.archived_markers import check_markers
from cutline.check.compare import compare_copies, compare_streams
from cutline.check.copies import Copies
from cutline.check.cuts import EventReader, check_cuts
from cutline.check.findings import Findings
from cutline.check.large_objects import check_large_objects
from cutline.check.partitions import hash_partitions
from cutline.check.streams import hash_streams
from cutline.check.transactions import compare_pairs
from cutline.fleet.progress import Progress
from cutline.snapshots.fold.find_sources import Sources, segment_sources, sources_of
from cutline.snapshots.fold.limits import CHANGES_MAX, STORED_BYTES_MAX
from cutline.snapshots.fold.sources import SegmentSource
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.tasks.spark_jobs import SparkSource
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.held_objects import HeldObjects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def check_contents(
    spark: SparkSource, chain: Chain, store: StoreLocation, findings: Findings, progress: Progress
) -> None:
    """Read every object and compare the contents. The chain must have passed `check_structure`."""
    session, copies = spark.session(), Copies.of(chain)
    held = hold_archive(chain, store)
    sources = None if held else _sources_for_reports(copies, store)
    streams = hash_streams(session, copies, held or store, findings, progress, sources)
    check_markers(chain, streams.markers, findings)
    check_cuts(chain, streams.read_events, findings, progress)
    hashes = hash_partitions(session, copies, store, findings, progress, streams)
    check_large_objects(session, chain.full, store, findings, progress)
    compare_streams(copies, streams.sums, findings)
    compare_copies(copies, hashes, findings)
    progress.step("compare transactions")
    _compare_transactions(session, copies, store, findings, streams.read_events if streams.has_events else None)


def hold_archive(chain: Chain, store: StoreLocation) -> HeldObjects | None:
    """The objects of the chain's archives, to be read once by the driver, if that is less work than jobs are."""
    segments = [segment for node in chain.baseline for segment in chain.segments(node)]
    if sum(one.size for one in segments) > STORED_BYTES_MAX or sum(one.changes for one in segments) > CHANGES_MAX:
        return None
    return HeldObjects(store)


def _sources_for_reports(copies: Copies, store: StoreLocation) -> Sources | None:
    """What the copies are folded from; None if a segment with a TRUNCATE can't be read."""
    try:
        return sources_of(copies.chain, tuple(copies.nodes), store.open())
    except ObjectDamagedError:
        # Whoever reads all segments will name it.
        return None


def _compare_transactions(
    session: SparkSession, copies: Copies, store: StoreLocation, findings: Findings, events: EventReader | None
) -> None:
    primaries = tuple(node for node in copies.nodes if copies.shard[node] == node)
    pairs = compare_pairs(session, primaries, _undamaged_segments(copies, primaries, findings), store, events)
    findings.report.compared.transactions += pairs.transactions
    findings.report.conflicts += pairs.conflicts
    # These objects were intact when they were first read: earlier results hold, only this comparison is dropped.
    for problem in pairs.problems:
        findings.damage(problem)


def _undamaged_segments(copies: Copies, nodes: tuple[str, ...], findings: Findings) -> tuple[SegmentSource, ...]:
    """All segments of undamaged copies, including those that hold only events."""
    return tuple(
        one
        for number, node in enumerate(nodes)
        if node not in findings.damaged
        for one in segment_sources(copies.chain, number, node)
    )
