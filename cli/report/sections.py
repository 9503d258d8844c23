"""The sections of a report, for a page or a terminal: rows over time, bars and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from datetime import datetime
from enum import StrEnum
from statistics import median

from msgspec import Struct

from cutline.cli.output.tables import age_text, count_text, moment_text, quantity_text, seconds_text, size_text
from cutline.snapshots.listing.figures import (
    GAP_FACTOR,
    Gap,
    OperationFigures,
    PhaseFigures,
    PointFigures,
    RestorePlace,
    SnapshotFigures,
    StoreFigures,
)
from cutline.snapshots.operations.ended_operations import EndedCheck, newest_covering
from cutline.snapshots.records.documents import shortened
from cutline.snapshots.records.operation_records import CONFLICTS, INCONCLUSIVE, ONE_COPY, VALID, CheckFigures


class PartKind(StrEnum):
    """The meaning of a part of a bar."""

    AMOUNT = "amount"
    VALID = "valid"
    INCONCLUSIVE = "inconclusive"
    CONFLICTS = "conflicts"
    UNKNOWN = "unknown"


class TimeMark(Struct, frozen=True):
    """A value at a point in time."""

    at: datetime
    value: float


class Shade(Struct, frozen=True):
    """A marked period."""

    begin: datetime
    end: datetime


class TimeRow(Struct, frozen=True):
    """Values over time; `peak` is the text next to the label. If `is_level`, a value holds until the next mark."""

    label: str
    marks: tuple[TimeMark, ...]
    peak: str
    is_level: bool = False
    shades: tuple[Shade, ...] = ()


class BarPart(Struct, frozen=True):
    """A part of a bar; `share` is relative to the section's longest bar."""

    share: float
    kind: PartKind


class Bar(Struct, frozen=True):
    """A bar made of parts whose shares add up to at most 1; `text` is its value."""

    label: str
    text: str
    parts: tuple[BarPart, ...]


class DataTable(Struct, frozen=True):
    """A table; `numbers` are the indexes of numeric columns, and `note` says which rows are left out."""

    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    note: str = ""


class Section(Struct, frozen=True):
    """A chart of rows over time or of bars, the sentences about it, and the tables with its figures."""

    name: str
    title: str
    texts: tuple[str, ...]
    tables: tuple[DataTable, ...]
    rows: tuple[TimeRow, ...] = ()
    bars: tuple[Bar, ...] = ()


class Extent(Struct, frozen=True):
    """The period that rows cover."""

    begin: datetime
    end: datetime

    def place(self, moment: datetime) -> float:
        """Return the position of a time in the period, from 0 to 1; 0 if the period has no length."""
        length = (self.end - self.begin).total_seconds()
        return min(max((moment - self.begin).total_seconds() / length, 0.0), 1.0) if length > 0 else 0.0

    def column(self, moment: datetime, count: int) -> int:
        """Return the index of the column, of `count`, that contains a time."""
        return min(int(self.place(moment) * count), count - 1)


def extent_of(moments: Iterable[datetime]) -> Extent | None:
    """Return the period from the first time to the last; None if there are no times."""
    datetimes = list(moments)
    return Extent(min(datetimes), max(datetimes)) if datetimes else None


def columns_of(row: TimeRow, extent: Extent, count: int) -> list[float | None]:
    """Return the greatest value in each of `count` columns, None where there is no mark.

    A level is carried from its first mark to the end.
    """
    columns: list[float | None] = [None] * count
    last: list[float | None] = [None] * count
    for mark in row.marks:
        column = extent.column(mark.at, count)
        before = columns[column]
        columns[column] = mark.value if before is None else max(before, mark.value)
        last[column] = mark.value
    if row.is_level:
        level: float | None = None
        for number in range(count):
            if columns[number] is None:
                columns[number] = level
            level = last[number] if last[number] is not None else level
    return columns


def shaded_columns(row: TimeRow, extent: Extent, count: int) -> list[bool]:
    """Return whether each of `count` columns is shaded."""
    shaded = [False] * count
    for shade in row.shades:
        for number in range(extent.column(shade.begin, count), extent.column(shade.end, count) + 1):
            shaded[number] = True
    return shaded


def heights_of(columns: Sequence[float | None]) -> list[float | None]:
    """Return the values as fractions of the greatest value; negative values, which lags can have, count as zero."""
    peak = max((column for column in columns if column is not None), default=0.0)
    return [None if column is None else max(column, 0.0) / peak if peak > 0 else 0.0 for column in columns]


# Exit codes of drills.
CODE_FAILED, CODE_INCONCLUSIVE = 1, 4
# The largest number of rows in a chart and in a table. The report mentions the rows that are left out.
ROWS_MAX, TABLE_ROWS_MAX = 12, 1000
MILLISECONDS_MAX = 1.0


def point_sections(figures: StoreFigures) -> list[Section]:
    """Return the sections about restore points, in display order."""
    return [last_good_section(figures), _points(figures), _cuts(figures), _sizes(figures)]


def last_good_section(figures: StoreFigures) -> Section:
    """Return the section that an operator reads first: the last good snapshot, check and drill."""
    point, check, drill = figures.last_good_point, figures.last_good_check, figures.last_good_drill
    newest_check = next(iter(figures.operations.checks), None)
    newest_drill = next(iter(figures.operations.drills), None)
    now = figures.made_at

    def when(moment: datetime) -> str:
        return f"{moment_text(moment)} ({age_text(moment, now=now)})"

    texts = [
        f"Last good snapshot: {point_text(point)}, cut made {when(point.cut_at)}."
        if point
        else "There is no restore point with rows and without known conflicts."
    ]
    texts.append(
        f"Last good check: {check.point.snapshot} at increment {check.point.increment}, ended {when(check.moment)}."
        + (f" {_records_text(check)}" if check.point.rests_on_records else "")
        if check
        else "No check has found a snapshot valid."
    )
    if newest_check and newest_check is not check:
        texts.append(
            f"The newest check, of {newest_check.point.snapshot}, ended {when(newest_check.moment)}:"
            f" {newest_check.point.result}."
        )
    texts.append(
        f"Last good drill: {drill.snapshot} at increment {drill.increment}, ended {when(drill.ended_at)}."
        if drill and drill.ended_at
        else "No drill has passed all of its assertions."
    )
    if newest_drill and newest_drill is not drill and newest_drill.ended_at:
        result = {CODE_FAILED: "an assertion failed", CODE_INCONCLUSIVE: "inconclusive"}.get(newest_drill.code or 0)
        texts.append(
            f"The newest drill, of {newest_drill.snapshot}, ended {when(newest_drill.ended_at)}:"
            f" {result or f'exit code {newest_drill.code}'}."
        )
    return Section("last-good", "Last good", tuple(texts), ())


def _records_text(check: EndedCheck) -> str:
    """Say that a check rests on records, and since when everything has been read."""
    oldest = check.point.oldest_read_at
    since = f"; everything has been read since {moment_text(datetime.fromisoformat(oldest))}" if oldest else ""
    return f"It read what was new, and rests on records of earlier checks for the rest{since}."


def width_text(seconds: float) -> str:
    """Return a short duration in milliseconds, `46.7 ms`, or a longer duration in seconds."""
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < MILLISECONDS_MAX else seconds_text(seconds)


def point_text(point: PointFigures | RestorePlace) -> str:
    """`nightly, increment 3`."""
    return f"{point.snapshot}, {f'increment {point.increment}' if point.increment else 'full'}"


def newest_rows(rows: Sequence[tuple[str, ...]], what: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Return the last rows, newest first, and a sentence about the rows that are left out."""
    shown = tuple(reversed(rows[-TABLE_ROWS_MAX:]))
    if len(shown) == len(rows):
        return shown, ""
    return shown, f"the newest {count_text(len(shown))} of {count_text(len(rows))} {what}; --json lists all"


def _points(figures: StoreFigures) -> Section:
    gaps = figures.gaps
    counted = [point for snapshot in figures.snapshots if snapshot.is_counted for point in snapshot.points]
    shades = tuple(Shade(gap.after.at, gap.until) for gap in gaps.found if gap.before)
    gaps_text = quantity_text(len(gaps.found), "gaps")
    every = TimeRow("all with rows, and gaps", _marks(counted, lambda _: 1.0), gaps_text, shades=shades)
    rows = [every] if counted else []
    shown = _newest(figures.snapshots) if len(figures.snapshots) > 1 or not counted else []
    rows += [
        TimeRow(
            snapshot_figures.name,
            _marks(snapshot_figures.points, lambda _: 1.0),
            f"{len(snapshot_figures.points)}, {snapshot_figures.state}",
        )
        for snapshot_figures in shown
    ]
    newest = max((point.cut_at for point in counted), default=None)
    usual = gaps.median_seconds
    median_text = "unknown: too few spans" if usual is None else seconds_text(usual)
    rule = (
        f"A gap is a span between two consecutive restore points that is longer than {GAP_FACTOR} times the median"
        f" span ({median_text}), or in which a chain ended before the next chain began. Restore points"
        " without rows and broken snapshots do not count."
    )
    since = "; the time since then is a gap" if gaps.found and gaps.found[-1].before is None else ""
    age = f"The newest restore point is from {moment_text(newest)}{since}." if newest else ""
    return Section(
        "points",
        "Restore points and gaps",
        tuple(filter(None, (age, rule, _left_out(figures.snapshots, shown, "snapshots")))),
        (_gap_table(gaps.found), _snapshot_table(figures.snapshots)),
        tuple(rows),
    )


def _gap_table(gaps: Sequence[Gap]) -> DataTable:
    titles = ("after", "since", "before", "until", "length", "why")
    rows = [
        (
            point_text(gap.after),
            moment_text(gap.after.at),
            point_text(gap.before) if gap.before else "now",
            moment_text(gap.until),
            seconds_text(gap.seconds),
            gap.why or "longer than usual",
        )
        for gap in gaps
    ]
    shown, note = newest_rows(rows, "gaps")
    return DataTable("Gaps", titles, shown, frozenset({4}), note)


def _snapshot_table(snapshots: Iterable[SnapshotFigures]) -> DataTable:
    titles = ("snapshot", "state", "restore points", "first cut", "newest cut", "remark")
    rows = [
        (
            snapshot.name,
            snapshot.state + (", without rows" if snapshot.is_only_cut else ""),
            count_text(len(snapshot.points)),
            moment_text(snapshot.points[0].cut_at) if snapshot.points else "",
            moment_text(snapshot.points[-1].cut_at) if snapshot.points else "",
            shortened(snapshot.remark),
        )
        for snapshot in snapshots
    ]
    shown, note = newest_rows(sorted(rows, key=lambda row: (row[4], row[0])), "snapshots")
    return DataTable("Snapshots", titles, shown, frozenset({2}), note)


def _cuts(figures: StoreFigures) -> Section:
    points = figures.points
    widths = [point.cut_seconds for point in points]
    rows = (
        _row("width of the cut", points, lambda point_figures: point_figures.cut_seconds, width_text),
        _row("in flight", points, lambda point_figures: point_figures.in_flight, count_text),
        _row("of these included early", points, lambda point_figures: point_figures.included_early, count_text),
    )
    titles = (
        "restore point",
        "cut made",
        "width",
        "in flight",
        "included early",
        "global transactions",
        "attempts",
        "why retried",
        "comment",
    )
    cells = [
        (
            point_text(point) + (", terminal" if point.is_terminal else ""),
            moment_text(point.cut_at),
            width_text(point.cut_seconds),
            count_text(point.in_flight),
            count_text(point.included_early),
            count_text(point.global_transactions),
            count_text(point.attempts),
            shortened("; ".join(point.causes)),
            shortened(point.comment),
        )
        for point in points
    ]
    shown, note = newest_rows(cells, "cuts")
    texts = [
        'The width of a cut is the time from its first start marker to its last finish marker. "In flight" counts the'
        " global transactions that were prepared but not yet committed on all of their nodes."
    ]
    texts += [f"Median width {width_text(median(widths))}, widest {width_text(max(widths))}."] if widths else []
    return Section(
        "cuts",
        "Cuts",
        tuple(texts),
        (DataTable("Cuts", titles, shown, frozenset({2, 3, 4, 5, 6}), note),),
        rows if points else (),
    )


def _sizes(figures: StoreFigures) -> Section:
    snapshots = [snapshot for snapshot in figures.snapshots if snapshot.points]
    shown = _newest(snapshots)
    increments = [point for point in figures.points if point.increment]
    rows = (
        [_row("each increment", increments, lambda point_figures: point_figures.bytes, size_text)] if increments else []
    )
    rows += [
        TimeRow(snapshot_figures.name, _sums(snapshot_figures.points), size_text(snapshot_figures.bytes), is_level=True)
        for snapshot_figures in shown
    ]
    titles = ("snapshot", "size", "full", "increments", "growth per day", "changes", "transactions")
    cells = [
        (
            snapshot.name,
            size_text(snapshot.bytes),
            size_text(snapshot.points[0].bytes),
            size_text(snapshot.bytes - snapshot.points[0].bytes),
            size_text(round(snapshot.growth_bytes_per_day)) if snapshot.growth_bytes_per_day is not None else "",
            count_text(sum(point.changes for point in snapshot.points)),
            count_text(sum(point.transactions for point in snapshot.points)),
        )
        for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.points[-1].cut_at)
    ]
    table, note = newest_rows(cells, "snapshots")
    text = f"Total: {size_text(sum(snapshot.bytes for snapshot in snapshots))} in the objects that the commits list."
    return Section(
        "sizes",
        "Sizes and growth",
        tuple(filter(None, (text, _left_out(snapshots, shown, "snapshots")))),
        (DataTable("Sizes", titles, table, frozenset(range(1, 7)), note), _increment_table(figures.points)),
        tuple(rows),
    )


def _increment_table(points: Sequence[PointFigures]) -> DataTable:
    titles = ("restore point", "cut made", "size", "changes", "transactions", "took")
    cells = [
        (
            point_text(point),
            moment_text(point.cut_at),
            size_text(point.bytes),
            count_text(point.changes),
            count_text(point.transactions),
            seconds_text(point.seconds),
        )
        for point in points
    ]
    shown, note = newest_rows(cells, "restore points")
    return DataTable("Size of each restore point", titles, shown, frozenset({2, 3, 4, 5}), note)


def _newest(snapshots: Sequence[SnapshotFigures]) -> list[SnapshotFigures]:
    return sorted((snapshot for snapshot in snapshots if snapshot.points), key=lambda one: one.points[-1].cut_at)[
        -ROWS_MAX:
    ]


def _left_out(snapshots: Sequence[SnapshotFigures], shown: Sequence[SnapshotFigures], what: str) -> str:
    if not shown or len(shown) == len([snapshot for snapshot in snapshots if snapshot.points]):
        return ""
    return f"The chart shows the newest {len(shown)} of {count_text(len(snapshots))} {what}."


def _marks(points: Iterable[PointFigures], value: Callable[[PointFigures], float]) -> tuple[TimeMark, ...]:
    return tuple(TimeMark(point.cut_at, value(point)) for point in points)


def _sums(points: Iterable[PointFigures]) -> tuple[TimeMark, ...]:
    marks, total = [], 0
    for point in points:
        total += point.bytes
        marks.append(TimeMark(point.cut_at, total))
    return tuple(marks)


def _row(
    label: str, points: Sequence[PointFigures], value: Callable[[PointFigures], float], text: Callable[..., str]
) -> TimeRow:
    marks = _marks(points, value)
    return TimeRow(label, marks, f"at most {text(max(mark.value for mark in marks))}" if marks else "")


class _NodeLags(Struct, frozen=True):
    """The lags of a primary at the cuts that record them, in order, and its idle time at the newest cut."""

    node: str
    marks: tuple[TimeMark, ...]
    idle_seconds: float | None

    @property
    def greatest(self) -> TimeMark:
        return max(self.marks, key=lambda mark: mark.value)


def lag_section(figures: StoreFigures) -> Section:
    """Return the section about the lag of each primary at each cut; the greatest lags come first."""
    points = figures.points
    node_lags = sorted((_lags_of(node, points) for node in figures.nodes), key=lambda lags: -lags.greatest.value)
    rows = [
        TimeRow(lags.node, lags.marks, f"at most {width_text(lags.greatest.value)}") for lags in node_lags[:ROWS_MAX]
    ]
    titles = ("node", "cuts", "newest lag", "median", "greatest", "at the cut of", "idle at the newest cut")
    cells = tuple(
        (
            lags.node,
            count_text(len(lags.marks)),
            width_text(lags.marks[-1].value),
            width_text(median(mark.value for mark in lags.marks)),
            width_text(lags.greatest.value),
            moment_text(lags.greatest.at),
            "" if lags.idle_seconds is None else width_text(lags.idle_seconds),
        )
        for lags in node_lags
    )
    shown, note = newest_rows(cells[::-1], "nodes")
    table = DataTable("Lag of each node", titles, shown, frozenset({1, 2, 3, 4, 6}), note)
    return Section("lag", "Lag of each node", _lag_texts(points, node_lags, rows), (table,), tuple(rows))


def _lag_texts(points: Sequence[PointFigures], found: Sized, rows: Sized) -> tuple[str, ...]:
    texts = [
        "The lag of a primary at a cut is the time since its newest commit before the cut, or since its start marker if"
        " that is later: earlier commits are in the snapshot. Differences between clocks are included."
    ]
    newest = max(points, key=lambda point: point.cut_at, default=None)
    if newest is not None:
        texts.append(
            f"The safe time of the newest cut is {moment_text(newest.safe_at)}: that snapshot contains everything that"
            " any node committed before it."
        )
    if len(found) > len(rows):
        texts.append(f"The chart shows the {len(rows)} of {len(found)} nodes with the greatest lags.")
    return tuple(texts)


def _lags_of(node: str, points: Iterable[PointFigures]) -> _NodeLags:
    lags = [(point.cut_at, point.lags[node]) for point in points if node in point.lags]
    return _NodeLags(node, tuple(TimeMark(at, lag.seconds) for at, lag in lags), lags[-1][1].idle_seconds)


BARS_MAX = 40
COMPARED = ("objects", "bytes", "rows", "changes", "partitions", "transactions")
RESULTS = {
    VALID: PartKind.VALID,
    ONE_COPY: PartKind.VALID,
    INCONCLUSIVE: PartKind.INCONCLUSIVE,
    CONFLICTS: PartKind.CONFLICTS,
    "": PartKind.UNKNOWN,
}


def operation_sections(figures: StoreFigures) -> list[Section]:
    """Return the sections about operations, in display order."""
    return [_phases(figures.operations), _checks(figures)]


def _phases(operations: OperationFigures) -> Section:
    phases = operations.phases
    longest = max((phase.mean_seconds for phase in phases), default=0.0)
    bars = [
        Bar(f"{phase.kind}: {phase.phase}", width_text(phase.mean_seconds), _amount(phase.mean_seconds, longest))
        for phase in phases[:BARS_MAX]
    ]
    texts = ["The mean duration of each phase, over all operations that succeeded.", _read_text(operations)]
    if operations.untimed:
        texts.append(
            f"No phases are recorded for {quantity_text(operations.untimed, 'operations')}, such as deletions and"
            " resumed restores."
        )
    return Section("phases", "Time per phase", tuple(texts), (_phase_table(phases),), bars=tuple(bars))


def _read_text(operations: OperationFigures) -> str:
    if operations.are_all:
        return f"Read from {quantity_text(operations.read, 'ended operations')}: all that concern these snapshots."
    return (
        f"Read from only {quantity_text(operations.read, 'ended operations')}: the newest checks and similar"
        " operations, the newest increments, and the newest others."
    )


def _amount(value: float, longest: float) -> tuple[BarPart, ...]:
    return (BarPart(value / longest, PartKind.AMOUNT),) if longest > 0 else ()


def _phase_table(phases: Iterable[PhaseFigures]) -> DataTable:
    titles = ("operation", "phase", "operations", "mean", "longest")
    rows = tuple(
        (
            phase.kind,
            phase.phase,
            count_text(phase.operations),
            width_text(phase.mean_seconds),
            width_text(phase.longest_seconds),
        )
        for phase in phases
    )
    return DataTable("Time per phase", titles, rows, frozenset({2, 3, 4}))


def _checks(figures: StoreFigures) -> Section:
    checks = figures.operations.checks
    snapshots = sorted(
        (snapshot for snapshot in figures.snapshots if snapshot.points), key=lambda one: one.points[-1].cut_at
    )
    shown = snapshots[-ROWS_MAX:]
    texts = [
        "A check up to an increment also covers all earlier restore points; its conflicts also count for later ones,"
        " which need the same objects. The newest check that was not inconclusive counts, if there is one. Restore"
        " points that no recorded check covers are unknown. A check by records read only what was new, and some of the"
        " rest again; it rests on earlier checks, which have read every object since the time shown.",
        _read_text(figures.operations),
    ]
    if len(shown) < len(snapshots):
        texts.append(f"The chart shows the newest {len(shown)} of {count_text(len(snapshots))} snapshots.")
    return Section(
        "checks",
        "What checks compared and skipped",
        tuple(texts),
        (_check_table(checks), _skipped_table(checks)),
        bars=tuple(_coverage(snapshot_figures, checks) for snapshot_figures in reversed(shown)),
    )


def _coverage(snapshot: SnapshotFigures, checks: Iterable[EndedCheck]) -> Bar:
    count = len(snapshot.points)
    own = [check for check in checks if check.point.snapshot == snapshot.name]
    # A merged chain may begin at an increment.
    covering = newest_covering(own, snapshot.points[-1].increment + 1 if snapshot.points else 0)
    covered_by = [covering[point.increment] for point in snapshot.points]
    results = [check.point.result if check else "" for check in covered_by]
    parts: list[BarPart] = []
    for result in results:
        kind = RESULTS[result]
        share = 1 / count
        if parts and parts[-1].kind == kind:
            parts[-1] = BarPart(parts[-1].share + share, kind)
        else:
            parts.append(BarPart(share, kind))
    named = ((result or PartKind.UNKNOWN.value, results.count(result)) for result in RESULTS)
    text = ", ".join(f"{count_text(number)} {name}" for name, number in named if number)
    return Bar(snapshot.name, text, tuple(parts))


def _check_table(checks: Sequence[EndedCheck]) -> DataTable:
    titles = ("snapshot", "up to", "ended", "result", *COMPARED, "skipped", "conflicts", "all read since")
    shown, note = newest_rows([_check_cells(check) for check in reversed(checks)], "checks")
    return DataTable("Checks", titles, shown, frozenset(range(4, 12)), note)


def _check_cells(check: EndedCheck) -> tuple[str, ...]:
    point = check.point
    up_to = f"increment {point.increment}" if point.increment else "full"
    result = f"{point.result}{' by records' * point.rests_on_records}"
    head = (point.snapshot, up_to, moment_text(check.moment), result)
    since = moment_text(datetime.fromisoformat(point.oldest_read_at)) if point.oldest_read_at else ""
    if not isinstance(figures := point.figures, CheckFigures):
        return (*head, *("" for _ in (*COMPARED, "skipped", "conflicts")), since)
    compared = (_compared_text(name, figures.compared.get(name, 0)) for name in COMPARED)
    return (*head, *compared, count_text(figures.skipped), count_text(figures.conflicts), since)


def _compared_text(name: str, amount: int) -> str:
    return size_text(amount) if name == "bytes" else count_text(amount)


def _skipped_table(checks: Sequence[EndedCheck]) -> DataTable:
    newest: dict[str, EndedCheck] = {}
    for check in checks:
        newest.setdefault(check.point.snapshot, check)
    rows: list[tuple[str, ...]] = []
    more = 0
    for check in newest.values():
        if isinstance(figures := check.point.figures, CheckFigures):
            ended = moment_text(check.moment)
            rows += [(check.point.snapshot, ended, skipped.what, skipped.why) for skipped in figures.examples]
            more += figures.skipped - len(figures.examples)
    shown, note = newest_rows(rows[::-1], "parts")
    note = "; ".join(filter(None, (note, f"{count_text(more)} more were skipped" if more else "")))
    titles = ("snapshot", "ended", "what", "why")
    return DataTable("Skipped by the newest check of each snapshot", titles, shown, note=note)


def sections_of(figures: StoreFigures) -> list[Section]:
    """Return all sections."""
    return [*point_sections(figures), *operation_sections(figures), lag_section(figures)]


def counts_text(figures: StoreFigures) -> str:
    """`1 snapshot, 3 restore points`."""
    return (
        f"{quantity_text(len(figures.snapshots), 'snapshots')}, {quantity_text(len(figures.points), 'restore points')}"
    )


def extent_of_points(figures: StoreFigures) -> Extent | None:
    """Return the period from the first cut to the newest; None if there are no cuts."""
    return extent_of(point.cut_at for point in figures.points)
