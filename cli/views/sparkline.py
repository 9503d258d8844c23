"""Sparklines: a few numbers as one short text, a character each, the newest at the right."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cutline.cli.output.streams import ASCII_LEVELS as ASCII
from cutline.cli.output.streams import BLOCKS as BLOCKS

# The fonts of these terminals lack most of the blocks.
WITHOUT_BLOCKS = ("dumb", "linux", "vt")
CELLS_MAX = 12


def sparkline(values: Sequence[int], levels: str) -> str:
    """The last CELLS_MAX values, each as the level that is its share of the greatest of them; "" without any."""
    shown = values[-CELLS_MAX:]
    top = max(shown, default=0)
    return "".join(levels[max(-(-len(levels) * value // top) - 1, 0) if top else 0] for value in shown)


def levels_of(encoding: str | None, terminal: str, beside: str = "") -> str:
    """The characters for levels, the lowest first, that the encoding has and the terminal (TERM) can show.

    They are blocks only where the encoding has the characters that are drawn `beside` them, too. A stream without an
    encoding holds any text.
    """
    if terminal.startswith(WITHOUT_BLOCKS):
        return ASCII
    try:
        (BLOCKS + beside).encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def stdout_levels(beside: str = "") -> str:
    """The characters for levels on stdout, where others are drawn `beside` them."""
    return levels_of(sys.stdout.encoding, os.environ.get("TERM", ""), beside)
