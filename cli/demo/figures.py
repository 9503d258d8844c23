"""Figures drawn with characters: the bank's rate over time, and the events along it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise

LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One character per value, scaled to the highest; a space for zero."""
    highest = max(values, default=0.0)
    return "".join(
        " " if value <= 0 else LEVELS[min(int(value / highest * len(LEVELS)), len(LEVELS) - 1)] for value in values
    )


def rates(moments: Sequence[float], began: float, ended: float, columns: int) -> list[float]:
    """The number of `moments` (ascending) per second in each of `columns` equal parts of the time."""
    width = (ended - began) / columns
    edges = [bisect_left(moments, began + width * column) for column in range(columns + 1)]
    return [(after - before) / width for before, after in pairwise(edges)]


def marks(places: Mapping[str, float], began: float, ended: float, columns: int) -> str:
    """A line of `columns` characters with each sign at its moment; on a collision the sign moves to the nearest gap."""
    line = [" "] * columns
    for sign, moment in places.items():
        column = min(max(int((moment - began) / (ended - began) * columns), 0), columns - 1)
        free = [place for place in range(columns) if line[place] == " "]
        line[min(free, key=lambda place: abs(place - column))] = sign
    return "".join(line)
