"""Numbers, times, tables and enumerations for people, fitted to the terminal.

Pure functions: the current time is an argument.

All tables follow one rule. In a pipe, each row is one line with every column in full, whatever the width of the
terminal, for grep and awk. On a terminal that is too narrow for that,

1. cells use their shorter text; columns without values and columns whose figures `show` also prints are left out;
2. a long value does not widen its column: in the first column it gets its own line, elsewhere it goes below its row;
3. the most important columns that fit stay, and the values in the other columns go below their row.

A value below its row is preceded by the title of its column. Lines break between values; only a value that is longer
than a line breaks between words. No value is truncated.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TextIO

from msgspec import Struct

from cutline.cli.process.streams import ASCII_LEVELS as ASCII
from cutline.cli.process.streams import BLOCKS as BLOCKS
from cutline.cli.process.streams import writable
from cutline.fleet.units import size_text as size_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

# Characters that a terminal does not show, in addition to those in category Cf: fillers and variation selectors
# (Unicode's Default_Ignorable_Code_Point property).
INVISIBLE = re.compile(r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Invisible characters that are part of words and emoji: zero-width joiner and non-joiner, variation selectors.
JOINERS = "\u200c\u200d\ufe0e\ufe0f"
# The scripts whose letters a joiner or a non-joiner changes (The Unicode Standard, 23.2).
JOINING_SCRIPTS = (
    "ARABIC ",
    "BENGALI ",
    "DEVANAGARI ",
    "GUJARATI ",
    "GURMUKHI ",
    "KANNADA ",
    "KHMER ",
    "MALAYALAM ",
    "MONGOLIAN ",
    "MYANMAR ",
    "NKO ",
    "ORIYA ",
    "SINHALA ",
    "SYRIAC ",
    "TAMIL ",
    "TELUGU ",
    "TIBETAN ",
)
# The texts that precede a command in a message; in a hint, a command may also begin a line. `demo` has its own fleets,
# and help does not need a fleet.
LEADS = r": |; |\(| {3}|then |or |as "
COMMAND_NAMES = (
    "init",
    "create",
    "restore",
    "restore-resume",
    "restore-abandon",
    "restore-discard",
    "drill",
    "check",
    "resume",
    "list",
    "show",
    "watch",
    "status",
    "cancel",
    "wait",
    "history",
    "report",
    "end",
    "delete",
    "prune",
    "keep",
    "merge",
    "repair",
    "merge",
    "copy",
    "gc",
    "key",
    "cluster",
)
# The word after `snapshot` may also be the name of a snapshot, such as watch-2026.
COMMAND = rf"snapshot (?!\S+ --help|\S+: )(?=(?:{'|'.join(COMMAND_NAMES)})(?![\w.-]))"
IN_LINE, IN_HINT = re.compile(rf"({LEADS}){COMMAND}"), re.compile(rf"(^|{LEADS}){COMMAND}", re.MULTILINE)
# A whole command in a message, with the fleet file that `name_fleet` has added.
WHOLE_COMMAND = re.compile(
    rf"({LEADS})(snapshot (?:--fleet (?:'[^']*'|\S+) )?(?:{'|'.join(COMMAND_NAMES)})(?![\w.-])"
    r"(?:(?! {3}|, |\. | \()[^;)])*)"
)
SECONDS_PER_MINUTE = 60
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86400


def count_text(count: int) -> str:
    """`1,234,567`."""
    return f"{count:,}"


def quantity_text(amount: int, unit: str) -> str:
    """Return `amount` in `unit`, a plural or "": a size for `bytes`, otherwise a count with its unit."""
    if unit == "bytes":
        return size_text(amount)
    return f"{count_text(amount)} {unit.removesuffix('s') if amount == 1 else unit}".rstrip()


def quantity_is(amount: int, unit: str) -> str:
    """Return the subject of a sentence with its verb: `1 node is`, `3 nodes are`."""
    return f"{quantity_text(amount, unit)} {'is' if amount == 1 else 'are'}"


def seconds_text(seconds: float) -> str:
    """Return `0.4 s`, `59.9 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`: at most two parts."""
    if round(seconds, 1) < SECONDS_PER_MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < SECONDS_PER_HOUR:
        return f"{whole // SECONDS_PER_MINUTE} min {whole % SECONDS_PER_MINUTE:02} s"
    if whole < SECONDS_PER_DAY:
        minutes = whole % SECONDS_PER_HOUR // SECONDS_PER_MINUTE
        return f"{whole // SECONDS_PER_HOUR} h {minutes:02} min"
    return f"{whole // SECONDS_PER_DAY} d {whole % SECONDS_PER_DAY // SECONDS_PER_HOUR:02} h"


def took_text(seconds: float, ran_seconds: float | None) -> str:
    """Return the duration of a create; with `ran_seconds`, also how long it ran: it was interrupted and resumed."""
    took = seconds_text(seconds)
    return took if ran_seconds is None else f"{took} (ran {seconds_text(ran_seconds)})"


def age_text(then: datetime, *, now: datetime) -> str:
    """Return the age of `then` in its largest unit: `just now`, `5 min ago`, `3 h ago`, `12 d ago`.

    If another machine's clock is ahead, `then` may be after `now`: `just now` within a minute, else `in the future`.
    """
    seconds = (now - then).total_seconds()
    if seconds <= -SECONDS_PER_MINUTE:
        return "in the future"
    if seconds < SECONDS_PER_MINUTE:
        return "just now"
    if seconds < SECONDS_PER_HOUR:
        return f"{int(seconds // SECONDS_PER_MINUTE)} min ago"
    if seconds < SECONDS_PER_DAY:
        return f"{int(seconds // SECONDS_PER_HOUR)} h ago"
    return f"{int(seconds // SECONDS_PER_DAY)} d ago"


def time_text(moment: datetime) -> str:
    """Return RFC 3339 in UTC with milliseconds, `2026-01-02T03:04:05.678Z`; raise ValueError without a time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"the time {moment.isoformat()} has no zone")
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(moment: datetime) -> str:
    """Return a time in UTC for people, to the second: `2026-01-02 03:04:05Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def minute_text(moment: datetime) -> str:
    """Return a time in UTC for narrow terminals: `2026-01-02 03:04Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")


def name_fleet(text: str, fleet_file: str | None, *, is_hint: bool = False) -> str:
    """Add the given fleet file to each command in the text, so that the commands can be pasted."""
    if not fleet_file:
        return text
    named = f"snapshot --fleet {shlex.quote(fleet_file)} "
    return (IN_HINT if is_hint else IN_LINE).sub(lambda found: found[1] + named, text)


def wrapped(text: str, width: int) -> Iterator[str]:
    """Break a message between words into lines of `width` characters; all but the first are indented.

    A command stays on one line, so that it can be pasted. What is longer than a line is left to the terminal.
    """
    if cells_of(text) <= width:
        yield text
        return
    joined = WHOLE_COMMAND.sub(lambda found: found[1] + found[2].replace(" ", "\0"), text)
    line = ""
    for number, word in enumerate(joined.split(" ")):
        longer = f"{line} {word}" if number else word
        if line.strip() and cells_of(longer) > width:
            yield line.replace("\0", " ").rstrip()
            longer = INDENT + word
        line = longer
    yield line.replace("\0", " ")


def sentence_lines(text: str, stream: TextIO) -> Iterable[str]:
    """Return the lines of a sentence on the stream: broken between words on a terminal, a single line elsewhere."""
    text = printable(text)
    if stream.isatty():
        with suppress(OSError, ValueError):
            width = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns
            return wrapped(text, width) if width > 0 else [text]
    return [text]


def printable(text: str, *, keep: str = "") -> str:
    """Replace control and invisible characters, except those in `keep`, with Python's escape sequences.

    Names, comments and messages come from databases, whose owners could otherwise move a terminal's cursor, hide text
    (for example, with marks that change its direction), start new lines, or make two names look the same. Joiners stay
    in scripts that join letters, and in emoji.
    """
    if text.isprintable() and not INVISIBLE.search(text):
        return text
    pairs = zip(" " + text, text, strict=False)
    return "".join(one if one in keep or _is_visible(one, before) else _escape(one) for before, one in pairs)


def _is_visible(character: str, before: str) -> bool:
    if character in JOINERS:
        # Emoji are other symbols (So) or modifiers (Sk); a variation selector may precede a joiner.
        is_symbol = unicodedata.category(before) in ("So", "Sk") or before in "\ufe0e\ufe0f"
        return is_symbol or unicodedata.name(before, "").startswith(JOINING_SCRIPTS)
    category = unicodedata.category(character)
    return category not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp") and not INVISIBLE.match(character)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def causes_lines(causes: Iterable[str]) -> list[str]:
    """Return a line for each earlier attempt at a cut, with the cause of its inconsistency."""
    return [f"attempt {number} at the cut was inconsistent: {cause}" for number, cause in enumerate(causes, 1)]


GAP, INDENT = "  ", "    "
# A cell in a row may take this share of the terminal's width, but always at least CELL_MIN characters, so that a time
# fits.
CELL_SHARE, CELL_MIN = 0.4, 20


class Shorter(NamedTuple):
    """A cell with a shorter text for narrow terminals, where `below`, the omitted part, goes below the row."""

    text: str
    short: str
    below: str = ""


Cell = str | Shorter


class FittingTable(Struct, frozen=True):
    """A table; a row has a cell for each title. `numbers` are the titles of right-aligned columns.

    `important` are titles in order of importance; the remaining columns follow, left to right, and the first column
    always stays. `spared` are titles of columns that are left out entirely on a terminal that is too narrow for all
    columns.
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers: Set[str] = frozenset()
    important: Sequence[str] = ()
    spared: Set[str] = frozenset()

    def lines(self, width: int | None, encoding: str | None = None) -> Iterator[str]:
        """Return the header and the rows, `width` characters wide, or for a pipe if it is None."""
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
        """Return the columns to show, left to right: the first, and as many of the most important others as fit."""
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
        """Draw the table in the terminal's width, with a bold header."""
        yield from _drawn(self.lines(options.max_width, options.encoding), "bold")


class Enumeration(Struct, frozen=True):
    """`head: part, part` on one line in a pipe; on a terminal, further lines are indented."""

    head: str
    parts: Sequence[str]

    def lines(self, width: int | None, encoding: str | None = None) -> Iterator[str]:
        """Return the lines, `width` characters wide, or for a pipe if it is None."""
        head, *parts = (writable(printable(one), encoding) for one in (self.head, *self.parts))
        yield from _packed(parts, width, f"{head}: ", INDENT)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Draw the enumeration in the terminal's width."""
        yield from _drawn(self.lines(options.max_width, options.encoding), "")


def _written(cell: Cell, encoding: str | None) -> Shorter:
    """Return the cell as the stream will encode it, without control characters, so that its width is known."""
    found = cell if isinstance(cell, Shorter) else Shorter(cell, cell)
    return Shorter(*(writable(printable(text), encoding) for text in found))


def _drawn(lines: Iterable[str], style: str) -> Iterator[RenderableType]:
    from rich.text import Text

    for number, line in enumerate(lines):
        yield Text(line, style="" if number else style, overflow="fold")


def _widths(titles: Sequence[str], rows: Sequence[Sequence[str]], columns: Iterable[int]) -> list[int]:
    return [max([cells_of(titles[column]), *(cells_of(row[column]) for row in rows)]) for column in columns]


def _width_of(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _padding(text: str, width: int) -> str:
    return " " * (width - cells_of(text))


def cells_of(text: str) -> int:
    """Return how many columns of a terminal the text takes up."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _packed(parts: Sequence[str], width: int | None, first: str, indent: str) -> Iterator[str]:
    """Join the parts with commas into lines; the first line begins with `first`, the others with `indent`."""
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


# The fonts of these terminals lack most of the blocks.
WITHOUT_BLOCKS = ("dumb", "linux", "vt")
CELLS_MAX = 12


def sparkline(values: Sequence[int], levels: str) -> str:
    """Draw the last CELLS_MAX values as levels, relative to the greatest of them, and 0 as a space.

    Returns "" if no value is greater than 0.
    """
    shown = values[-CELLS_MAX:]
    top = max(shown, default=0)
    return "".join(levels[-(-len(levels) * value // top) - 1] if value else " " for value in shown) if top else ""


def levels_of(encoding: str | None, terminal: str, beside: str = "") -> str:
    """Return the characters for levels, lowest first, that the encoding contains and the terminal (TERM) can show.

    They are blocks only if the encoding also contains the other characters in the drawing (`beside`). A stream without
    an encoding accepts any text.
    """
    if terminal.startswith(WITHOUT_BLOCKS):
        return ASCII
    try:
        (BLOCKS + beside).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def stdout_levels(beside: str = "") -> str:
    """Return the characters for levels on stdout, in a drawing that also contains the characters `beside`."""
    return levels_of(sys.stdout.encoding, os.environ.get("TERM", ""), beside)
