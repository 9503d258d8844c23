"""The sections in a terminal: rows and bars drawn with blocks or ASCII, legible without colours, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from cutline.cli.output.tables import FittingTable, cells_of, minute_text, moment_text, printable, stdout_levels
from cutline.cli.process.streams import FORMS, writable
from cutline.cli.report.sections import (
    Bar,
    DataTable,
    Extent,
    PartKind,
    Section,
    TimeRow,
    columns_of,
    extent_of_points,
    heights_of,
    sections_of,
    shaded_columns,
)
from cutline.snapshots.listing.figures import StoreFigures

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

NO_MARK = " "
# Drawn in addition to the levels. Amounts and the valid part of a bar are drawn with the highest level.
SHADED, INCONCLUSIVE, UNKNOWN = "░", "▒", "·"
# The width in a pipe, the largest share of a line for labels, the minimum width of a drawing, and the maximum number of
# rows in a table.
WIDTH_OF_A_PIPE, LABEL_SHARE, COLUMNS_MIN, TABLE_ROWS_MAX = 100, 0.4, 10, 20


def timeline_levels() -> str:
    """Return the characters for the levels of a timeline on stdout."""
    return stdout_levels(SHADED + INCONCLUSIVE + UNKNOWN)


def timeline_of(figures: StoreFigures, levels: str) -> list[str | RenderableType]:
    """Return all sections, to be drawn at the terminal's width, and in ASCII if `levels` is ASCII."""
    from rich.padding import Padding
    from rich.text import Text

    extent = extent_of_points(figures)
    lines: list[str | RenderableType] = []
    for section in sections_of(figures):
        texts = (Padding(Text(text), (0, 0, 0, 2), expand=False) for text in section.texts)
        lines += ["", section.title, *texts, _Picture(section, extent, levels)]
        for table in section.tables:
            lines += _table(table)
    return lines[1:]


class _Picture(Struct, frozen=True):
    section: Section
    extent: Extent | None
    levels: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        width = options.max_width if console.is_terminal else WIDTH_OF_A_PIPE
        rows = self.section.rows if self.extent else ()
        labels = [*(row.label for row in rows), *(bar.label for bar in self.section.bars)]
        texts = [*(row.peak for row in rows), *(bar.text for bar in self.section.bars)]
        beside = min(max(map(cells_of, labels), default=0), int(width * LABEL_SHARE))
        columns = max(width - 5 - beside - max(map(cells_of, texts), default=0), COLUMNS_MIN)

        def lines(label: str, drawn: str, text: str) -> Iterator[Text]:
            label, text = (writable(printable(part), options.encoding) for part in (label, text))
            if cells_of(label) > beside:
                yield Text(f"  {label}", overflow="fold")
                label = ""
            shown = f"  {label}{' ' * (beside - cells_of(label))} {drawn}"
            if text and cells_of(shown) + 1 + cells_of(text) > width:
                yield Text(shown.rstrip(), overflow="fold")
                yield Text(f"  {text}", overflow="fold")
            else:
                yield Text(f"{shown} {text}".rstrip(), overflow="fold")

        if rows and self.extent:
            for row in rows:
                yield from lines(row.label, time_line(row, self.extent, columns, self.levels), row.peak)
            yield from (Text(axi) for axi in _axis(self.extent, beside + 3, columns, width))
        for bar in self.section.bars:
            yield from lines(bar.label, bar_line(bar, columns, self.levels), bar.text)


def _axis(extent: Extent, margin: int, columns: int, width: int) -> Iterator[str]:
    """Yield the first and last time, below `columns`.

    On a narrow axis, omit the seconds, or use a line for each time.
    """
    for text in (moment_text, minute_text):
        begin, end = text(extent.begin), text(extent.end)
        line = f"{begin}{end:>{max(columns - len(begin), len(end) + 1)}}"
        if margin + len(line) <= width:
            yield " " * margin + line
            return
    for moment in (begin, end):
        yield f"{moment:>{min(width, margin + columns)}}"


def time_line(row: TimeRow, extent: Extent, count: int, levels: str) -> str:
    """Draw a row over time in `count` characters; a mark of zero is visible as the lowest level."""
    shade = _fitting(SHADED, levels)
    shaded = shaded_columns(row, extent, count)
    heights = heights_of(columns_of(row, extent, count))
    return "".join(
        (shade if is_shaded else NO_MARK) if height is None else levels[round(height * (len(levels) - 1))]
        for height, is_shaded in zip(heights, shaded, strict=True)
    )


def bar_line(bar: Bar, count: int, levels: str) -> str:
    """Draw a bar in `count` characters; a part greater than zero is always visible."""
    parts = {
        PartKind.AMOUNT: levels[-1],
        PartKind.VALID: levels[-1],
        PartKind.INCONCLUSIVE: _fitting(INCONCLUSIVE, levels),
        PartKind.CONFLICTS: "X",
        PartKind.UNKNOWN: _fitting(UNKNOWN, levels),
    }
    drawn, share = "", 0.0
    for part in bar.parts:
        share += part.share
        drawn += parts[part.kind] * max(round(share * count) - len(drawn), 1)
    return f"{drawn[:count]:{count}}"


def _fitting(character: str, levels: str) -> str:
    return FORMS[character] if levels.isascii() else character


def _table(table: DataTable) -> Iterable[str | RenderableType]:
    more = len(table.rows) - TABLE_ROWS_MAX
    left_out = [f"{more} more rows; --json lists all"] if more > 0 else []
    numbers = {table.titles[number] for number in table.numbers}
    drawn = FittingTable(table.titles, table.rows[:TABLE_ROWS_MAX], numbers)
    return ["", f"{table.caption}:", drawn, *left_out] if table.rows else []
