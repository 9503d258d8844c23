"""The `gc` command: search the store for objects that nothing needs, and remove them.

garbage_rules.py judges the objects in snapshots, old_records.py the records of operations. The search begins with a
listing, and the rules read every document after it. Earlier operations are settled first, so that their objects are
decided. The grace period is additional protection against causes outside the protocol, such as wrong clocks and human
errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import NamedTuple

from msgspec import Struct, field

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.clocks import note_clocks
from cutline.nodes.lock import FleetBusyError
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.open_operations import RESTORE, OpenOperation, read_open_operations
from cutline.snapshots.operations.operation import exclusive, record_outcome
from cutline.snapshots.operations.settling import settle_in_store, settle_operations
from cutline.snapshots.records.documents import NAME, Kind, parse_key
from cutline.snapshots.records.operation_records import CREATE, IN_STORE
from cutline.snapshots.records.store_identity import FLEET_KEY, is_copy, read_identity
from cutline.snapshots.removal.garbage_rules import GarbageReason, GarbageRules, GarbageVerdict
from cutline.snapshots.removal.old_records import RecordJudge, judge_probe
from cutline.snapshots.removal.removing import open_removals
from cutline.snapshots.removal.survey import SizeTotal
from cutline.storage.clock import machine_now, utc_now
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from cutline.storage.probe import PROBES
from cutline.storage.store import DeletionRefusedError, Listed, ObjectStore, Unfinished


class Garbage(Struct, frozen=True):
    """Garbage to remove: `objects`, deleted in this order, or `leftover`, an unfinished upload."""

    kind: Kind
    why: GarbageReason
    objects: tuple[Listed, ...]
    snapshot: str = ""
    operation: str = ""
    leftover: Unfinished | None = None

    @property
    def sizes(self) -> list[int]:
        """The size in bytes of each object or upload."""
        sizes = [stored_object.size for stored_object in self.objects]
        return [*sizes, self.leftover.size_bytes] if self.leftover else sizes


class RefusedRemoval(Struct, frozen=True):
    """An object that the store refused to delete, and the reason."""

    key: str
    reason: str


class KeptKey(NamedTuple):
    """The key for counting kept objects; `snapshot` is "" for objects of no snapshot."""

    snapshot: str
    reason: GarbageReason
    text: str


class GcReport(Struct):
    """The findings and the result of gc. `kept` counts all objects that are not removed, including needed objects.

    `unsettled` is the reason why earlier operations were not settled first, "" if they were. `unknown` lists
    entries of other programs: objects, and folders, which end with a slash.
    """

    grace_seconds: float
    is_dry: bool = False
    unsettled: str = ""
    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[KeptKey, SizeTotal] = field(default_factory=dict)
    open_operations: tuple[OpenOperation, ...] = ()
    unknown: list[str] = field(default_factory=list)
    refused: list[RefusedRemoval] = field(default_factory=list)
    removed: SizeTotal = field(default_factory=SizeTotal)

    def keep(self, snapshot: str, verdict: GarbageVerdict, size_bytes: int) -> None:
        """Count an object that is kept."""
        self.kept.setdefault(KeptKey(snapshot, verdict.why, verdict.text), SizeTotal()).add(size_bytes)


THREADS_MAX = 16
# The number of removals submitted at once; an interrupt waits for them.
BATCH = 256
# The age margin for unfinished uploads with an unknown key: longer than any put, even if clocks differ.
UNNAMED_SECONDS = 3600.0
# How long after the end of its lease a restore may still be resumed.
RESUMABLE_SECONDS = 7 * 86400.0
OPERATIONS, SNAPSHOTS = "operations", "snapshots"
# Objects that are never removed.
PERMANENT = {
    "baselines": re.compile(r"baselines/\d{16}\.json"),
    "deleted": re.compile(rf"deleted/{NAME.pattern}\.json"),
    "keys": re.compile(r"keys/\d{16}\.json"),
}


def collect_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Find and remove the objects that no commit needs and no running operation uses.

    The report lists objects that the store refuses to delete; the rest is removed anyway. If earlier operations can't
    be settled, because a node can't be reached or the store is full, their objects stay. Raises StoreUnreachableError,
    and UndecidedError if the store's answers do not show whether an earlier operation committed.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    unsettled = _settle(store, fleet, progress)
    report = find_garbage(store, grace_seconds, progress)
    report.unsettled = unsettled
    remove_garbage(store, report, progress)
    return report


def preview_garbage(fleet: Fleet, grace_seconds: float, progress: Progress) -> GcReport:
    """Reading only the store, find the garbage that `collect_garbage` would remove now.

    The preview settles no operations, so a run may remove more. Raises StoreUnreachableError.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    report = find_garbage(store, grace_seconds, progress)
    report.is_dry = True
    return report


def find_garbage(store: ObjectStore, grace_seconds: float, progress: Progress) -> GcReport:
    """Search the whole store for garbage, changing nothing."""
    report = GcReport(grace_seconds)
    _GarbageSearch(store, report, progress).run()
    return report


def _settle(store: ObjectStore, fleet: Fleet, progress: Progress) -> str:
    """Settle open operations if the fleet's lock is free; return the reason if they were not settled, else "".

    In a copy, repairs and merges are settled by this machine's clock, because nodes need not exist: at worst, one that
    still runs fails.
    """
    progress.step("settle earlier operations")
    try:
        leases = open_leases(store)
        is_time_known, is_of_copy = False, is_copy(store)
        # The servers of a copy's fleet file need not exist.
        if any(lease.operation.kind == RESTORE or not is_of_copy for lease in leases):
            with suppress(SnapshotError), open_sessions(fleet, fleet.primaries) as sessions:
                note_clocks(sessions.clocks, progress)
                is_time_known = True
        for lease in leases:
            if lease.operation.kind in IN_STORE:
                if is_time_known or is_of_copy:
                    settle_in_store(store, lease.operation, progress)
                continue
            # Until then, the restore can be resumed and `list` shows it. This machine's clock alone is not trusted.
            if is_time_known and not lease.is_running(utc_now() - timedelta(seconds=RESUMABLE_SECONDS)):
                record_outcome(store, lease.operation, "failed", "its lease expired")
        if not any(
            open_operation.operation is None or open_operation.operation.kind == CREATE
            for open_operation in read_open_operations(store)
        ):
            return ""
        with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "gc", ""):
            settle_operations(store, sessions.fleet, progress)
    except (FleetBusyError, UnreachableError, RefusedError) as error:
        # A full store can't record outcomes, but removing other garbage makes space. The search below raises an error
        # if the store can't be read.
        return error.message
    return ""


class _GarbageSearch:
    def __init__(self, store: ObjectStore, report: GcReport, progress: Progress) -> None:
        self._store = store
        self._report = report
        self._progress = progress
        # Object timestamps are from the store's clock. For a local folder, that is the machine's clock, while utc_now()
        # may be corrected by the nodes' clocks.
        self._now = min(utc_now(), machine_now())
        self._owners: set[str] = set()

    def run(self) -> None:
        """Search everything, one snapshot at a time, so that only one snapshot's listing is in memory."""
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
            for listed in self._store.inventory(folder):
                if form.fullmatch(listed.key):
                    self._report.keep("", GarbageVerdict(GarbageReason.NEEDED), listed.size)
                else:
                    self._report.unknown.append(listed.key)
        known = {FLEET_KEY, SNAPSHOTS, OPERATIONS, PROBES, *PERMANENT}
        self._report.unknown += [self._label(child) for child in self._store.list_children("") if child not in known]

    def _search_snapshot(self, name: str) -> None:
        listed = self._store.inventory(f"{SNAPSHOTS}/{name}")
        # The rules must be created after the listing.
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
        unfinished = {removal.snapshot for removal in open_removals(self._store)}
        judge = RecordJudge(self._store, self._owners, unfinished, self._now)
        for record in judge.judge(self._store.inventory(OPERATIONS)):
            if record.verdict is None:
                self._report.unknown += [stored_object.key for stored_object in record.objects]
                continue
            newest = max(stored_object.created_at for stored_object in record.objects)
            garbage = Garbage(Kind.RECORD, record.verdict.why, record.objects, operation=record.folder)
            self._sort(garbage, record.verdict, newest)

    def _search_probes(self) -> None:
        for listed in self._store.inventory(PROBES):
            verdict = judge_probe(listed, self._now)
            if verdict is None:
                self._report.unknown.append(listed.key)
            else:
                self._sort(Garbage(Kind.PROBE, verdict.why, (listed,)), verdict, listed.created_at)

    def _sort_leftovers(self, leftovers: Iterable[Unfinished]) -> None:
        """Sort unfinished uploads (left by dead creates or in progress), which were listed before all other objects."""
        self._report.open_operations = read_open_operations(self._store)
        running = [
            open_operation.operation for open_operation in self._report.open_operations if open_operation.operation
        ]
        snapshots = {intent.snapshot: intent.id for intent in running if intent.kind in (CREATE, *IN_STORE)}
        oldest = min((datetime.fromisoformat(intent.began_at) for intent in running), default=None)
        if len(running) < len(self._report.open_operations):
            # An operation whose intent can't be read may have begun at any time.
            oldest = datetime.min.replace(tzinfo=UTC)
        margin = timedelta(seconds=UNNAMED_SECONDS)
        for leftover in leftovers:
            top, _, rest = leftover.key.partition("/")
            snapshot = rest.partition("/")[0] if top == SNAPSHOTS else ""
            if leftover.key and (
                parse_key(snapshot, leftover.key) is None if snapshot else top not in (OPERATIONS, PROBES, *PERMANENT)
            ):
                self._report.unknown.append(f"{leftover.key} (unfinished)")
                continue
            verdict, since = GarbageVerdict(GarbageReason.LEFT_OVER), leftover.began_at
            if snapshot in snapshots:
                verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {snapshots[snapshot]} has no outcome")
            elif not snapshot:
                # The key is unknown, or outside snapshots, where objects are small and their puts are short.
                since += margin
                if oldest and leftover.began_at + margin >= oldest:
                    verdict = GarbageVerdict(GarbageReason.OPEN, "an operation without an outcome may be writing it")
            self._sort(Garbage(Kind.UNFINISHED, verdict.why, (), snapshot, leftover=leftover), verdict, since)

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
    """Remove the report's garbage, a bounded number of objects at a time; add the store's refusals to the report."""
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
    """Remove objects in order up to the first refusal; return the sizes of the removed objects, and the refusal."""
    removed: list[int] = []
    key = ""
    try:
        for stored_object in garbage.objects:
            key = stored_object.key
            store.delete(key)
            removed.append(stored_object.size)
        if garbage.leftover:
            key = garbage.leftover.key or garbage.leftover.id
            store.abandon(garbage.leftover)
            removed.append(garbage.leftover.size_bytes)
    except DeletionRefusedError as error:
        return removed, RefusedRemoval(key, error.message)
    return removed, None
