"""The section of nodes: how far each primary was behind each cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from statistics import median

from cutline.cli.output.format import count_text, moment_text, quantity_text
from cutline.cli.report.drawing import DataTable, Section, TimeMark, TimeRow
from cutline.cli.report.point_sections import ROWS_MAX, newest_rows, width_text
from cutline.snapshots.listing.figures import PointFigures, StoreFigures


@dataclass(frozen=True, slots=True)
class _NodeLags:
    """The lags of one primary at the cuts that say them, in order, and for how long it was idle at the newest."""

    node: str
    marks: tuple[TimeMark, ...]
    idle_seconds: float | None

    @property
    def greatest(self) -> TimeMark:
        return max(self.marks, key=lambda one: one.value)


def lag_section(figures: StoreFigures) -> Section:
    """The lag of each primary at each cut, those with the greatest first."""
    points = figures.points
    found = sorted((_lags_of(node, points) for node in figures.nodes), key=lambda one: -one.greatest.value)
    rows = [TimeRow(one.node, one.marks, f"at most {width_text(one.greatest.value)}") for one in found[:ROWS_MAX]]
    titles = ("node", "cuts", "lag at the newest", "median", "greatest", "at the cut of", "idle at the newest for")
    cells = tuple(
        (
            one.node, count_text(len(one.marks)), width_text(one.marks[-1].value),
            width_text(median(mark.value for mark in one.marks)), width_text(one.greatest.value),
            moment_text(one.greatest.at), "" if one.idle_seconds is None else width_text(one.idle_seconds),
        )
        for one in found
    )  # fmt: skip
    shown, note = newest_rows(cells[::-1], "nodes")
    table = DataTable("Lag of each node", titles, shown, frozenset({1, 2, 3, 4, 6}), note)
    return Section("lag", "Lag of each node", _lag_texts(points, found, rows), (table,), tuple(rows))


def _lag_texts(points: Sequence[PointFigures], found: Sized, rows: Sized) -> tuple[str, ...]:
    texts = [
        "The lag of a primary is the time from its newest commit before a cut, or from its start marker if that is"
        " later, to the cut: what it had committed before is in the snapshot. Differences of clocks are in it, too."
    ]
    lacking = sum(not one.lags for one in points)
    if lacking:
        texts.append(
            f"{count_text(lacking)} of {quantity_text(len(points), 'commits')} do not say when nodes last committed:"
            " earlier versions did not record it. They have no lag here, which is not a lag of zero."
        )
    safe = max((one for one in points if one.safe_at), key=lambda one: one.cut_at, default=None)
    if safe is not None and safe.safe_at is not None:
        texts.append(
            f"The safe time of the newest cut that has one is {moment_text(safe.safe_at)}: what any node committed"
            " before it is in that snapshot."
        )
    if len(found) > len(rows):
        texts.append(f"The picture has the {len(rows)} nodes of {len(found)} with the greatest lags.")
    return tuple(texts)


def _lags_of(node: str, points: Iterable[PointFigures]) -> _NodeLags:
    found = [(one.cut_at, one.lags[node]) for one in points if node in one.lags]
    return _NodeLags(node, tuple(TimeMark(at, lag.seconds) for at, lag in found), found[-1][1].idle_seconds)
