"""What a report draws, whether on a page or in a terminal: sections of rows over time, bars and tables. Pure values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


class PartKind(StrEnum):
    """What a part of a bar stands for."""

    AMOUNT = "amount"
    VALID = "valid"
    INCONCLUSIVE = "inconclusive"
    CONFLICTS = "conflicts"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TimeMark:
    """A value at a moment."""

    at: datetime
    value: float


@dataclass(frozen=True, slots=True)
class Shade:
    """A stretch of time that is marked."""

    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class TimeRow:
    """Values over time; `peak` is the text beside the label. If it `is_level`, a value holds until the next mark."""

    label: str
    marks: tuple[TimeMark, ...]
    peak: str
    is_level: bool = False
    shades: tuple[Shade, ...] = ()


@dataclass(frozen=True, slots=True)
class BarPart:
    """A part of a bar, as a share of the section's longest bar."""

    share: float
    kind: PartKind


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of parts, which are at most 1 together, and the text of its value."""

    label: str
    text: str
    parts: tuple[BarPart, ...]


@dataclass(frozen=True, slots=True)
class DataTable:
    """A table: `numbers` are the columns that are numbers. `note` says which rows are left out."""

    caption: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A picture of rows over time or of bars, what there is to say of it, and the tables with its figures."""

    name: str
    title: str
    texts: tuple[str, ...]
    tables: tuple[DataTable, ...]
    rows: tuple[TimeRow, ...] = ()
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """The time that rows are drawn over."""

    begin: datetime
    end: datetime

    def place(self, moment: datetime) -> float:
        """Where a moment is, from 0 to 1; 0 if it has no length."""
        length = (self.end - self.begin).total_seconds()
        return min(max((moment - self.begin).total_seconds() / length, 0.0), 1.0) if length > 0 else 0.0

    def column(self, moment: datetime, count: int) -> int:
        """In which of so many columns a moment is."""
        return min(int(self.place(moment) * count), count - 1)


def extent_of(moments: Iterable[datetime]) -> Extent | None:
    """From the first moment to the last; None if there is none."""
    found = list(moments)
    return Extent(min(found), max(found)) if found else None


def columns_of(row: TimeRow, extent: Extent, count: int) -> list[float | None]:
    """The greatest value in each column, None where there is no mark: so many marks take no more space than columns.

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
    """Which of so many columns are in a shade."""
    shaded = [False] * count
    for shade in row.shades:
        for number in range(extent.column(shade.begin, count), extent.column(shade.end, count) + 1):
            shaded[number] = True
    return shaded


def heights_of(columns: Sequence[float | None]) -> list[float | None]:
    """The values as parts of the greatest; what is below zero, as lags may be, counts as zero."""
    peak = max((one for one in columns if one is not None), default=0.0)
    return [None if one is None else max(one, 0.0) / peak if peak > 0 else 0.0 for one in columns]
