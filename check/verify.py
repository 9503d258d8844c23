"""The `check` command: read one snapshot or all snapshots back, and compare their copies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutline.check.commit_entries import check_entries
from cutline.check.compare import compare_copies, compare_streams
from cutline.check.cuts import StoredEvents, check_cuts, check_markers, check_restore_point
from cutline.check.definitions import StoredDefinitions, check_definitions
from cutline.check.large_objects import check_large_objects
from cutline.check.named_rows import name_rows
from cutline.check.operation_documents import check_intent, check_leases, check_outcomes
from cutline.check.partitions import hash_partitions
from cutline.check.primaries import check_primaries
from cutline.check.report import CheckReport, Compared, Conflict, Copies, Findings, Skipped, SnapshotReport
from cutline.check.sequence_values import check_sequences, fed_groups
from cutline.check.streams import hash_streams
from cutline.check.structure import check_listing, check_structure, names_to_check
from cutline.check.table_forms import enum_labels
from cutline.check.times import check_times
from cutline.check.transactions import compare_pairs
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.clocks import note_late_clock
from cutline.snapshots.fold.limits import CHANGES_MAX, STORED_BYTES_MAX
from cutline.snapshots.fold.sources import SegmentSource, Sources, segment_sources, sources_of
from cutline.snapshots.operations.object_lists import lost_list_error
from cutline.snapshots.operations.open_operations import (
    document_names,
    naming_open_operations,
    read_create_outcomes,
    read_open_operations,
    recorded_commits,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullSnapshot, LostList
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.proven_chains import cut_time
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_deleted, is_only_full
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Check the snapshot `name` up to `increment` (None: the newest), or all snapshots if `name` is None.

    `rows` is the number of different rows that are named for each partition that differs.
    """

    name: str | None = None
    increment: int | None = None
    metadata_only: bool = False
    rows: int = 0


def check_snapshots(fleet: Fleet, request: CheckRequest, spark: SparkSource, progress: Progress) -> CheckReport:
    """Check the snapshots that `request` names; start Spark only if there are contents to read."""
    began = time.monotonic()
    store = fleet.store.open()
    fleet_id = read_identity(store, fleet).fleet_id
    operations = document_names(store)
    open_operations = read_open_operations(store, request.name, operations)
    unread: list[ManifestError] = []
    outcomes = read_create_outcomes(store, unread=unread, operations=operations)
    recorded = recorded_commits(outcomes)
    names = [request.name] if request.name else names_to_check(store, recorded)
    reports: list[SnapshotReport] = []
    fulls: list[FullSnapshot] = []
    for name in names:
        progress.step(f"check {name}")
        try:
            with naming_open_operations(open_operations):
                chain, report = check_structure(store, fleet_id, name, request.increment, recorded.get(name, {}))
        except SnapshotDeletedError:
            if request.name:
                raise
            # The snapshot was deleted after it was listed.
            continue
        report.allows_one_copy = fleet.allows_one_copy
        if chain is not None:
            findings = Findings(report)
            check_outcomes(chain, outcomes, findings)
            check_leases(store, open_operations, name, findings)
            fulls += [chain.full] if chain.full.fleet_id == fleet_id else []
            with _replace_if_deleted(store, chain, report):
                _check_chain(chain, fleet.store, findings, request, spark, progress)
        # An unreadable operation may have worked on any snapshot, so it is added to every report.
        report.conflicts += [
            Conflict("operation", error.message, object=str(error.details["object"])) for error in unread
        ]
        reports.append(report)
    of_fleet = check_primaries(store, fulls)
    for report in reports:
        report.conflicts += of_fleet
    return CheckReport(tuple(reports), time.monotonic() - began, open_operations)


def _check_chain(
    chain: Chain,
    location: StoreLocation,
    findings: Findings,
    request: CheckRequest,
    spark: SparkSource,
    progress: Progress,
) -> None:
    store = location.open()
    # Check records are compared by their end times.
    note_late_clock(cut_time(chain.last), progress)
    check_entries(chain, findings)
    check_times(chain, findings)
    check_intent(store, chain, findings)
    if request.metadata_only:
        check_listing(store, chain, findings.report)
        _note_lost_lists(chain, findings)
        return
    if chain.full.only_cut:
        check_restore_point(chain, store, findings, progress)
        return
    spark.begin(ExecutorNeeds(location), progress)
    _note_lost_lists(chain, findings)
    stored = check_definitions(store, chain, findings)
    check_contents(spark, chain, location, findings, progress, request.rows, stored)


@contextmanager
def _replace_if_deleted(store: ObjectStore, chain: Chain, report: SnapshotReport) -> Iterator[None]:
    """If the snapshot is deleted or pruned while the block reads it, report only the removal, not the damage."""
    problem: SnapshotError | None = None
    try:
        yield
    except SnapshotError as error:
        problem = error
    # If a mark can't be read, it proves nothing.
    with suppress(ManifestError):
        if gone := _find_removal(store, chain):
            report.compared, report.conflicts, report.skipped = Compared(), [], [gone]
            report.doubts.clear()
            return
    if problem:
        raise problem


def _find_removal(store: ObjectStore, chain: Chain) -> Skipped | None:
    if is_deleted(store, chain.name):
        return Skipped(f"snapshot {chain.name}", "it was deleted during the check")
    if chain.increments and is_only_full(store, chain.name):
        return Skipped(f"increments of {chain.name}", "they were pruned during the check")
    return None


def _note_lost_lists(chain: Chain, findings: Findings) -> None:
    """Report missing or altered object lists as damage: the copies of their nodes lack the rows listed there."""
    for object_list in [object_list for commit in chain.commits for object_list in commit.object_lists]:
        if isinstance(object_list, LostList):
            findings.damage(report_of(lost_list_error(object_list)))


def check_contents(
    spark: SparkSource,
    chain: Chain,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    rows: int = 0,
    stored: StoredDefinitions | None = None,
) -> None:
    """Read every object and compare the contents. The chain must have passed `check_structure`.

    `stored` is what the stored DDL tells about rows; without it, less of them is checked.
    """
    stored = stored or StoredDefinitions()
    session, copies = spark.session(), _copies_of(chain, stored)
    held = hold_archive(chain, store)
    sources = None if held else _sources_for_reports(copies, store)
    streams = hash_streams(session, copies, held or store, findings, progress, sources)
    check_markers(chain, streams.markers, findings)
    events = StoredEvents(streams.store.open(), streams.events or {})
    check_cuts(chain, events, findings, progress)
    hashes = hash_partitions(session, copies, store, findings, progress, streams)
    check_large_objects(session, chain.full, store, findings, progress, stored.roles)
    check_sequences(copies, stored.newest, hashes.extremes, findings)
    compare_streams(copies, streams.sums, findings)
    compare_copies(copies, hashes, findings)
    name_rows(session, copies, store, findings, progress, rows, hashes.rows)
    progress.step("compare transactions")
    _compare_transactions(session, copies, store, findings, None if streams.events is None and held is None else events)


def _copies_of(chain: Chain, stored: StoredDefinitions) -> Copies:
    labels = {shard: enum_labels(chain, shard, known) for shard, known in stored.labels.items()}
    fed = {shard: frozenset(fed_groups(chain, shard, described)) for shard, described in stored.newest.items()}
    return Copies.of(chain, labels, fed)


def hold_archive(chain: Chain, store: StoreLocation) -> HeldObjects | None:
    """Return an object holder with which the driver reads each archive once; None if Spark jobs are faster."""
    segments = [segment for node in chain.baseline for segment in chain.segments(node)]
    if (
        sum(segment.size for segment in segments) > STORED_BYTES_MAX
        or sum(segment.changes for segment in segments) > CHANGES_MAX
    ):
        return None
    return HeldObjects(store)


def _sources_for_reports(copies: Copies, store: StoreLocation) -> Sources | None:
    """Return the sources for folding the copies; None if a segment with a TRUNCATE can't be read."""
    try:
        return sources_of(copies.chain, tuple(copies.nodes), store.open())
    except ObjectDamagedError:
        # The job that reads all segments will report the damaged object.
        return None


def _compare_transactions(
    session: SparkSession, copies: Copies, store: StoreLocation, findings: Findings, events: StoredEvents | None
) -> None:
    primaries = tuple(node for node in copies.nodes if copies.shard[node] == node)
    pairs = compare_pairs(session, primaries, _undamaged_segments(copies, primaries, findings), store, events)
    findings.report.compared.transactions += pairs.transactions
    findings.report.conflicts += pairs.conflicts
    # The objects were intact when they were first read, so earlier results hold, and only this comparison is left out.
    for problem in pairs.problems:
        findings.damage(problem)


def _undamaged_segments(copies: Copies, nodes: tuple[str, ...], findings: Findings) -> tuple[SegmentSource, ...]:
    """Return all segments in undamaged copies, including segments that hold only events."""
    return tuple(
        segment_source
        for number, node in enumerate(nodes)
        if node not in findings.damaged
        for segment_source in segment_sources(copies.chain, number, node)
    )
