"""The sections of restore points: where they are and where gaps are, their cuts, their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from cutline.cli.output.format import count_text, moment_text, quantity_text, seconds_text, size_text
from cutline.cli.report.drawing import DataTable, Section, Shade, TimeMark, TimeRow
from cutline.snapshots.listing.figures import PointFigures, SnapshotFigures, StoreFigures
from cutline.snapshots.listing.gaps import GAP_FACTOR, Gap, RestorePlace
from cutline.snapshots.records.documents import shortened

# A picture has so many rows, a table so many: what is left out is said.
ROWS_MAX, TABLE_ROWS_MAX = 12, 1000
MILLISECONDS_MAX = 1.0


def point_sections(figures: StoreFigures) -> list[Section]:
    """The sections, in the order in which they are shown."""
    return [_points(figures), _cuts(figures), _sizes(figures)]


def width_text(seconds: float) -> str:
    """A short time: `46.7 ms`, or in seconds."""
    return f"{seconds * 1000:.1f} ms" if abs(seconds) < MILLISECONDS_MAX else seconds_text(seconds)


def point_text(point: PointFigures | RestorePlace) -> str:
    """`nightly, increment 3`."""
    return f"{point.snapshot}, {f'increment {point.increment}' if point.increment else 'full'}"


def newest_rows(rows: Sequence[tuple[str, ...]], what: str) -> tuple[tuple[tuple[str, ...], ...], str]:
    """The last rows, the newest first, and what is to be said of the others."""
    shown = tuple(reversed(rows[-TABLE_ROWS_MAX:]))
    if len(shown) == len(rows):
        return shown, ""
    return shown, f"the newest {count_text(len(shown))} of {count_text(len(rows))} {what}; --json has all of them"


def _points(figures: StoreFigures) -> Section:
    gaps = figures.gaps
    counted = [point for one in figures.snapshots if one.is_counted for point in one.points]
    shades = tuple(Shade(gap.after.at, gap.until) for gap in gaps.found if gap.before)
    gaps_text = quantity_text(len(gaps.found), "gaps")
    every = TimeRow("all with rows, and gaps", _marks(counted, lambda _: 1.0), gaps_text, shades=shades)
    rows = [every] if counted else []
    shown = _newest(figures.snapshots) if len(figures.snapshots) > 1 or not counted else []
    rows += [TimeRow(one.name, _marks(one.points, lambda _: 1.0), f"{len(one.points)}, {one.state}") for one in shown]
    newest = max((point.cut_at for point in counted), default=None)
    usual = gaps.median_seconds
    median_text = "there are too few spans for one" if usual is None else seconds_text(usual)
    rule = (
        f"A gap is a span between two neighbouring restore points that is longer than {GAP_FACTOR} times the median"
        f" span ({median_text}), or in which a chain was lost or ended before the next one began; restore points"
        " without rows and broken snapshots do not count."
    )
    since = "; the time since then is a gap" if gaps.found and gaps.found[-1].before is None else ""
    age = f"The newest restore point is of {moment_text(newest)}{since}." if newest else ""
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
            point_text(gap.after), moment_text(gap.after.at), point_text(gap.before) if gap.before else "now",
            moment_text(gap.until), seconds_text(gap.seconds), gap.why or "longer than usual",
        )
        for gap in gaps
    ]  # fmt: skip
    shown, note = newest_rows(rows, "gaps")
    return DataTable("Gaps", titles, shown, frozenset({4}), note)


def _snapshot_table(snapshots: Iterable[SnapshotFigures]) -> DataTable:
    titles = ("snapshot", "state", "restore points", "first cut", "newest cut", "remark")
    rows = [
        (
            one.name, one.state + (", without rows" if one.is_only_cut else ""), count_text(len(one.points)),
            moment_text(one.points[0].cut_at) if one.points else "",
            moment_text(one.points[-1].cut_at) if one.points else "", shortened(one.remark),
        )
        for one in snapshots
    ]  # fmt: skip
    shown, note = newest_rows(sorted(rows, key=lambda row: (row[4], row[0])), "snapshots")
    return DataTable("Snapshots", titles, shown, frozenset({2}), note)


def _cuts(figures: StoreFigures) -> Section:
    points = figures.points
    widths = [one.cut_seconds for one in points]
    rows = (
        _row("width of the cut", points, lambda one: one.cut_seconds, width_text),
        _row("in flight", points, lambda one: one.in_flight, count_text),
        _row("of these included early", points, lambda one: one.included_early, count_text),
    )
    titles = (
        "restore point", "cut made", "width", "in flight", "included early", "global transactions", "attempts",
        "why tried again", "comment",
    )  # fmt: skip
    cells = [
        (
            point_text(one) + (", terminal" if one.is_terminal else ""),
            moment_text(one.cut_at) + ("" if one.is_cut_timed else " (put)"), width_text(one.cut_seconds),
            count_text(one.in_flight), count_text(one.included_early), count_text(one.global_transactions),
            count_text(one.attempts), shortened("; ".join(one.causes)), shortened(one.comment),
        )
        for one in points
    ]  # fmt: skip
    shown, note = newest_rows(cells, "cuts")
    untimed = sum(not one.is_cut_timed for one in points)
    texts = [
        "The width of a cut is the time from its first start marker to its last finish marker; in flight are the global"
        " transactions that were prepared, but not committed on all of their nodes."
    ]
    texts += [f"Median width {width_text(median(widths))}, widest {width_text(max(widths))}."] if widths else []
    if untimed:
        texts.append(
            f"{count_text(untimed)} early commits do not say when their cut was made: they are where they were put."
        )
    return Section(
        "cuts",
        "Cuts",
        tuple(texts),
        (DataTable("Cuts", titles, shown, frozenset({2, 3, 4, 5, 6}), note),),
        rows if points else (),
    )


def _sizes(figures: StoreFigures) -> Section:
    snapshots = [one for one in figures.snapshots if one.points]
    shown = _newest(snapshots)
    increments = [point for point in figures.points if point.increment]
    rows = [_row("each increment", increments, lambda one: one.bytes, size_text)] if increments else []
    rows += [TimeRow(one.name, _sums(one.points), size_text(one.bytes), is_level=True) for one in shown]
    titles = ("snapshot", "size", "full", "increments", "growth in a day", "changes", "transactions")
    cells = [
        (
            one.name, size_text(one.bytes), size_text(one.points[0].bytes),
            size_text(one.bytes - one.points[0].bytes),
            size_text(round(one.growth_bytes_per_day)) if one.growth_bytes_per_day is not None else "",
            count_text(sum(point.changes for point in one.points)),
            count_text(sum(point.transactions for point in one.points)),
        )
        for one in sorted(snapshots, key=lambda one: one.points[-1].cut_at)
    ]  # fmt: skip
    table, note = newest_rows(cells, "snapshots")
    text = f"All together {size_text(sum(one.bytes for one in snapshots))}: what their commits list."
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
            point_text(one), moment_text(one.cut_at), size_text(one.bytes), count_text(one.changes),
            count_text(one.transactions), seconds_text(one.seconds),
        )
        for one in points
    ]  # fmt: skip
    shown, note = newest_rows(cells, "restore points")
    return DataTable("Size of each restore point", titles, shown, frozenset({2, 3, 4, 5}), note)


def _newest(snapshots: Sequence[SnapshotFigures]) -> list[SnapshotFigures]:
    """As many of the newest snapshots as a picture has rows, in the order of their newest cuts."""
    return sorted((one for one in snapshots if one.points), key=lambda one: one.points[-1].cut_at)[-ROWS_MAX:]


def _left_out(snapshots: Sequence[SnapshotFigures], shown: Sequence[SnapshotFigures], what: str) -> str:
    if not shown or len(shown) == len([one for one in snapshots if one.points]):
        return ""
    return f"The picture has the newest {len(shown)} of {count_text(len(snapshots))} {what}."


def _marks(points: Iterable[PointFigures], value: Callable[[PointFigures], float]) -> tuple[TimeMark, ...]:
    return tuple(TimeMark(one.cut_at, value(one)) for one in points)


def _sums(points: Iterable[PointFigures]) -> tuple[TimeMark, ...]:
    marks, total = [], 0
    for one in points:
        total += one.bytes
        marks.append(TimeMark(one.cut_at, total))
    return tuple(marks)


def _row(
    label: str, points: Sequence[PointFigures], value: Callable[[PointFigures], float], text: Callable[..., str]
) -> TimeRow:
    marks = _marks(points, value)
    return TimeRow(label, marks, f"at most {text(max(mark.value for mark in marks))}" if marks else "")
