"""The pictures of a page, as SVG: rows over time and bars.

A picture is stretched to the width of the page, and text is beside it, so that it stays legible on any screen. It has
so many columns and no more, however many marks there are.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from cutline.cli.output.format import moment_text
from cutline.cli.report.drawing import Bar, Extent, TimeRow, columns_of, heights_of, shaded_columns
from cutline.cli.report.elements import Element, element

COLUMNS = 240
HEIGHT = 100
# A cut with nothing in flight is seen as well, as a low column. Columns that have room are wider, to be seen better.
LEAST_HEIGHT, WIDE = 4, 3
SHADE_HEIGHT = 25


def time_picture(name: str, row: TimeRow, extent: Extent) -> list[Element]:
    """A row over time: its label and greatest value, and the picture."""
    columns = columns_of(row, extent, COLUMNS)
    drawn = [number for number, value in enumerate(columns) if value is not None]
    apart = min((later - earlier for earlier, later in pairwise(drawn)), default=WIDE)
    width = min(apart, WIDE)
    path = "".join(
        _column(min(number, COLUMNS - width), width, max(round(height * HEIGHT), LEAST_HEIGHT))
        for number, height in enumerate(heights_of(columns))
        if height is not None
    )
    title = f"{row.label}: {row.peak}, from {moment_text(extent.begin)} to {moment_text(extent.end)}"
    shades = (
        element(
            "rect",
            x=str(begin),
            y=str(HEIGHT - SHADE_HEIGHT),
            width=str(length),
            height=str(SHADE_HEIGHT),
            class_="gap",
        )
        for begin, length in _runs(shaded_columns(row, extent, COLUMNS))
    )
    picture = _picture(f"{name}-time", title, (element("path", d=path, class_="amount"), *shades), "time")
    picture.set("viewBox", f"0 0 {COLUMNS} {HEIGHT}")
    return [_head(row.label, row.peak), picture]


def _column(x: int, width: int, height: int) -> str:
    return f"M{x} {HEIGHT}v-{height}h{width}v{height}z"


def _runs(flags: Iterable[bool]) -> list[tuple[int, int]]:
    """Where each run of True begins, and its length."""
    runs: list[tuple[int, int]] = []
    for number, flag in enumerate(flags):
        if flag and runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif flag:
            runs.append((number, 1))
    return runs


def axis(extent: Extent) -> Element:
    """The times at both ends of the rows above it."""
    begin, end = (element("span", moment_text(one)) for one in (extent.begin, extent.end))
    return element("div", begin, end, class_="axis")


def bar_picture(name: str, bar: Bar) -> list[Element]:
    """A bar: its label and value, and the picture."""
    parts: list[Element] = []
    x = 0.0
    for part in bar.parts:
        share = round(part.share * HEIGHT, 2)
        parts.append(element("rect", x=f"{x:.2f}", y="0", width=f"{share:.2f}", height="10", class_=part.kind.value))
        x += share
    picture = _picture(f"{name}-bar", f"{bar.label}: {bar.text}", tuple(parts), "bar")
    picture.set("viewBox", f"0 0 {HEIGHT} 10")
    return [_head(bar.label, bar.text), picture]


def _head(label: str, text: str) -> Element:
    return element("div", element("span", label), element("span", text), class_="head")


def _picture(name: str, title: str, drawn: tuple[Element, ...], kind: str) -> Element:
    return element(
        "svg", element("title", title, id=name), *drawn, role="img", aria_labelledby=name, class_=kind,
        preserveAspectRatio="none",
    )  # fmt: skip
