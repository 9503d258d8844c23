"""Tables and enumerations that fit the terminal: what has no room beside the rest goes on lines below its row.

One rule for all of them. In a pipe each row is one line with every column in full, whatever the terminal: grep and awk
read it. Where a terminal is too narrow for that,

1. cells have their shorter text; columns without a value are left out, and those of figures that `show` has as well;
2. what is long does not widen its column: in the first column it stands on a line of its own, elsewhere below its row;
3. in the order of their importance, the columns stay that fit, and the values of the others go below their row.

A value below its row has the title of its column. Lines are broken between values, and between words only where one
value is longer than a line. No value is cut off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cutline.cli.output.characters import writable
from cutline.cli.output.format import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

GAP, INDENT = "  ", "    "
# The share of the terminal's width that a cell may take beside others, and what it may take of any: a moment.
CELL_SHARE, CELL_MIN = 0.4, 20


class Shorter(NamedTuple):
    """A cell with a shorter text for narrow terminals; `below` is what that lacks: it goes below the row then."""

    text: str
    short: str
    below: str = ""


Cell = str | Shorter


@dataclass(frozen=True, slots=True)
class FittingTable:
    """A table; a row has a cell for each title. `numbers` are the titles of columns that are aligned at the right.

    `important` are titles by importance, the others follow from the left; the first column always stays. `spared` are
    titles of columns that are left out, not put below their rows, where the terminal is too narrow for all.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: Set[str] = frozenset()
    important: Sequence[str] = ()
    spared: Set[str] = frozenset()

    def lines(self, width: int | None, encoding: str | None = None) -> Iterator[str]:
        """The header and the rows in so many characters; None: in a pipe."""
        rows = [[_written(cell, encoding) for cell in row] for row in self.rows]
        whole = [[cell.text for cell in row] for row in rows]
        every = range(len(self.titles))
        if width is None or _width_of(_widths(self.titles, whole, every)) <= width:
            yield from self._aligned(whole, every)
        else:
            yield from self._narrow(rows, width)

    def _narrow(self, rows: Sequence[Sequence[Shorter]], width: int) -> Iterator[str]:
        room = max(int(width * CELL_SHARE), CELL_MIN)
        beside = [[cell.short if cells_of(cell.short) <= room else "" for cell in row] for row in rows]
        shown = self._columns(beside, width)
        header, *lines = self._aligned(beside, shown)
        yield header
        for row, cells, line in zip(rows, beside, lines, strict=True):
            if row[0].short != cells[0]:
                yield row[0].short
            if line:
                yield line
            notes, values = list[str](), list[str]()
            for number, (title, cell) in enumerate(zip(self.titles, row, strict=True)):
                if title in self.spared:
                    continue
                if number == 0 or (number in shown and cells[number] == cell.short):
                    notes += [cell.below] * bool(cell.below)
                else:
                    values += [f"{title} {cell.text}"] * bool(cell.text)
            yield from _packed(notes, width, INDENT, INDENT)
            yield from _packed(values, width, INDENT, INDENT)

    def _columns(self, rows: Sequence[Sequence[str]], width: int) -> list[int]:
        """The columns that stay, from the left: the first, and by importance those that fit beside it."""
        candidates = [
            number
            for number, title in enumerate(self.titles)
            if title not in self.spared and any(row[number] for row in rows)
        ]
        widths = dict(zip(candidates, _widths(self.titles, rows, candidates), strict=True))
        ranks = {title: rank for rank, title in enumerate(self.important)}
        shown = [0]
        for number in sorted(candidates, key=lambda one: (ranks.get(self.titles[one], len(ranks)), one)):
            if number and _width_of([widths.get(one, len(self.titles[one])) for one in (*shown, number)]) <= width:
                shown.append(number)
        return sorted(shown)

    def _aligned(self, rows: Sequence[Sequence[str]], columns: Sequence[int]) -> Iterator[str]:
        widths = _widths(self.titles, rows, columns)
        for row in (self.titles, *rows):
            cells = (
                _padding(row[column], width) + row[column]
                if self.titles[column] in self.numbers
                else row[column] + _padding(row[column], width)
                for column, width in zip(columns, widths, strict=True)
            )
            yield GAP.join(cells).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw it in the terminal's width, with a bold header."""
        yield from _drawn(self.lines(options.max_width, options.encoding), "bold")


@dataclass(frozen=True, slots=True)
class Enumeration:
    """`head: part, part`, one line in a pipe; on a terminal its further lines are indented."""

    head: str
    parts: Sequence[str]

    def lines(self, width: int | None, encoding: str | None = None) -> Iterator[str]:
        """Its lines in so many characters; None: in a pipe."""
        head, *parts = (writable(printable(one), encoding) for one in (self.head, *self.parts))
        yield from _packed(parts, width, f"{head}: ", INDENT)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw it in the terminal's width."""
        yield from _drawn(self.lines(options.max_width, options.encoding), "")


def _written(cell: Cell, encoding: str | None) -> Shorter:
    """The cell as the stream has it, without control characters: its widths are known then."""
    found = cell if isinstance(cell, Shorter) else Shorter(cell, cell)
    return Shorter(*(writable(printable(text), encoding) for text in found))


def _drawn(lines: Iterable[str], style: str) -> Iterator[RenderableType]:
    from rich.text import Text

    for number, line in enumerate(lines):
        yield Text(line, style="" if number else style, overflow="fold")


def _widths(titles: Sequence[str], rows: Sequence[Sequence[str]], columns: Iterable[int]) -> list[int]:
    return [max([cells_of(titles[one]), *(cells_of(row[one]) for row in rows)]) for one in columns]


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _padding(text: str, width: int) -> str:
    return " " * (width - cells_of(text))


def cells_of(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _packed(parts: Sequence[str], width: int | None, first: str, indent: str) -> Iterator[str]:
    """The parts with commas between them; the first line begins with `first`, the others with `indent`."""
    line, is_begun = first, False
    for number, part in enumerate(parts):
        text = f"{part}{',' * (number + 1 < len(parts))}"
        is_long = width is not None and cells_of(indent + text) > width
        for piece in text.split(" ") if is_long else [text]:
            if is_begun and width is not None and cells_of(line) + 1 + cells_of(piece) > width:
                yield line
                line = indent + piece
            else:
                line += " " * is_begun + piece
            is_begun = True
    if is_begun:
        yield line
