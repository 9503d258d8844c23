"""Figures for snapshots and operations over time, as drawn by `report` and `show --timeline`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from itertools import chain, pairwise
from statistics import median

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.snapshots.listing.listing import BROKEN, ENDED, Entry, SnapshotDetails, read_entry
from cutline.snapshots.operations.ended_operations import (
    DRILL,
    Ended,
    EndedCheck,
    checks_of,
    list_ended,
    newest_covering,
    operation_kind,
    read_batches,
)
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import CONFLICTS, PASSED
from cutline.snapshots.records.proven_chains import SnapshotMissingError, cut_time, read_chain, snapshot_names
from cutline.snapshots.records.store_identity import StoreIdentity, read_identity
from cutline.snapshots.records.tombstones import check_not_deleted
from cutline.storage.store import ObjectStore
from cutline.wal.cut.safe_time import node_time

# A span is a gap if it is longer than GAP_FACTOR times the median of at least SPANS_MIN spans.
GAP_FACTOR, SPANS_MIN = 3, 3


class RestorePlace(Struct, frozen=True):
    """A possible target of a restore: a commit, and the time of its cut.

    `ended` is the reason why the chain can't be continued after this commit; "" if it can.
    """

    snapshot: str
    increment: int
    at: datetime
    ended: str = ""


class Gap(Struct, frozen=True):
    """A span without a restore point, between two restore points or until now; `why` is "" if it is merely long."""

    after: RestorePlace
    before: RestorePlace | None
    until: datetime
    why: str

    @property
    def seconds(self) -> float:
        """The length of the gap."""
        return (self.until - self.after.at).total_seconds()


class Gaps(Struct, frozen=True):
    """The gaps, oldest first, and the median span in seconds, which is None if there are too few spans."""

    median_seconds: float | None
    found: tuple[Gap, ...]

    @property
    def limit_seconds(self) -> float | None:
        """The length above which a span is a gap."""
        return None if self.median_seconds is None else GAP_FACTOR * self.median_seconds


def find_gaps(places: Iterable[RestorePlace], now: datetime) -> Gaps:
    """Find the spans between adjacent restore points that are longer than usual or contain the end of a chain.

    The span from the newest restore point to `now` may be a gap, but doesn't count toward the median, because it is
    still growing.
    """
    ordered = sorted(places, key=lambda place: (place.at, place.snapshot, place.increment))
    pairs = list(pairwise(ordered))
    spans = [(before.at - after.at).total_seconds() for after, before in pairs]
    usual = median(spans) if len(spans) >= SPANS_MIN else None
    candidates = [Gap(after, before, before.at, after.ended) for after, before in pairs]
    candidates += [Gap(newest, None, now, newest.ended) for newest in ordered[-1:]]
    gaps = Gaps(usual, ())
    limit = gaps.limit_seconds
    return Gaps(
        usual,
        tuple(
            candidate for candidate in candidates if candidate.why or (limit is not None and candidate.seconds > limit)
        ),
    )


# OPERATIONS_MAX limits how many of the newest operations without an intent (checks, gc, prunes) are read, and how many
# of those with an intent that have committed no increment. Each takes one or two reads. A watch takes thousands of
# increments between two checks, so only the newest INCREMENTS_MAX are read as a sample.
OPERATIONS_MAX, INCREMENTS_MAX = 1000, 200


class PhaseFigures(Struct, frozen=True):
    """The duration of a phase, over all operations of a kind that went through it."""

    kind: str
    phase: str
    operations: int
    mean_seconds: float
    longest_seconds: float


class OperationFigures(Struct, frozen=True):
    """Figures from `read` operations. `are_all` is set if they include every operation that counts.

    `untimed` counts the completed operations without recorded phases. `checks` and `drills` are the ones that ended
    with a result, newest first.
    """

    read: int = 0
    are_all: bool = True
    untimed: int = 0
    phases: tuple[PhaseFigures, ...] = ()
    checks: tuple[EndedCheck, ...] = ()
    drills: tuple[Ended, ...] = ()


def read_operation_figures(
    store: ObjectStore,
    snapshot: str | None = None,
    *,
    increments: Collection[str] = (),
    others: Collection[str] = (),
) -> OperationFigures:
    """Read the newest operations that have ended, and collect the figures for `snapshot`, or for all snapshots.

    `increments` are the ids of operations that committed increments (with `snapshot`, only its own). `others` are the
    ids of operations that committed increments of other snapshots, which are not read.
    """
    documents, own, not_read = document_names(store), frozenset(increments), frozenset(others)
    with_intent = [operation for operation in list_ended(documents, has_intent=True) if operation not in not_read]
    classes = (
        (OPERATIONS_MAX, list_ended(documents, has_intent=False)),
        (OPERATIONS_MAX, [operation for operation in with_intent if operation not in own]),
        (INCREMENTS_MAX, [operation for operation in with_intent if operation in own]),
    )
    newest = sorted((operation for count, ids in classes for operation in ids[:count]), reverse=True)
    operations = chain.from_iterable(read_batches(store, documents, newest))
    return collect_operations(operations, snapshot, are_all=all(len(ids) <= count for count, ids in classes))


def collect_operations(
    ended: Iterable[Ended], snapshot: str | None = None, *, are_all: bool = True
) -> OperationFigures:
    """Collect the figures of the operations (newest first) on `snapshot`, or on all snapshots."""
    operations = list(ended)
    own = [
        operation
        for operation in operations
        if operation.outcome and operation.outcome.state == "done" and snapshot in (None, operation.snapshot)
    ]
    timed = [operation for operation in own if operation.phases]
    checks = [
        check for operation in operations for check in checks_of(operation) if snapshot in (None, check.point.snapshot)
    ]
    drills = tuple(operation for operation in own if operation.kind == DRILL and operation.ended_at)
    return OperationFigures(len(operations), are_all, len(own) - len(timed), _phases(timed), tuple(checks), drills)


def _phases(timed: Iterable[Ended]) -> tuple[PhaseFigures, ...]:
    """Return the phases of each kind, in the order they have in the operation with the most phases."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for ended in sorted(timed, key=lambda one: -len(one.phases)):
        of_kind, checked = (
            seconds.setdefault(operation_kind(ended.kind, ended.increment, ended.intent), {}),
            {point.snapshot for point in ended.checked},
        )
        own: dict[str, float] = {}
        for phase, taken in ended.phases.items():
            # A check has a step for each snapshot, named after the snapshot.
            name = "check commits" if phase.removeprefix("check ") in checked else phase
            own[name] = own.get(name, 0.0) + taken
        for name, taken in own.items():
            of_kind.setdefault(name, []).append(taken)
    return tuple(
        PhaseFigures(kind, phase, len(taken), sum(taken) / len(taken), max(taken))
        for kind, phases in sorted(seconds.items())
        for phase, taken in phases.items()
    )


SECONDS_PER_DAY = 86400.0


class NodeLag(Struct, frozen=True):
    """The lag of a primary at a cut: the seconds from the primary's time to the time of the cut.

    The primary's time is the time of its newest commit or of its marker (wal.cut.safe_time). `idle_seconds` is the time
    since its newest commit, None if there was none. Since clocks differ, both may be negative.
    """

    seconds: float
    idle_seconds: float | None


class PointFigures(Struct, frozen=True):
    """The figures of a restore point: its cut, and the amounts that its commit added. `lags` maps primaries to lags."""

    snapshot: str
    increment: int
    operation: str
    cut_at: datetime
    cut_seconds: float
    in_flight: int
    included_early: int
    global_transactions: int
    attempts: int
    causes: tuple[str, ...]
    seconds: float
    bytes: int
    changes: int
    transactions: int
    comment: str
    is_terminal: bool
    safe_at: datetime
    lags: Mapping[str, NodeLag]


class SnapshotFigures(Struct, frozen=True):
    """A snapshot with its restore points in order; for a broken snapshot, only the readable restore points.

    Of a merged chain, the restore points that were given up are left out, and the first has the size of its new base.
    `is_given_up` is set if a command ended the chain, but not if another snapshot replaced it as planned.
    """

    name: str
    state: str
    remark: str
    is_only_cut: bool
    is_given_up: bool
    points: tuple[PointFigures, ...]

    @property
    def bytes(self) -> int:
        """The size of all objects in the chain in bytes."""
        return sum(point.bytes for point in self.points)

    @property
    def growth_bytes_per_day(self) -> float | None:
        """How many bytes increments add per day; None if the first and last cuts are less than a day apart."""
        seconds = (self.points[-1].cut_at - self.points[0].cut_at).total_seconds() if self.points else 0.0
        if seconds < SECONDS_PER_DAY:
            return None
        return sum(one.bytes for one in self.points[1:]) / seconds * SECONDS_PER_DAY

    @property
    def is_counted(self) -> bool:
        """Whether the restore points are considered when finding gaps: the snapshot has rows and is not broken."""
        return not self.is_only_cut and self.state != BROKEN


class StoreFigures(Struct, frozen=True):
    """Figures for some of a store's snapshots, as of `made_at`."""

    fleet: str
    made_at: datetime
    snapshots: tuple[SnapshotFigures, ...]
    gaps: Gaps
    operations: OperationFigures = field(default_factory=OperationFigures)

    @property
    def points(self) -> list[PointFigures]:
        """The restore points in all snapshots, in order of their cuts."""
        figureses = (point for snapshot in self.snapshots for point in snapshot.points)
        return sorted(figureses, key=lambda point: (point.cut_at, point.snapshot, point.increment))

    @property
    def last_good_point(self) -> PointFigures | None:
        """The newest restore point that has rows, in a readable snapshot in which no check found conflicts."""
        good = list[PointFigures]()
        for one in self.snapshots:
            checks = [check for check in self.operations.checks if check.point.snapshot == one.name]
            points = one.points if one.is_counted else ()
            covering = newest_covering(checks, points[-1].increment + 1 if points else 0)
            for point in points:
                check = covering[point.increment]
                if check is None or check.point.result != CONFLICTS:
                    good.append(point)
        return max(good, key=lambda point: (point.cut_at, point.increment), default=None)

    @property
    def last_good_check(self) -> EndedCheck | None:
        """The newest check that found everything valid."""
        return next((one for one in self.operations.checks if one.point.result in PASSED), None)

    @property
    def last_good_drill(self) -> Ended | None:
        """The newest drill whose assertions all held."""
        return next((one for one in self.operations.drills if one.code == 0), None)

    @property
    def nodes(self) -> list[str]:
        """The primaries for which the commits contain lags."""
        return sorted({node for point in self.points for node in point.lags})


def read_figures(fleet: Fleet, name: str | None, now: datetime) -> StoreFigures:
    """Read the figures for the snapshot `name`, or for all snapshots, from commits and outcomes alone.

    An unreadable snapshot is included with its problem. Raises SnapshotMissingError, SnapshotDeletedError.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    names = stored = snapshot_names(store)
    if name is not None:
        check_not_deleted(store, name)
        if name not in stored:
            raise SnapshotMissingError(
                f"there is no snapshot {name}", hint="see: snapshot list", details={"snapshot": name}
            )
        names = [name]
    # Read one chain at a time, because a chain of thousands of commits takes much more memory than its figures.
    entries = (read_entry(store, identity, listed_name, read_chain) for listed_name in names)
    snapshots = [figures_of(entry, entry.chain) for entry in entries if entry is not None]
    others = _increments_of(store, identity, [stored_name for stored_name in stored if stored_name not in names])
    operations = read_operation_figures(store, name, increments=_increments_in(snapshots), others=others)
    return _collect(fleet, now, snapshots, operations)


def read_figures_of(fleet: Fleet, details: SnapshotDetails, now: datetime) -> StoreFigures:
    """Read the figures for a snapshot whose chain has already been read."""
    store, name = fleet.store.open(), details.entry.name
    snapshots = [figures_of(details.entry, details.chain)]
    identity = read_identity(store, fleet)
    others = _increments_of(
        store, identity, [snapshot_name for snapshot_name in snapshot_names(store) if snapshot_name != name]
    )
    operations = read_operation_figures(store, name, increments=_increments_in(snapshots), others=others)
    return _collect(fleet, now, snapshots, operations)


def _increments_in(snapshots: Iterable[SnapshotFigures]) -> list[str]:
    """Return the ids of the operations that committed the increments."""
    return [point.operation for snapshot in snapshots for point in snapshot.points if point.increment]


def _increments_of(store: ObjectStore, identity: StoreIdentity, names: Iterable[str]) -> list[str]:
    """Read the ids of the operations that committed the increments of these snapshots; reads few of their commits."""
    entries = (read_entry(store, identity, name) for name in names)
    return [summary.operation for entry in entries if entry is not None for summary in entry.summaries]


def _collect(
    fleet: Fleet, now: datetime, snapshots: list[SnapshotFigures], operations: OperationFigures
) -> StoreFigures:
    return StoreFigures(fleet.name, now, tuple(snapshots), gaps_of(snapshots, now), operations)


def gaps_of(snapshots: Iterable[SnapshotFigures], now: datetime) -> Gaps:
    """Find the gaps between all restore points that have rows."""
    ends = [
        RestorePlace(
            snapshot.name,
            point.increment,
            point.cut_at,
            snapshot.remark if snapshot.is_given_up and point is snapshot.points[-1] else "",
        )
        for snapshot in snapshots
        if snapshot.is_counted
        for point in snapshot.points
    ]
    return find_gaps(ends, now)


def figures_of(entry: Entry, chain: Chain | None) -> SnapshotFigures:
    """Return the figures for a snapshot; `chain` is its readable part."""
    commits = chain.commits if chain else ()
    points = tuple(_point_of(commit) for commit in commits if commit.increment >= entry.first)
    if entry.base_bytes is not None and points:
        points = (replace(points[0], bytes=entry.base_bytes), *points[1:])
    is_replaced = entry.ended is not None and bool(entry.ended.successor) and not entry.ended.slot_problem
    is_given_up = entry.state == ENDED and entry.ended is not None and not is_replaced
    is_only_cut = chain is not None and chain.full.only_cut
    return SnapshotFigures(entry.name, entry.state, entry.remark, is_only_cut, is_given_up, points)


def _point_of(commit: Commit) -> PointFigures:
    cut, counts = commit.cut, commit.counts
    return PointFigures(
        commit.snapshot,
        commit.increment,
        commit.operation,
        cut_time(commit),
        cut.seconds,
        cut.in_flight,
        cut.included_early,
        cut.global_transactions,
        cut.attempts,
        cut.causes,
        commit.seconds,
        counts["bytes"],
        counts["changes"],
        counts["transactions"],
        commit.comment,
        commit.terminal,
        datetime.fromisoformat(cut.safe_at),
        dict(_lags(commit)),
    )


def _lags(commit: Commit) -> Iterator[tuple[str, NodeLag]]:
    cut_at = cut_time(commit)
    for node in commit.cut.nodes:
        last = node.last_commit_at
        idle_seconds = _seconds_since(last, cut_at) if isinstance(last, str) else None
        yield node.node, NodeLag(_seconds_since(node_time(node), cut_at), idle_seconds)


def _seconds_since(time: str, moment: datetime) -> float:
    return (moment - datetime.fromisoformat(time)).total_seconds()
