"""The sections in a terminal: the same rows and bars by block characters, legible without colours, and their tables."""

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
from snapshots.listing.figures import StoreFigures

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

BLOCKS = "▁▂▃▄▅▆▇█"
NO_MARK, SHADED = " ", "░"
PARTS = {
    PartKind.AMOUNT: "█",
    PartKind.VALID: "█",
    PartKind.INCONCLUSIVE: "▒",
    PartKind.CONFLICTS: "X",
    PartKind.UNKNOWN: "·",
}
# In a pipe there is no width to fit; labels take no more than this of a line, and tables no more lines than this.
WIDTH_OF_A_PIPE, LABEL_SHARE, COLUMNS_MIN, TABLE_ROWS_MAX = 100, 0.4, 10, 20


def timeline_of(figures: StoreFigures) -> list[str | RenderableType]:
    """All sections, to be drawn in the width of the terminal."""
    from rich.padding import Padding
    from rich.text import Text

    extent = extent_of_points(figures)
    lines: list[str | RenderableType] = []
    for section in sections_of(figures):
        texts = (Padding(Text(text), (0, 0, 0, 2), expand=False) for text in section.texts)
        lines += ["", section.title, *texts, _Picture(section, extent)]
        for table in section.tables:
            lines += _table(table)
    return lines[1:]


@dataclass(frozen=True, slots=True)
class _Picture:
    """The rows and bars of a section."""

    section: Section
    extent: Extent | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        width = options.max_width if console.is_terminal else WIDTH_OF_A_PIPE
        rows = self.section.rows if self.extent else ()
        labels = [*(one.label for one in rows), *(one.label for one in self.section.bars)]
        texts = [*(one.peak for one in rows), *(one.text for one in self.section.bars)]
        beside = min(max(map(len, labels), default=0), int(width * LABEL_SHARE))
        columns = max(width - 5 - beside - max(map(len, texts), default=0), COLUMNS_MIN)

        def line(label: str, drawn: str, text: str) -> Text:
            return Text(f"  {label[:beside]:{beside}} {drawn} {text}".rstrip(), no_wrap=True, overflow="ellipsis")

        if rows and self.extent:
            yield from (line(one.label, time_line(one, self.extent, columns), one.peak) for one in rows)
            begin, end = moment_text(self.extent.begin), moment_text(self.extent.end)
            yield line("", f"{begin}{end:>{max(columns - len(begin), len(end) + 1)}}", "")
        yield from (line(one.label, bar_line(one, columns), one.text) for one in self.section.bars)


def time_line(row: TimeRow, extent: Extent, count: int) -> str:
    """A row over time in so many characters; a mark of zero is seen as the lowest one."""
    shaded = shaded_columns(row, extent, count)
    heights = heights_of(columns_of(row, extent, count))
    return "".join(
        (SHADED if is_shaded else NO_MARK) if height is None else BLOCKS[round(height * (len(BLOCKS) - 1))]
        for height, is_shaded in zip(heights, shaded, strict=True)
    )


def bar_line(bar: Bar, count: int) -> str:
    """A bar in so many characters: what is not nothing is seen."""
    drawn, share = "", 0.0
    for part in bar.parts:
        share += part.share
        drawn += PARTS[part.kind] * max(round(share * count) - len(drawn), 1)
    return f"{drawn[:count]:{count}}"


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
    left_out = [f"… {more} more rows; all of them with --json"] if more > 0 else []
    return ["", f"{table.caption}:", _FittingTable(table), *left_out] if table.rows else []
