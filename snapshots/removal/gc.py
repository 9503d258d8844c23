"""`gc`: finding what is garbage in the whole store, and removing it.

What is removed is decided for good (snapshots/removal/garbage.py). So neither the fleet's lock nor a second look is
needed
while it goes, creates run beside it, and a gc that died is repeated. The lock is taken where it is free, for settling
alone: that decides what died, whose objects would be kept else as if it were live.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice

from fleet.config import Fleet
from fleet.nodes.lock import FleetBusyError
from fleet.nodes.sessions import open_sessions
from fleet.progress import Progress
from snapshots.operations.exclusive import exclusive
from snapshots.operations.leases import open_leases
from snapshots.operations.open_operations import CREATE, OpenOperation, read_open_operations
from snapshots.operations.operation import record_outcome
from snapshots.operations.settling import settle_operations
from snapshots.records.commits import NAME
from snapshots.records.keys import Kind, place_of
from snapshots.records.store_identity import FLEET_KEY, read_identity
from snapshots.removal.garbage import GarbageReason, GarbageRules, GarbageVerdict
from snapshots.removal.old_records import RecordJudge, judge_probe
from storage.errors import RefusedError, SnapshotError, UnreachableError
from storage.probe import PROBES
from storage.store import DeletionRefusedError, Listed, ObjectStore, StoreUnreachableError, Unfinished

THREADS_MAX = 16
# Submitted at once: an interrupt waits for no more than these.
BATCH = 256
# What hides its object's key is younger than any put may take, though clocks differ.
UNNAMED_SECONDS = 3600.0
OPERATIONS, SNAPSHOTS = "operations", "snapshots"
# What is kept for ever.
STAYING = {
    "baselines": re.compile(r"baselines/\d{16}\.json"),
    "deleted": re.compile(rf"deleted/{NAME.pattern}\.json"),
}


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something to remove. `objects` go one after the other; `leftover` is no object yet."""

    kind: Kind
    why: GarbageReason
    objects: tuple[Listed, ...]
    snapshot: str = ""
    operation: str = ""
    leftover: Unfinished | None = None

    @property
    def sizes(self) -> list[int]:
        """The bytes of each."""
        sizes = [one.size for one in self.objects]
        return [*sizes, self.leftover.size_bytes] if self.leftover else sizes


@dataclass(frozen=True, slots=True)
class RefusedRemoval:
    """An object that the store does not let go, and why."""

    key: str
    reason: str


@dataclass(slots=True)
class SizeTotal:
    """How many objects, and their bytes."""

    objects: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Count one more."""
        self.objects += 1
        self.size_bytes += size_bytes


@dataclass(slots=True)
class GcReport:
    """What gc found and did. `kept` is all that is not removed, by snapshot, reason and text; `needed` among it.

    `unsettled` says why earlier operations were not settled first, "" where they were. `unknown` is not this
    program's: objects, and folders with a slash at their end.
    """

    grace_seconds: float
    dry_run: bool = False
    unsettled: str = ""
    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[tuple[str, GarbageReason, str], SizeTotal] = field(default_factory=dict)
    open_operations: tuple[OpenOperation, ...] = ()
    unknown: list[str] = field(default_factory=list)
    refused: list[RefusedRemoval] = field(default_factory=list)
    removed: SizeTotal = field(default_factory=SizeTotal)

    def keep(self, snapshot: str, verdict: GarbageVerdict, size_bytes: int) -> None:
        """Count something that stays."""
        self.kept.setdefault((snapshot, verdict.why, verdict.text), SizeTotal()).add(size_bytes)


def collect_garbage(fleet: Fleet, grace_seconds: float, progress: Progress, *, dry_run: bool = False) -> GcReport:
    """Find what no commit needs and nobody is at work on, and remove it; a dry run asks the store alone.

    What the store refuses to let go is in the report, and the rest goes all the same. Raises StoreUnreachableError;
    UndecidedError where the store does not tell whether an earlier operation has committed.
    """
    store = fleet.store.open()
    read_identity(store, fleet)
    unsettled = "" if dry_run else _settle(store, fleet, progress)
    report = find_garbage(store, grace_seconds, progress)
    report.dry_run, report.unsettled = dry_run, unsettled
    if not dry_run:
        remove_garbage(store, report, progress)
    return report


def find_garbage(store: ObjectStore, grace_seconds: float, progress: Progress) -> GcReport:
    """Look at the whole store, changing nothing."""
    report = GcReport(grace_seconds)
    _GarbageSearch(store, report, progress).run()
    return report


def _settle(store: ObjectStore, fleet: Fleet, progress: Progress) -> str:
    """Settle what earlier operations left open, where the fleet's lock is free; else say why it was not done."""
    progress.step("settle earlier operations")
    try:
        for lease in open_leases(store):
            if not lease.is_running(datetime.now(UTC)):
                record_outcome(store, lease.operation, "failed", "its lease ran out")
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
    """Goes through the store and sorts what is there into the report."""

    def __init__(self, store: ObjectStore, report: GcReport, progress: Progress) -> None:
        self._store = store
        self._report = report
        self._progress = progress
        self._now = datetime.now(UTC)
        self._owners: set[str] = set()

    def run(self) -> None:
        """Look at everything, one snapshot after the other: what is held of a listing is one snapshot's."""
        leftovers = self._store.unfinished()
        names = self._store.list_children(SNAPSHOTS)
        self._progress.step("look for garbage", total=len(names), unit="snapshots")
        for name in names:
            if NAME.fullmatch(name):
                self._snapshot(name)
            else:
                self._report.unknown.append(self._called(f"{SNAPSHOTS}/{name}"))
            self._progress.advance(1)
        self._records()
        self._probes()
        self._leftovers(leftovers)
        for folder, form in STAYING.items():
            for one in self._store.inventory(folder):
                if form.fullmatch(one.key):
                    self._report.keep("", GarbageVerdict(GarbageReason.NEEDED), one.size)
                else:
                    self._report.unknown.append(one.key)
        known = {FLEET_KEY, SNAPSHOTS, OPERATIONS, PROBES, *STAYING}
        self._report.unknown += [self._called(one) for one in self._store.list_children("") if one not in known]

    def _snapshot(self, name: str) -> None:
        listed = self._store.inventory(f"{SNAPSHOTS}/{name}")
        # From here on: the listing comes first.
        judge = GarbageRules(self._store, name, listed, self._now)
        for one in listed:
            place = place_of(name, one.key)
            if place is None:
                self._report.unknown.append(one.key)
                continue
            if place.owner:
                self._owners.add(place.owner)
            verdict = judge.judge(one.key, place)
            self._sort(Garbage(place.kind, verdict.why, (one,), name, place.owner), verdict, one.created_at)

    def _records(self) -> None:
        judge = RecordJudge(self._store, self._owners, self._now)
        for record in judge.judge(self._store.inventory(OPERATIONS)):
            if record.verdict is None:
                self._report.unknown += [one.key for one in record.objects]
                continue
            newest = max(one.created_at for one in record.objects)
            found = Garbage(Kind.RECORD, record.verdict.why, record.objects, operation=record.folder)
            self._sort(found, record.verdict, newest)

    def _probes(self) -> None:
        for one in self._store.inventory(PROBES):
            verdict = judge_probe(one, self._now)
            if verdict is None:
                self._report.unknown.append(one.key)
            else:
                self._sort(Garbage(Kind.PROBE, verdict.why, (one,)), verdict, one.created_at)

    def _leftovers(self, leftovers: Iterable[Unfinished]) -> None:
        """Sort what creates that died have left, or those under way are writing. It was listed before this."""
        self._report.open_operations = read_open_operations(self._store)
        running = [one.operation for one in self._report.open_operations if one.operation]
        snapshots = {one.snapshot: one.id for one in running if one.kind == CREATE}
        oldest = min((datetime.fromisoformat(one.began_at) for one in running), default=None)
        if len(running) < len(self._report.open_operations):
            # Of one nothing is known but that it has no outcome.
            oldest = datetime.min.replace(tzinfo=UTC)
        margin = timedelta(seconds=UNNAMED_SECONDS)
        for one in leftovers:
            top, _, rest = one.key.partition("/")
            snapshot = rest.partition("/")[0] if top == SNAPSHOTS else ""
            if one.key and (
                place_of(snapshot, one.key) is None if snapshot else top not in (OPERATIONS, PROBES, *STAYING)
            ):
                self._report.unknown.append(f"{one.key} (unfinished)")
                continue
            verdict, since = GarbageVerdict(GarbageReason.LEFT_OVER), one.began_at
            if snapshot in snapshots:
                verdict = GarbageVerdict(GarbageReason.OPEN, f"operation {snapshots[snapshot]} has no outcome")
            elif not snapshot:
                # Whose it is it does not say, or it is small and takes no time at all.
                since += margin
                if oldest and one.began_at + margin >= oldest:
                    verdict = GarbageVerdict(GarbageReason.OPEN, "an operation without an outcome may be writing it")
            self._sort(Garbage(Kind.UNFINISHED, verdict.why, (), snapshot, leftover=one), verdict, since)

    def _sort(self, found: Garbage, verdict: GarbageVerdict, since: datetime) -> None:
        if verdict.why.is_garbage and since > self._now - timedelta(seconds=self._report.grace_seconds):
            verdict = GarbageVerdict(GarbageReason.YOUNG)
        if verdict.why.is_garbage:
            self._report.garbage.append(found)
            return
        for size in found.sizes:
            self._report.keep(found.snapshot, verdict, size)

    def _called(self, key: str) -> str:
        return key if self._store.exists(key) else f"{key}/"


def remove_garbage(store: ObjectStore, report: GcReport, progress: Progress) -> None:
    """Remove the report's garbage, a bounded number at a time; what the store refuses is added to the report."""
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
    """The sizes of what went, and what was refused: the rest of that one stays then."""
    gone: list[int] = []
    key = ""
    try:
        for one in garbage.objects:
            key = one.key
            store.delete(key)
            gone.append(one.size)
        if garbage.leftover:
            key = garbage.leftover.key or garbage.leftover.id
            store.abandon(garbage.leftover)
            gone.append(garbage.leftover.size_bytes)
    except DeletionRefusedError as error:
        return gone, RefusedRemoval(key, error.message)
    return gone, None
