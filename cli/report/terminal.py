"""The sections in a terminal: the same rows and bars by blocks or ASCII, legible without colours, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.output.format import moment_text
from cli.report.drawing import (
    Bar,
    DataTable,
    Extent,
    PartKind,
    Section,
    TimeRow,
    columns_of,
    heights_of,
    shaded_columns,
)
from cli.report.sections import extent_of_points, sections_of
from cli.views.sparkline import stdout_levels
from snapshots.listing.figures import StoreFigures

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

NO_MARK = " "
# What is drawn beside the levels, whose highest is an amount and a valid part of a bar.
SHADED, INCONCLUSIVE, UNKNOWN = "░", "▒", "·"
ASCII_FORMS = {SHADED: "/", INCONCLUSIVE: "~", UNKNOWN: "."}
# In a pipe there is no width to fit; labels take no more than this of a line, and tables no more lines than this.
WIDTH_OF_A_PIPE, LABEL_SHARE, COLUMNS_MIN, TABLE_ROWS_MAX = 100, 0.4, 10, 20


def timeline_levels() -> str:
    """The characters for levels that a timeline on stdout is drawn with."""
    return stdout_levels(SHADED + INCONCLUSIVE + UNKNOWN)


def timeline_of(figures: StoreFigures, levels: str) -> list[str | RenderableType]:
    """All sections, to be drawn in the width of the terminal; in ASCII if the `levels` are."""
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


@dataclass(frozen=True, slots=True)
class _Picture:
    """The rows and bars of a section."""

    section: Section
    extent: Extent | None
    levels: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        width = options.max_width if console.is_terminal else WIDTH_OF_A_PIPE
        rows = self.section.rows if self.extent else ()
        labels = [*(one.label for one in rows), *(one.label for one in self.section.bars)]
        texts = [*(one.peak for one in rows), *(one.text for one in self.section.bars)]
        beside = min(max(map(len, labels), default=0), int(width * LABEL_SHARE))
        columns = max(width - 5 - beside - max(map(len, texts), default=0), COLUMNS_MIN)

        def line(label: str, drawn: str, text: str) -> Text:
            shown = f"  {label[:beside]:{beside}} {drawn} {text}".rstrip()
            # An ellipsis is not ASCII.
            return Text(shown, no_wrap=True, overflow="crop" if self.levels.isascii() else "ellipsis")

        if rows and self.extent:
            drawn = (time_line(one, self.extent, columns, self.levels) for one in rows)
            yield from (line(one.label, shown, one.peak) for one, shown in zip(rows, drawn, strict=True))
            begin, end = moment_text(self.extent.begin), moment_text(self.extent.end)
            yield line("", f"{begin}{end:>{max(columns - len(begin), len(end) + 1)}}", "")
        yield from (line(one.label, bar_line(one, columns, self.levels), one.text) for one in self.section.bars)


def time_line(row: TimeRow, extent: Extent, count: int, levels: str) -> str:
    """A row over time in so many characters; a mark of zero is seen as the lowest one."""
    shade = _fitting(SHADED, levels)
    shaded = shaded_columns(row, extent, count)
    heights = heights_of(columns_of(row, extent, count))
    return "".join(
        (shade if is_shaded else NO_MARK) if height is None else levels[round(height * (len(levels) - 1))]
        for height, is_shaded in zip(heights, shaded, strict=True)
    )


def bar_line(bar: Bar, count: int, levels: str) -> str:
    """A bar in so many characters: what is not nothing is seen."""
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
    """The character, or its ASCII form if the levels are ASCII."""
    return ASCII_FORMS[character] if levels.isascii() else character


@dataclass(frozen=True, slots=True)
class _FittingTable:
    """A table; where the terminal is too narrow for its columns, a paragraph for each row."""

    table: DataTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        titles, rows = self.table.titles, self.table.rows[:TABLE_ROWS_MAX]
        widths = (max(map(len, column)) for column in zip(titles, *rows, strict=True))
        if sum(widths) + len(titles) - 1 > options.max_width:
            for first, *others in rows:
                said = (f"{title} {text}" for title, text in zip(titles[1:], others, strict=True) if text)
                yield Text(f"{first}: {', '.join(said)}")
            return
        drawn = Table(box=None, pad_edge=False)
        for number, title in enumerate(titles):
            drawn.add_column(title, justify="right" if number in self.table.numbers else "left")
        for row in rows:
            drawn.add_row(*row)
        yield drawn


def _table(table: DataTable) -> Iterable[str | RenderableType]:
    more = len(table.rows) - TABLE_ROWS_MAX
    left_out = [f"{more} more rows; all of them with --json"] if more > 0 else []
    return ["", f"{table.caption}:", _FittingTable(table), *left_out] if table.rows else []
