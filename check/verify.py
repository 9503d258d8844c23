"""The `check` command: read one snapshot or all snapshots back, and compare their copies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cutline.check.compare import compare_copies, compare_streams
from cutline.check.cuts import StoredEvents, check_cuts, check_markers
from cutline.check.large_objects import check_large_objects
from cutline.check.named_rows import name_rows
from cutline.check.partitions import hash_partitions
from cutline.check.report import CheckReport, Compared, Conflict, Copies, Findings, Skipped, SnapshotReport
from cutline.check.restore_points import check_restore_point
from cutline.check.streams import hash_streams
from cutline.check.structure import check_listing, check_structure, names_to_check
from cutline.check.transaction_parts import PartRules
from cutline.check.transactions import compare_transactions, reading_here, reading_in_jobs
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.clocks import note_late_clock
from cutline.snapshots.ddl.described_tables import Described, contradictions, describe
from cutline.snapshots.ddl.dump import read_ddl
from cutline.snapshots.ddl.extension_tables import read_extension_rows_object
from cutline.snapshots.ddl.server_globals_object import read_globals_object
from cutline.snapshots.fold.limits import CHANGES_MAX, STORED_BYTES_MAX
from cutline.snapshots.fold.sources import Sources, sources_of
from cutline.snapshots.operations.object_lists import lost_list_error
from cutline.snapshots.operations.open_operations import (
    document_names,
    naming_open_operations,
    read_open_operations,
    read_recorded_commits,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import EXTENSION_ROWS, GLOBALS, WITHOUT_ROWS, LostList, StoredObject
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.proven_chains import cut_time
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_deleted, is_only_full
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError, read_listed


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
    recorded = read_recorded_commits(store, unread=unread, operations=operations)
    names = [request.name] if request.name else names_to_check(store, recorded)
    known_as = {name: node.id for node in fleet.primaries for name in node.known_as}
    reports: list[SnapshotReport] = []
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
            with _replace_if_deleted(store, chain, report):
                _check_chain(chain, fleet.store, findings, request, spark, progress, known_as)
        # An unreadable operation may have worked on any snapshot, so it is added to every report.
        report.conflicts += [
            Conflict("operation", error.message, object=str(error.details["object"])) for error in unread
        ]
        reports.append(report)
    return CheckReport(tuple(reports), time.monotonic() - began, open_operations)


def _check_chain(
    chain: Chain,
    location: StoreLocation,
    findings: Findings,
    request: CheckRequest,
    spark: SparkSource,
    progress: Progress,
    known_as: Mapping[str, str],
) -> None:
    store = location.open()
    # Check records are compared by their end times.
    note_late_clock(cut_time(chain.last), progress)
    if request.metadata_only:
        check_listing(store, chain, findings.report)
        _note_lost_lists(chain, findings)
        return
    if chain.full.only_cut:
        check_restore_point(chain, store, findings, progress, known_as)
        return
    spark.begin(ExecutorNeeds(location), progress)
    _note_lost_lists(chain, findings)
    check_stored_ddl(store, chain, findings)
    check_contents(spark, chain, location, findings, progress, request.rows, known_as)


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


def check_stored_ddl(store: ObjectStore, chain: Chain, findings: Findings) -> None:
    """Read all stored DDL, globals and extension rows, and count object lists.

    A damaged object is a conflict, and so is DDL that contradicts a commit which would be restored with it.
    """
    newest: dict[str, tuple[StoredObject, Described] | None] = {}
    for commit in chain.commits:
        for stored in [entry for entry in commit.own_objects if entry.kind in WITHOUT_ROWS]:
            try:
                if stored.kind == GLOBALS:
                    read_globals_object(store, stored)
                elif stored.kind == EXTENSION_ROWS:
                    read_extension_rows_object(store, stored)
                else:
                    newest[stored.node] = None
                    body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
                    newest[stored.node] = stored, describe(read_ddl(body, stored))
            except ObjectDamagedError as error:
                # The object contains no table rows, so the copy can still be compared.
                findings.conflict(Conflict(error.kind, error.message, node=stored.node, object=stored.key))
                continue
            findings.count(objects=1, size_bytes=stored.size)
        if commit is chain.last or not commit.increment or commit.definition_changes is not None:
            _compare_ddl(chain.up_to(commit.increment), newest, findings, is_last=commit is chain.last)
    # The bytes of the object lists were verified when the chain was read.
    for object_list in [object_list for commit in chain.commits for object_list in commit.object_lists]:
        if not isinstance(object_list, LostList):
            findings.count(objects=1, size_bytes=object_list.size)


def _compare_ddl(
    chain: Chain, newest: Mapping[str, tuple[StoredObject, Described] | None], findings: Findings, *, is_last: bool
) -> None:
    """Compare the chain's last commit with the newest DDL of each shard, unless neither is new.

    Increments without changes of definitions are not compared, except for the last: they have no DDL of their own.
    """
    commit, changes = chain.last, chain.last.definition_changes
    for shard, found in newest.items():
        is_changed = changes is not None and (shard in changes.groups or shard in changes.gone)
        if found is None or not (found[0] in commit.own_objects or is_changed or is_last):
            continue
        stored, described = found
        for detail in contradictions(chain, shard, described):
            conflict = Conflict("definition", detail, node=shard, object=stored.key)
            if conflict not in findings.report.conflicts:
                findings.conflict(conflict)


def check_contents(
    spark: SparkSource,
    chain: Chain,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    rows: int = 0,
    known_as: Mapping[str, str] | None = None,
) -> None:
    """Read every object and compare the contents. The chain must have passed `check_structure`.

    `known_as` maps further names of shards, as distributed transactions have them, to their primaries.
    """
    session, copies = spark.session(), Copies.of(chain)
    held = hold_archive(chain, store)
    sources = None if held else _sources_for_reports(copies, store)
    rules = PartRules.of(chain, known_as or {})
    streams = hash_streams(session, copies, held or store, findings, progress, sources, rules)
    check_markers(chain, streams.markers, findings)
    events = StoredEvents(streams.store.open(), streams.events or {})
    findings.report.compared.transactions += check_cuts(chain, events, findings, progress)
    hashes = hash_partitions(session, copies, store, findings, progress, streams)
    check_large_objects(session, chain.full, store, findings, progress)
    compare_streams(copies, streams.sums, findings)
    compare_copies(copies, hashes, findings)
    name_rows(session, copies, store, findings, progress, rows, hashes.rows)
    progress.step("compare transactions")
    is_in_jobs = streams.events is None and held is None
    read = reading_in_jobs(session, store, progress) if is_in_jobs else reading_here(events)
    compare_transactions(chain, rules, streams.parts, read, findings)


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
