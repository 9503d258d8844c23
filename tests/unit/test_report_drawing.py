"""What a report draws: marks in columns, levels, shades, bars, and how a terminal shows them."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from cutline.cli.output.tables import ASCII, BLOCKS
from cutline.cli.report.sections import (
    Bar,
    BarPart,
    Extent,
    PartKind,
    Shade,
    TimeMark,
    TimeRow,
    columns_of,
    extent_of,
    heights_of,
    operation_sections,
    shaded_columns,
)
from cutline.cli.report.terminal import bar_line, time_line, timeline_of
from cutline.fleet.record import Time
from cutline.snapshots.listing.figures import OperationFigures, PhaseFigures
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CheckedPoint, CheckResult
from tests.unit.made_figures import BEGIN, made_figures, made_snapshot

TEN_MINUTES = Extent(BEGIN, BEGIN + timedelta(minutes=10))


def row(*values: tuple[float, float], is_level: bool = False, shades: tuple[tuple[float, float], ...] = ()) -> TimeRow:
    """A row with values at these minutes."""
    marks = tuple(TimeMark(BEGIN + timedelta(minutes=minute), value) for minute, value in values)
    stretches = (Shade(BEGIN + timedelta(minutes=begin), BEGIN + timedelta(minutes=end)) for begin, end in shades)
    return TimeRow("row", marks, "", is_level, tuple(stretches))


def test_a_column_has_the_greatest_of_its_values() -> None:
    # Ten columns of a minute each; the last has the end, too.
    marks = row((0, 1.0), (0.5, 7.0), (0.9, 2.0), (4, 0.0), (9.5, 3.0), (10, 4.0))
    assert columns_of(marks, TEN_MINUTES, 10) == [7.0, None, None, None, 0.0, None, None, None, None, 4.0]


def test_a_level_holds_until_the_next_mark_and_to_the_end() -> None:
    marks = row((2, 5.0), (4, 6.0), (4.5, 9.0), is_level=True)
    assert columns_of(marks, TEN_MINUTES, 10) == [None, None, 5.0, 5.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0]


def test_an_extent_without_length_has_all_in_its_first_column() -> None:
    one = extent_of([BEGIN])
    assert one is not None
    assert columns_of(row((0, 3.0)), one, 4) == [3.0, None, None, None]
    assert extent_of([]) is None


def test_heights_are_parts_of_the_greatest() -> None:
    assert heights_of([None, 0.0, 2.0, 8.0]) == [None, 0.0, 0.25, 1.0]
    assert heights_of([None, 0.0]) == [None, 0.0]
    # The clock of a node may be ahead.
    assert heights_of([-3.0, 2.0]) == [0.0, 1.0]
    assert heights_of([-3.0]) == [0.0]


def test_a_row_in_a_terminal_shows_values_zeros_and_shades_apart() -> None:
    marks = row((0, 0.0), (2, 7.0), (9, 3.5), shades=((2, 8),))
    assert shaded_columns(marks, TEN_MINUTES, 10) == [False, False, *[True] * 7, False]
    assert time_line(marks, TEN_MINUTES, 10, BLOCKS) == "▁ █░░░░░░▅"
    assert time_line(marks, TEN_MINUTES, 10, ASCII) == "_ #//////="


def test_the_parts_of_a_bar_are_seen_however_small() -> None:
    parts = (BarPart(0.5, PartKind.VALID), BarPart(0.001, PartKind.CONFLICTS), BarPart(0.25, PartKind.UNKNOWN))
    assert bar_line(Bar("bar", "", parts), 8, BLOCKS) == "████X·  "
    assert bar_line(Bar("bar", "", ()), 3, BLOCKS) == "   "


def test_a_bar_in_ascii_has_its_parts_apart() -> None:
    parts = tuple(BarPart(0.25, kind) for kind in PartKind if kind is not PartKind.AMOUNT)
    assert bar_line(Bar("bar", "", parts), 8, ASCII) == "##~~XX.."


def check_run(increment: int, result: CheckResult, minute: int) -> EndedCheck:
    ended_at = Time.of(BEGIN + timedelta(minutes=minute))
    return EndedCheck("op", ended_at, CheckedPoint("daily", increment, result, full=True))


def coverage(*runs: EndedCheck) -> Bar:
    figures = made_figures(made_snapshot(7), operations=OperationFigures(checks=runs))
    _, checks = operation_sections(figures)
    (bar,) = checks.bars
    return bar


def test_restore_points_have_the_result_of_the_newest_check_that_covers_them() -> None:
    # Eight points: the newest check covers two, an older one four, and the others need what that has read.
    bar = coverage(check_run(1, "valid", 9), check_run(3, "conflicts", 8))
    assert bar.parts == (BarPart(0.25, PartKind.VALID), BarPart(0.75, PartKind.CONFLICTS))
    assert bar.text == "2 valid, 6 conflicts"
    bar = coverage(check_run(1, "valid", 9), check_run(3, "valid", 8))
    assert bar.parts == (BarPart(0.5, PartKind.VALID), BarPart(0.5, PartKind.UNKNOWN))
    assert bar.text == "4 valid, 4 unknown"
    assert coverage(check_run(1, "conflicts", 9), check_run(3, "valid", 8)).text == "8 conflicts"


def test_the_bar_of_a_merged_chain_begins_where_the_chain_begins() -> None:
    """The restore points before its merge were given up."""
    whole = made_snapshot(7)
    figures = made_figures(
        replace(whole, points=whole.points[4:]), operations=OperationFigures(checks=(check_run(5, "valid", 9),))
    )
    _, checks = operation_sections(figures)
    assert checks.bars[0].text == "2 valid, 2 unknown"


def test_an_inconclusive_check_hides_no_conclusive_one() -> None:
    bar = coverage(check_run(5, "inconclusive", 9), check_run(3, "valid", 8))
    assert bar.text == "4 valid, 2 inconclusive, 2 unknown"


def drawn(width: int, *, is_terminal: bool = True, levels: str = BLOCKS) -> list[str]:
    """The timeline of a chain of nine points in a terminal of this width, or in a pipe."""
    phases = (PhaseFigures("increment", "cut", 8, 0.5, 1.0), PhaseFigures("increment", "archive WAL", 8, 1.0, 2.0))
    runs = (check_run(3, "valid", 5),)
    figures = made_figures(made_snapshot(8), operations=OperationFigures(phases=phases, checks=runs))
    stream = StringIO()
    console = Console(file=stream, width=width, force_terminal=is_terminal, no_color=True, markup=False)
    for line in timeline_of(figures, levels):
        if not isinstance(line, str):
            console.print(line)
    return Text.from_ansi(stream.getvalue()).plain.splitlines()


def test_a_timeline_fits_the_terminal_and_needs_no_colours() -> None:
    for width in (60, 80, 200):
        lines = drawn(width)
        assert max(map(len, lines)) <= width
        (flight,) = (line for line in lines if line.lstrip().startswith("in flight"))
        assert flight.split("at most")[1] == " 8"
        # Nine cuts with 0 to 8 in flight: each height is there, the lowest for none.
        assert set(flight.split("in flight")[1].split("at most")[0]) == {" ", *"▁▂▃▄▅▆▇█"}
        # Of a table that does not fit, the last columns are below each row.
        assert any(line.startswith("    ") and "global transactions " in line for line in lines) == (width < 100)
    # The longest phase fills its line, the other takes half of it.
    (cut,), (archive,) = (
        [one for one in lines if f"increment: {name}" in one and "█" in one] for name in ("cut", "arch")
    )
    assert abs(archive.count("█") - 2 * cut.count("█")) <= 1


def test_a_timeline_in_a_pipe_has_a_width_of_its_own() -> None:
    pictures = [line for line in drawn(1000, is_terminal=False) if set(line) & set("▁▂▃▄▅▆▇█")]
    assert pictures
    assert max(map(len, pictures)) <= 100


def test_a_timeline_with_ascii_levels_is_ascii_however_narrow() -> None:
    for width in (12, 80):
        assert all(line.isascii() for line in drawn(width, levels=ASCII))
