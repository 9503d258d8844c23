"""Tables and enumerations: they fit every terminal, lose nothing, and in a pipe don't depend on one."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cutline.cli.output.tables import Cell, Enumeration, FittingTable, Shorter, cells_of

TITLES = ("name", "made", "size", "comment")
ROWS: list[tuple[Cell, ...]] = [
    ("daily", Shorter("2026-11-20 10:00:00Z (2 h ago)", "2026-11-20 10:00Z"), "5.8 MiB", ""),
    ("", Shorter("2026-11-20 11:00:00Z (1 h ago)", "2026-11-20 11:00Z"), "9.9 KiB", "the bank is closed"),
]
TABLE = FittingTable(TITLES, ROWS, {"size"}, ("name", "size", "made"))
WORDS = st.text("abc1ä長", min_size=1, max_size=9)
TEXTS = st.lists(WORDS, max_size=6).map(" ".join)


def test_in_a_pipe_a_row_is_a_line_with_everything_in_full() -> None:
    assert list(TABLE.lines(None)) == [
        "name   made                               size  comment",
        "daily  2026-11-20 10:00:00Z (2 h ago)  5.8 MiB",
        "       2026-11-20 11:00:00Z (1 h ago)  9.9 KiB  the bank is closed",
    ]
    long = FittingTable(("a", "b"), [("x" * 5000, "y")])
    assert list(long.lines(None)) == [f"a{' ' * 5001}b", f"{'x' * 5000}  y"]


def test_a_table_that_fits_is_the_same_in_a_terminal() -> None:
    whole = list(TABLE.lines(None))
    width = max(map(len, whole))
    assert list(TABLE.lines(width)) == whole
    # One character less: times without seconds.
    assert list(TABLE.lines(width - 1)) == [
        "name   made                  size  comment",
        "daily  2026-11-20 10:00Z  5.8 MiB",
        "       2026-11-20 11:00Z  9.9 KiB  the bank is closed",
    ]


def test_what_matters_least_goes_below_its_row_first() -> None:
    # 5 + 17 + 7 and two gaps are 33; what is below has its title, and is in full.
    assert list(TABLE.lines(33)) == [
        "name   made                  size",
        "daily  2026-11-20 10:00Z  5.8 MiB",
        "       2026-11-20 11:00Z  9.9 KiB",
        "    comment the bank is closed",
    ]
    assert list(TABLE.lines(32)) == [
        "name      size",
        "daily  5.8 MiB",
        "    made 2026-11-20 10:00:00Z (2",
        "    h ago)",
        "       9.9 KiB",
        "    made 2026-11-20 11:00:00Z (1",
        "    h ago),",
        "    comment the bank is closed",
    ]


def test_a_long_cell_widens_no_column() -> None:
    rows = [("n" * 40, "done", "1"), ("short", "failed because of something that takes long to tell", "2")]
    lines = list(FittingTable(("name", "result", "size"), rows, {"size"}).lines(60))
    assert lines == [
        "name   result  size",
        "n" * 40,
        "       done       1",
        "short             2",
        "    result failed because of something that takes long to",
        "    tell",
    ]


def test_what_a_shorter_cell_lacks_is_below_its_row_without_a_title() -> None:
    failed = Shorter("failed: a node is away (exit 6)", "failed (exit 6)", "a node is away")
    table = FittingTable(("operation", "result"), [("o" * 10, failed)])
    # 10 + 31 and a gap are 43.
    assert list(table.lines(42)) == ["operation   result", "oooooooooo  failed (exit 6)", "    a node is away"]
    assert list(table.lines(43)) == ["operation   result", "oooooooooo  failed: a node is away (exit 6)"]


def test_figures_that_others_have_leave_a_narrow_terminal_to_the_rest() -> None:
    rows = [("daily", "5", "5.8 MiB", "closed"), ("", "0", "9.9 KiB", "")]
    table = FittingTable(("name", "transactions", "size", "comment"), rows, spared={"transactions"})
    assert list(table.lines(37)) == [
        "name   transactions  size     comment",
        "daily  5             5.8 MiB  closed",
        "       0             9.9 KiB",
    ]
    assert list(table.lines(36)) == ["name   size     comment", "daily  5.8 MiB  closed", "       9.9 KiB"]


def test_columns_without_a_value_need_no_room() -> None:
    table = FittingTable(("name", "a title of many words", "size"), [("x" * 8, "", "1")])
    assert list(table.lines(20)) == ["name      size", f"{'x' * 8}  1"]


@given(st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=5), st.integers(16, 90))
def test_nothing_is_lost_and_no_line_is_longer_than_the_terminal(rows: list[tuple[str, ...]], width: int) -> None:
    lines = list(FittingTable(("a", "b", "c"), rows, {"c"}).lines(width))
    # With the indent and a comma, each word has room in 16 columns if it takes no more than 11.
    if all(cells_of(word) <= 11 for row in rows for text in row for word in text.split(" ")):
        assert all(cells_of(line) <= width or line in [row[0] for row in rows] for line in lines)
    shown = "".join("".join(lines).split())
    for text in (text for row in rows for text in row):
        assert "".join(text.split()) in shown


@pytest.mark.parametrize("width", [20, 40, 80, 140])
def test_a_console_draws_the_lines_and_a_bold_header(width: int) -> None:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=True, color_system="standard").print(TABLE)
    header, *lines = stream.getvalue().splitlines()
    expected = list(TABLE.lines(width, "utf-8"))
    assert header == f"\x1b[1m{expected[0]}\x1b[0m"
    assert lines == expected[1:]


def test_columns_stand_below_their_titles_in_any_encoding() -> None:
    rows = [("ä\n長", "1"), ("…", "2"), ("x", "3")]
    for encoding, names in (("utf-8", ["ä\\n長", "…", "x"]), ("ascii", ["\\xe4\\n\\u9577", "...", "x"])):
        for width in (None, 80):
            _, *lines = FittingTable(("name", "size"), rows).lines(width, encoding)
            column = max(map(cells_of, names)) + 2
            padded = [one + " " * (column - cells_of(one)) for one in names]
            assert lines == [one + two for one, two in zip(padded, "123", strict=True)]


def test_an_enumeration_is_broken_between_its_parts() -> None:
    parts = ("fleet lock free", "at 0/50", "slot a 1 B behind, retains 2 B")
    node = Enumeration("node a", parts)
    assert list(node.lines(None)) == ["node a: fleet lock free, at 0/50, slot a 1 B behind, retains 2 B"]
    assert list(node.lines(40)) == ["node a: fleet lock free, at 0/50,", "    slot a 1 B behind, retains 2 B"]
    # Between words only of what is longer than a line.
    assert list(node.lines(20)) == [
        "node a: fleet lock free,", "    at 0/50, slot a", "    1 B behind,", "    retains 2 B",
    ]  # fmt: skip
