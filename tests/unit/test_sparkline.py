"""Sparklines: which share of the greatest value each character stands for, and which characters a terminal gets."""

from __future__ import annotations

import pytest

from cutline.cli.output.tables import ASCII, BLOCKS, CELLS_MAX, levels_of, sparkline


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([], ""),
        ([5], "█"),
        ([0], ""),
        ([0, 0], ""),
        ([0, 4, 0], " █ "),
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        # A level begins right above the one below: 1001 of 8000 is more than an eighth.
        ([0, 1, 1000, 1001, 8000], " ▁▁▂█"),
        ([2**63 - 1, 1], "█▁"),
    ],
)
def test_a_level_is_the_share_of_the_greatest_value(values: list[int], shown: str) -> None:
    assert sparkline(values, BLOCKS) == shown


def test_only_the_newest_values_are_shown_and_the_greatest_is_one_of_them() -> None:
    assert sparkline([1_000_000, *[7] * CELLS_MAX], BLOCKS) == "█" * CELLS_MAX
    assert sparkline([8] * 20 + [1], ASCII) == "#" * (CELLS_MAX - 1) + "_"


@pytest.mark.parametrize(
    ("encoding", "terminal", "levels"),
    [
        ("utf-8", "xterm-256color", BLOCKS),
        ("utf-8", "", BLOCKS),
        ("UTF8", "tmux-256color", BLOCKS),
        ("ascii", "xterm-256color", ASCII),
        ("iso-8859-1", "xterm", ASCII),
        ("no such encoding", "xterm", ASCII),
        (None, "xterm", BLOCKS),
        ("utf-8", "dumb", ASCII),
        ("utf-8", "linux", ASCII),
        ("utf-8", "vt220", ASCII),
    ],
)
def test_blocks_are_shown_where_encoding_and_terminal_have_them(
    encoding: str | None, terminal: str, levels: str
) -> None:
    assert levels_of(encoding, terminal) == levels
    assert len(levels) == 8
    assert len(set(levels)) == 8


def test_blocks_are_shown_only_where_what_is_beside_them_can_be() -> None:
    # GBK has all the blocks, but not the light shade.
    assert levels_of("gbk", "xterm") == BLOCKS
    assert levels_of("gbk", "xterm", "░") == ASCII
    assert levels_of("utf-8", "xterm", "░") == BLOCKS
