"""`gc`: find the garbage in the whole store, and remove it.

Garbage never becomes needed again (snapshots/removal/garbage.py). So removing it needs neither the fleet's lock nor a
second check; creates may run at the same time, and an interrupted gc can be repeated. The lock is taken only for
settling, and only if it is free. Settling decides operations that died; without it their objects are kept as those of a
running operation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice

from cutline.fleet.config import Fleet
from cutline.fleet.nodes.clocks import note_clocks
from cutline.fleet.nodes.lock import FleetBusyError
from cutline.fleet.nodes.sessions import open_sessions
from cutline.fleet.progress import Progress
from cutline.snapshots.operations.exclusive import exclusive
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.open_operations import CREATE, read_open_operations
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.commits import NAME
from cutline.snapshots.records.keys import Kind, parse_key
from cutline.snapshots.records.store_identity import FLEET_KEY, read_identity
from cutline.snapshots.removal.garbage import GarbageReason, GarbageRules, GarbageVerdict
from cutline.snapshots.removal.gc_report import Garbage, GcReport, RefusedRemoval
from cutline.snapshots.removal.old_records import RecordJudge, judge_probe
from cutline.snapshots.removal.removal import open_removals
from cutline.storage.clock import machine_now, utc_now
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from cutline.storage.probe import PROBES
from cutline.storage.store import DeletionRefusedError, ObjectStore, StoreUnreachableError, Unfinished

THREADS_MAX = 16
# How many removals are submitted at once. An interrupt waits for these.
BATCH = 256
# Longer than a put can take, with a margin for clocks that differ. For unfinished uploads whose key is unknown.
UNNAMED_SECONDS = 3600.0
# How long after its lease expired a restore may still be resumed.
RESUMABLE_SECONDS = 7 * 86400.0
OPERATIONS, SNAPSHOTS = "operations", "snapshots"
# Objects that are kept for ever.
PERMANENT = {
    "baselines": re.compile(r"baselines/\d{16}\.json"),
    "deleted": re.compile(rf"deleted/{NAME.pattern}\.json"),
    "keys": re.compile(r"keys/\d{16}\.json"),
}


def collect_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Find and remove the objects that no commit needs and no running operation uses.

    The report lists what the store refuses to delete; the rest is removed anyway. Raises StoreUnreachableError, and
    UndecidedError if the store does not tell whether an earlier operation committed.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    unsettled = _settle(store, fleet, progress)
    report = find_garbage(store, grace_seconds, progress)
    report.unsettled = unsettled
    remove_garbage(store, report, progress)
    return report


def preview_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Find what `collect_garbage` would remove now, by reading the store alone.

    It settles no operation, so a run may remove more. Raises StoreUnreachableError.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    report = find_garbage(store, grace_seconds, progress)
    report.dry_run = True
    return report


def find_garbage(store: ObjectStore, grace_seconds: float, progress: Progress) -> GcReport:
    """Search the whole store for garbage, changing nothing."""
    report = GcReport(grace_seconds)
    _GarbageSearch(store, report, progress).run()
    return report


def _settle(store: ObjectStore, fleet: Fleet, progress: Progress) -> str:
    """Settle open operations if the fleet's lock is free. Return why they were not settled, "" if they were."""
    progress.step("settle earlier operations")
    try:
        leases = open_leases(store)
        is_time_known = False
        if leases:
            with suppress(SnapshotError), open_sessions(fleet, fleet.primaries) as sessions:
                note_clocks(sessions.clocks, progress)
                is_time_known = True
        for lease in leases:
            # Until then it can be resumed, and list names it. The machine's time alone ends nobody's restore.
            if is_time_known and not lease.is_running(utc_now() - timedelta(seconds=RESUMABLE_SECONDS)):
                record_outcome(store, lease.operation, "failed", "its lease expired")
        if not any(one.operation is None or one.operation.kind == CREATE for one in read_open_operations(store)):
            return ""
        with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "gc", ""):
            settle_operations(store, fleet, progress)
    except StoreUnreachableError:
        raise
    except (FleetBusyError, UnreachableError, RefusedError) as error:
        return error.message
    return ""


class _GarbageSearch:
    """Searches the store and sorts its objects into the report."""

    def __init__(self, store: ObjectStore, report: GcReport, progress: Progress) -> None:
        self._store = store
        self._report = report
        self._progress = progress
        # Objects have the store's time. Of a folder that is the machine's, which may be what the nodes have corrected.
        self._now = min(utc_now(), machine_now())
        self._owners: set[str] = set()

    def run(self) -> None:
        """Search everything. One snapshot at a time, so that only one snapshot's listing is in memory."""
        leftovers = self._store.unfinished()
        names = self._store.list_children(SNAPSHOTS)
        self._progress.step("look for garbage", total=len(names), unit="names")
        for name in names:
            if NAME.fullmatch(name):
                self._search_snapshot(name)
            else:
                self._report.unknown.append(self._label(f"{SNAPSHOTS}/{name}"))
            self._progress.advance(1)
        self._search_records()
        self._search_probes()
        self._sort_leftovers(leftovers)
        for folder, form in PERMANENT.items():
            for one in self._store.inventory(folder):
                if form.fullmatch(one.key):
                    self._report.keep("", GarbageVerdict(GarbageReason.NEEDED), one.size)
                else:
                    self._report.unknown.append(one.key)
        known = {FLEET_KEY, SNAPSHOTS, OPERATIONS, PROBES, *PERMANENT}
        self._report.unknown += [self._label(one) for one in self._store.list_children("") if one not in known]

    def _search_snapshot(self, name: str) -> None:
        listed = self._store.inventory(f"{SNAPSHOTS}/{name}")
        # Only now: the rules must be made after the listing.
        judge = GarbageRules(self._store, name, listed, self._now)
        for one in listed:
            parsed = parse_key(name, one.key)
            if parsed is None:
                self._report.unknown.append(one.key)
                continue
            if parsed.owner:
                self._owners.add(parsed.owner)
            verdict = judge.judge(one.key, parsed)
            self._sort(Garbage(parsed.kind, verdict.why, (one,), name, parsed.owner), verdict, one.created_at)

    def _search_records(self) -> None:
        unfinished = {one.snapshot for one in open_removals(self._store)}
        judge = RecordJudge(self._store, self._owners, unfinished, self._now)
        for record in judge.judge(self._store.inventory(OPERATIONS)):
            if record.verdict is None:
                self._report.unknown += [one.key for one in record.objects]
                continue
            newest = max(one.created_at for one in record.objects)
            garbage = Garbage(Kind.RECORD, record.verdict.why, record.objects, operation=record.folder)
            self._sort(garbage, record.verdict, newest)

    def _search_probes(self) -> None:
        for one in self._store.inventory(PROBES):
            verdict = judge_probe(one, self._now)
            if verdict is None:
                self._report.unknown.append(one.key)
            else:
                self._sort(Garbage(Kind.PROBE, verdict.why, (one,)), verdict, one.created_at)

    def _sort_leftovers(self, leftovers: Iterable[Unfinished]) -> None:
        """Sort unfinished uploads: left by creates that died, or in progress. They were listed before all else."""
        self._report.open_operations = read_open_operations(self._store)
        running = [one.operation for one in self._report.open_operations if one.operation]
        snapshots = {one.snapshot: one.id for one in running if one.kind == CREATE}
        oldest = min((datetime.fromisoformat(one.began_at) for one in running), default=None)
        if len(running) < len(self._report.open_operations):
            # The intent of one can't be read, so it may have begun at any time.
            oldest = datetime.min.replace(tzinfo=UTC)
        margin = timedelta(seconds=UNNAMED_SECONDS)
        for one in leftovers:
            top, _, rest = one.key.partition("/")
            snapshot = rest.partition("/")[0] if top == SNAPSHOTS else ""
            if one.key and (
                parse_key(snapshot, one.key) is None if snapshot else top not in (OPERATIONS, PROBES, *PERMANENT)
            ):
                self._report.unknown.append(f"{one.key} (unfinished)")
                continue
            verdict, since = GarbageVerdict(GarbageReason.LEFT_OVER), one.began_at
            if snapshot in snapshots:
                verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {snapshots[snapshot]} has no outcome")
            elif not snapshot:
                # Its key is unknown or in no snapshot. The latter are small objects, whose puts take no time.
                since += margin
                if oldest and one.began_at + margin >= oldest:
                    verdict = GarbageVerdict(GarbageReason.OPEN, "an operation without an outcome may be writing it")
            self._sort(Garbage(Kind.UNFINISHED, verdict.why, (), snapshot, leftover=one), verdict, since)

    def _sort(self, candidate: Garbage, verdict: GarbageVerdict, since: datetime) -> None:
        if verdict.why.is_garbage and since > self._now - timedelta(seconds=self._report.grace_seconds):
            verdict = GarbageVerdict(GarbageReason.YOUNG)
        if verdict.why.is_garbage:
            self._report.garbage.append(candidate)
            return
        for size in candidate.sizes:
            self._report.keep(candidate.snapshot, verdict, size)

    def _label(self, key: str) -> str:
        return key if self._store.exists(key) else f"{key}/"


def remove_garbage(store: ObjectStore, report: GcReport, progress: Progress) -> None:
    """Remove the report's garbage, a bounded number at a time; add to the report what the store refuses to delete."""
    progress.step("remove", total=len(report.garbage), unit="objects")
    waiting = iter(report.garbage)
    try:
        with ThreadPoolExecutor(THREADS_MAX) as threads:
            while batch := list(islice(waiting, BATCH)):
                for sizes, refused in threads.map(lambda one: _remove_one(store, one), batch):
                    for size in sizes:
                        report.removed.add(size)
                    if refused:
                        report.refused.append(refused)
                    progress.advance(1)
    except SnapshotError as error:
        error.details |= {"removed": report.removed.objects, "bytes": report.removed.size_bytes}
        raise


def _remove_one(store: ObjectStore, garbage: Garbage) -> tuple[list[int], RefusedRemoval | None]:
    """Remove `garbage` in order, up to the first refusal. Return the sizes of what was removed, and the refusal."""
    removed: list[int] = []
    key = ""
    try:
        for one in garbage.objects:
            key = one.key
            store.delete(key)
            removed.append(one.size)
        if garbage.leftover:
            key = garbage.leftover.key or garbage.leftover.id
            store.abandon(garbage.leftover)
            removed.append(garbage.leftover.size_bytes)
    except DeletionRefusedError as error:
        return removed, RefusedRemoval(key, error.message)
    return removed, None
