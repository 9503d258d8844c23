"""The `check` command: read one snapshot or all snapshots back, and compare their copies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from cutline.check.commit_entries import check_entries
from cutline.check.compare import compare_copies, compare_streams
from cutline.check.copies import Copies
from cutline.check.cuts import StoredEvents, check_cuts, check_markers
from cutline.check.definitions import StoredDefinitions, check_definitions
from cutline.check.earlier_check import RecordedChecks, commits_to_read_since, store_digest
from cutline.check.exact_state import compare_exact
from cutline.check.image_hashes import PartitionHashes
from cutline.check.named_rows import name_rows
from cutline.check.new_part import NewPart
from cutline.check.operation_documents import RecordedPoints, check_intent, check_leases, check_outcomes, check_seen
from cutline.check.own_types import own_types
from cutline.check.partitions import hash_partitions
from cutline.check.primaries import LockedPrimaries, check_primaries
from cutline.check.read_times import LastReads
from cutline.check.report import CheckReport, Compared, Conflict, Findings, Skipped, SnapshotReport, conflict_of
from cutline.check.required_values import required_columns
from cutline.check.rereading import Deadline, Rereading
from cutline.check.resting import ChainCheck, record_full, rest_on_record
from cutline.check.restore_points import check_restore_point
from cutline.check.sequence_values import check_sequences, fed_groups
from cutline.check.spanning import check_spanning
from cutline.check.stored_entries import check_listing, entries_in_order
from cutline.check.stored_large_objects import check_large_objects
from cutline.check.streams import hash_streams
from cutline.check.structure import check_structure, names_to_check
from cutline.check.times import check_times
from cutline.check.transaction_parts import PartRules
from cutline.check.transactions import compare_transactions, reading_here, reading_in_jobs
from cutline.check.uncompared import PassedCopies, ends_of_passes, note_uncompared
from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.nodes.clocks import note_late_clock
from cutline.snapshots.fold.limits import CHANGES_MAX, STORED_BYTES_MAX
from cutline.snapshots.fold.sources import Sources
from cutline.snapshots.listing.listing import read_at
from cutline.snapshots.listing.name_templates import find_newest
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists
from cutline.snapshots.operations.open_operations import (
    document_names,
    naming_open_operations,
    read_open_operations,
    read_outcomes,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import LostList
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.merged_chain import MergedAwayError
from cutline.snapshots.records.proven_chains import SnapshotMissingError, chain_at, cut_time, snapshot_names
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_deleted, is_only_full
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import TASKS_PER_JOB_MAX, SparkSource, start_session
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import HeldObjects, ObjectDamagedError

if TYPE_CHECKING:
    from cutline.snapshots.listing.exact_point import ExactPoint


class CheckRequest(Struct, frozen=True):
    """Check the snapshot `name` up to `increment` (None: the newest), or all snapshots if `name` is None.

    `at` selects the latest cut at or before that time. If the request is `exact`, the chain is checked up to the first
    cut after that time, and the copies are also compared at the time itself (snapshots/listing/exact_point.py).

    With `newest`, check only the newest snapshot. `rows` is the number of different rows that are named for each
    partition that differs.

    With `since_last`, read only objects that no check has read, and rest on the record of an earlier check for all
    others, some of which are reread. `subset` (n, t) says which part is reread. `seconds_max` limits the time: the
    check ends after the increment or the objects that it is reading then. Both imply `since_last`.
    """

    name: str | None = None
    increment: int | None = None
    metadata_only: bool = False
    rows: int = 0
    since_last: bool = False
    subset: tuple[int, int] | None = None
    seconds_max: float | None = None
    newest: bool = False
    at: datetime | None = None
    exact: bool = False

    @property
    def uses_records(self) -> bool:
        """Whether the check may rest on the record of an earlier check."""
        return self.since_last or self.is_limited

    @property
    def is_limited(self) -> bool:
        """Whether the check must not read everything, even if there is no record to rest on."""
        return self.subset is not None or self.seconds_max is not None


def check_snapshots(fleet: Fleet, request: CheckRequest, spark: SparkSource, progress: Progress) -> CheckReport:
    """Check the snapshots that `request` names; start Spark only if there are contents to read."""
    began, deadline = time.monotonic(), Deadline(request.seconds_max)
    store = fleet.store.open()
    fleet_id = read_identity(store, fleet).fleet_id
    operations = document_names(store)
    open_operations = read_open_operations(store, request.name, operations)
    unread: list[ManifestError] = []
    checks = RecordedChecks(store, operations)
    names, points = _choose_snapshots(checks, request, unread)
    recorded = points.commits
    reports: list[SnapshotReport] = []
    locked: list[LockedPrimaries] = []
    for name in names:
        progress.step(f"check {name}")
        moment = utc_now()
        try:
            with naming_open_operations(open_operations):
                point = _find_point(store, name, request)
                chain, report = check_structure(store, fleet_id, name, point.increment, recorded.get(name, {}))
        except SnapshotDeletedError:
            if request.name:
                raise
            # The snapshot was deleted after it was listed.
            continue
        report.allows_one_copy = fleet.allows_one_copy
        report.gaps_named_to = max((seen.increment for seen in points.seen.get(name, {}).values()), default=0)
        if chain is not None:
            check = ChainCheck(
                chain, fleet.store, Findings(report), spark, progress, deadline, request.subset, moment,
                store_digest(fleet.store, fleet_id), fleet.reread_seconds, _names_of_shards(fleet, chain),
            )  # fmt: skip
            check_outcomes(chain, points.creates, check.findings, points.others)
            check_seen(chain, points.seen.get(name, {}), check.findings)
            check_leases(store, open_operations, name, check.findings)
            locked += [LockedPrimaries.of(chain.stored_full)] if chain.full.fleet_id == fleet_id else []
            with _replace_if_deleted(store, point.exact.chain if point.exact else chain, report):
                _check_chain(check, request, checks)
                if point.exact and chain.last.increment == point.increment:
                    _compare_exact(check, point.exact)
                if point.problem is not None and request.at is not None:
                    _note_unfound(check.findings, point.problem, request.at)
        # An unreadable operation may have worked on any snapshot, so it is added to every report.
        report.conflicts += [
            Conflict("operation", error.message, object=str(error.details["object"])) for error in unread
        ]
        reports.append(report)
    of_fleet = check_primaries(store, locked)
    for report in reports:
        report.conflicts += of_fleet
        if report.conflicts:
            report.read = None
    return CheckReport(tuple(reports), time.monotonic() - began, open_operations)


def _choose_snapshots(
    checks: RecordedChecks, request: CheckRequest, unread: list[ManifestError]
) -> tuple[list[str], RecordedPoints]:
    """Return the snapshots to check, and the facts about them from the outcomes of creates and checks.

    If a check may rest on a record, only the outcomes of operations since then are read. For the newest snapshot, those
    since its full snapshot are read. Any other snapshot that these have committed is newer; if it no longer exists, it
    is checked as well, and so is every snapshot whose full snapshot can't be read: it may be the newest.
    """
    store, operations = checks.store, checks.documents
    if request.newest:
        newest, unreadable = find_newest(store)
        since = newest.operation if newest else ""
        points = RecordedPoints.of(read_outcomes(store, since, unread, operations))
        recorded = points.commits
        existing = set(snapshot_names(store))
        lost = [name for name in names_to_check(store, recorded) if name in recorded and name not in existing]
        return [*([newest.snapshot] if newest else []), *unreadable, *lost], points
    since = ""
    if request.name and request.uses_records:
        since = commits_to_read_since(checks.for_snapshot(request.name), request.name)
    points = RecordedPoints.of(read_outcomes(store, since, unread, operations))
    return [request.name] if request.name else names_to_check(store, points.commits), points


class _Point(Struct, frozen=True):
    """The increment up to which a snapshot is checked (None: the newest), and the exact time to compare, if any.

    `problem` is the reason if what was asked for can't be found, because a document or an object can't be read.
    """

    increment: int | None
    exact: ExactPoint | None = None
    problem: SnapshotError | None = None


def _names_of_shards(fleet: Fleet, chain: Chain) -> Mapping[str, str]:
    """Return the further names of shards in fleet.toml, an id that the chain does not have included."""
    fleet = with_chain_ids(fleet, chain.renamed)
    return {name: node.id for node in (*fleet.primaries, *fleet.retired_nodes) for name in node.known_as}


def _find_point(store: ObjectStore, name: str, request: CheckRequest) -> _Point:
    if request.at is None:
        return _Point(request.increment)
    # Imported here: other checks need nothing of it.
    from cutline.snapshots.listing.exact_point import check_same_definitions, cuts_around, find_exact_point

    try:
        chain = read_at(store, name, request.at)
    except MergedAwayError:
        raise
    except (ManifestError, SnapshotMissingError) as error:
        if not error.details.get("object"):
            # There is no such snapshot, or no cut at that time.
            raise
        # A check of everything names what else is damaged.
        return _Point(None, problem=error)
    if not request.exact:
        return _Point(chain_at(chain, request.at).last.increment)
    _, after = cuts_around(chain, request.at)
    try:
        exact = find_exact_point(store, read_chain_lists(store, chain), request.at)
    except (ManifestError, ObjectDamagedError) as error:
        return _Point(after.increment, problem=error)
    check_same_definitions(exact, exact.chain.primaries)
    return _Point(exact.after.increment, exact)


def _note_unfound(findings: Findings, problem: SnapshotError, at: datetime) -> None:
    """Report that the state at a time was not checked, and why, unless the check has found the cause itself.

    A check reads a chain from its newest merge on, and the time may be before that.
    """
    damaged = str(problem.details.get("object", ""))
    if not any(conflict.object == damaged for conflict in findings.report.conflicts):
        is_object = isinstance(problem, ObjectDamagedError)
        found = (
            conflict_of(report_of(problem))
            if is_object
            else Conflict("commit", problem.message, object=damaged or None)
        )
        findings.conflict(found)
    findings.skip(
        Skipped(f"the state at {Time.exactly(at)}", "an object or document that it needs is damaged or missing")
    )


def _compare_exact(check: ChainCheck, exact: ExactPoint) -> None:
    check.progress.step(f"compare {check.chain.name} at the time")
    compare_exact(check.spark.session(), exact, check.location, check.findings, check.progress)


def _check_chain(check: ChainCheck, request: CheckRequest, checks: RecordedChecks) -> None:
    """Check the chain as requested."""
    chain, location, findings, progress = check.chain, check.location, check.findings, check.progress
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
        check_restore_point(chain, store, findings, progress, check.known_as)
        return
    _note_lost_lists(chain, findings)
    if request.uses_records and rest_on_record(check, checks, lambda part: _check_part(check, part)):
        return
    part, compared = NewPart(chain), None
    check.spark.begin(ExecutorNeeds(location), progress, part.amount)
    *earlier, _ = ends_of_passes(chain)
    for last in earlier:
        _check_part(check, NewPart(chain.up_to(last)), compared=compared)
        compared = last
    _check_part(check, part, request.rows, compared)
    _read_other_copies(check)
    note_uncompared(chain, findings)
    record_full(check)


def _read_other_copies(check: ChainCheck) -> None:
    """Compare the objects of copies that no pass has read with their digests: nothing else can be said about them."""
    chain, passed = check.chain, PassedCopies.of(check.chain)
    if passed.are_all:
        return
    unread = (
        entry
        for increment, entries in entries_in_order(chain)
        for entry in entries
        if not passed.is_read(entry.node, increment)
    )
    times = LastReads.of_full(chain.last.increment, check.now)
    rereading = Rereading(check.spark, check.location, check.findings, check.progress, check.deadline, times)
    while some := list(islice(unread, TASKS_PER_JOB_MAX)):
        rereading.read_entries(some)
    check.report.compared.objects += rereading.objects


def _check_part(check: ChainCheck, part: NewPart, rows: int = 0, compared: int | None = None) -> None:
    stored = check_definitions(check.location.open(), part, check.findings)
    check_contents(check, part, stored, rows, compared)


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
            report.uncompared_points = report.gaps = ()
            report.rests_on = report.read = None
            return
    if problem:
        raise problem


def _find_removal(store: ObjectStore, chain: Chain) -> Skipped | None:
    if is_deleted(store, chain.name):
        return Skipped(f"snapshot {chain.name}", "it was deleted during the check")
    if (first := first_increment(store, chain.name)) > chain.full.increment:
        return Skipped(
            f"restore points before increment {first} of {chain.name}", "they were given up during the check"
        )
    if chain.increments and is_only_full(store, chain.name):
        return Skipped(f"increments of {chain.name}", "they were pruned during the check")
    return None


def _note_lost_lists(chain: Chain, findings: Findings) -> None:
    """Report missing or altered object lists as damage: the copies of their nodes lack the rows listed there."""
    for object_list in [object_list for commit in chain.commits for object_list in commit.object_lists]:
        if isinstance(object_list, LostList):
            findings.damage(report_of(lost_list_error(object_list)))


def check_contents(
    check: ChainCheck, part: NewPart, stored: StoredDefinitions, rows: int = 0, compared: int | None = None
) -> None:
    """Read every object and compare the contents. The chain must have passed `check_structure`.

    If an earlier check has found the rest of the chain valid, only the `part` is read; Spark is then started only if
    tables were copied or there is more to read than the driver should hold. `stored` contains the facts about rows that
    the stored DDL states. `rows` is as in CheckRequest. This check has compared the cuts and transactions up to
    increment `compared`, if it is given.
    """
    after = compared if part.after is None else part.after
    chain, spark, store, findings, progress = part.chain, check.spark, check.location, check.findings, check.progress
    copies = _copies_of(chain, stored)
    held = hold_archive(store, part)
    # A check of everything has begun with it before it read the definitions.
    if part.after is not None and (part.has_copies or held is None):
        spark.begin(ExecutorNeeds(store), progress, part.amount)
    if held is None:
        start_session(spark, progress)
    sources = None if held else _sources_for_reports(copies, part, store)
    rules = PartRules.of(chain, check.known_as, after)
    streams = hash_streams(spark, copies, held or store, findings, progress, sources, rules, part)
    check_markers(chain, streams.markers, findings, part.after)
    events = StoredEvents(streams.store.open(), streams.events or {}, streams.held)
    findings.report.compared.transactions += check_cuts(chain, events, findings, progress, after)
    check_spanning(chain, streams.store.open(), findings, after)
    hashes = PartitionHashes.none()
    if part.has_copies:
        session = spark.session() if held is None else start_session(spark, progress)
        hashes = hash_partitions(session, copies, store, findings, progress, streams, part)
    if part.after is None:
        check_large_objects(spark.session(), chain.full, store, findings, progress, stored.roles)
    check_sequences(copies, stored.newest, hashes.extremes, findings)
    compare_streams(copies, streams.sums, findings)
    compare_copies(copies, hashes, findings)
    if rows:
        name_rows(spark.session(), copies, store, findings, progress, rows, hashes.rows)
    progress.step("compare transactions")
    is_in_jobs = streams.events is None and held is None
    read = reading_in_jobs(spark, store, progress) if is_in_jobs else reading_here(events)
    compare_transactions(chain, rules, streams.parts, read, findings)


def _copies_of(chain: Chain, stored: StoredDefinitions) -> Copies:
    of_columns = {shard: own_types(chain, shard, known) for shard, known in stored.own_types.items()}
    fed = {shard: frozenset(fed_groups(chain, shard, described)) for shard, described in stored.newest.items()}
    required = {shard: required_columns(chain, shard, described) for shard, described in stored.newest.items()}
    return Copies.of(chain, of_columns, fed, required, stored.required)


def hold_archive(store: StoreLocation, part: NewPart) -> HeldObjects | None:
    """Return an object holder with which the driver reads each archive once; None if Spark jobs are faster."""
    if sum(segment.size for segment in part.all_segments) > STORED_BYTES_MAX or part.changes > CHANGES_MAX:
        return None
    return HeldObjects(store)


def _sources_for_reports(copies: Copies, part: NewPart, store: StoreLocation) -> Sources | None:
    """Return the sources for folding the copies; None if a segment with a TRUNCATE can't be read."""
    try:
        return part.sources(copies.nodes, store.open())
    except ObjectDamagedError:
        # The job that reads all segments will report the damaged object.
        return None
