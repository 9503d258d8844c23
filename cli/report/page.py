"""The HTML page: one file that loads nothing, runs nothing, and fits the screen of a phone.

A chart is stretched to the width of the page. A chart's text is outside the chart, so that it stays legible on any
screen. A chart has a limited number of columns, however many marks there are.
"""

from __future__ import annotations

import base64
import hashlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from itertools import pairwise
from typing import TypeAlias

from cutline.cli.output.tables import moment_text, printable, quantity_text
from cutline.cli.report.sections import (
    Bar,
    DataTable,
    Extent,
    Section,
    TimeRow,
    columns_of,
    counts_text,
    extent_of_points,
    heights_of,
    sections_of,
    shaded_columns,
)
from cutline.snapshots.listing.figures import StoreFigures

Element: TypeAlias = ElementTree.Element
DOCTYPE = "<!DOCTYPE html>\n"


def element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """Create an element. In attribute names, `_` replaces `-`, and a final `_` avoids Python's keywords."""
    made = ElementTree.Element(
        tag, {name.rstrip("_").replace("_", "-"): printable(value) for name, value in attributes.items()}
    )
    last: Element | None = None
    for child in children:
        if not isinstance(child, str):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + printable(child)
        else:
            last.tail = (last.tail or "") + printable(child)
    return made


def html_of(root: Element) -> str:
    """Return the page as HTML."""
    return DOCTYPE + ElementTree.tostring(root, encoding="unicode", method="html") + "\n"


STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1b1f24; --muted: #57606a; --line: #d0d7de;
  --panel: #f6f8fa; --amount: #0b63b5; --gap: #cf222e; --valid: #1a7f37; --inconclusive: #9a6700;
  --conflicts: #cf222e; --unknown: #818b98; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1117; --text: #e6edf3; --muted: #9aa4af; --line: #3d444d;
  --panel: #151b23; --amount: #58a6ff; --gap: #ff7b72; --valid: #3fb950; --inconclusive: #d29922;
  --conflicts: #ff7b72; --unknown: #656c76; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
p { margin: .25rem 0; }
.muted, .axis, figcaption { color: var(--muted); font-size: .875rem; }
figure { margin: 1rem 0; }
.head { display: flex; justify-content: space-between; gap: 1rem; font-size: .875rem; margin-top: .5rem; }
.head span:last-child { color: var(--muted); text-align: right; }
.axis { display: flex; justify-content: space-between; gap: 1rem; font-variant-numeric: tabular-nums; }
svg { display: block; shape-rendering: crispEdges; width: 100%; background: var(--panel); }
svg.time { height: 4rem; }
svg.bar { height: .75rem; }
.amount { fill: var(--amount); }
.gap { fill: var(--gap); }
.valid { fill: var(--valid); }
.inconclusive { fill: var(--inconclusive); }
.conflicts { fill: var(--conflicts); }
.unknown { fill: var(--unknown); }
.divider { stroke: var(--ground); stroke-width: 2px; }
nav a { margin-right: 1rem; }
a { color: var(--amount); }
summary { cursor: pointer; padding: .5rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--amount); }
table { border-collapse: collapse; font-size: .875rem; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { background: var(--panel); white-space: nowrap; }
td { white-space: nowrap; }
td.long { white-space: normal; min-width: 18rem; max-width: 40rem; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
"""


def content_policy() -> str:
    """Return the Content-Security-Policy: only this style is allowed, and no scripts, forms or frames."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


COLUMNS = 240
HEIGHT = 100
# Draw a cut with nothing in flight as a low column, so that it is still visible. Columns are wider where there is room.
LEAST_HEIGHT, WIDE = 4, 3
SHADE_HEIGHT = 25


def time_picture(name: str, row: TimeRow, extent: Extent) -> list[Element]:
    """Draw a row over time, below its label and greatest value."""
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
    """Return the start and length of each run of True."""
    runs: list[tuple[int, int]] = []
    for number, flag in enumerate(flags):
        if flag and runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif flag:
            runs.append((number, 1))
    return runs


def axis(extent: Extent) -> Element:
    """Return the times at both ends of the rows above."""
    begin, end = (element("span", moment_text(datetime)) for datetime in (extent.begin, extent.end))
    return element("div", begin, end, class_="axis")


def bar_picture(name: str, bar: Bar) -> list[Element]:
    """Draw a bar, below its label and value."""
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
        "svg",
        element("title", title, id=name),
        *drawn,
        role="img",
        aria_labelledby=name,
        class_=kind,
        preserveAspectRatio="none",
    )


# Longer texts are wrapped.
LONG_CHARACTERS = 48


def page_of(figures: StoreFigures) -> str:
    """Return the page as HTML."""
    sections, extent = sections_of(figures), extent_of_points(figures)
    title = f"Snapshots of fleet {figures.fleet}"
    if len(figures.snapshots) == 1:
        title = f"Snapshot {figures.snapshots[0].name} of fleet {figures.fleet}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=content_policy()),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style"),
    )
    # The style must stay unchanged: the policy contains its digest.
    head[-1].text = STYLE
    counts = counts_text(figures)
    body = element(
        "body",
        element("h1", title),
        element(
            "p", f"{counts}. Created at {moment_text(figures.made_at)} from the records in the store.", class_="muted"
        ),
        element(
            "nav",
            *(element("a", section.title, href=f"#{section.name}") for section in sections),
            aria_label="Sections",
        ),
        element("main", *(_section(section, extent) for section in sections)),
    )
    return html_of(element("html", head, body, lang="en"))


def _section(section: Section, extent: Extent | None) -> Element:
    pictures: list[Element] = []
    if extent is not None and section.rows:
        for number, row in enumerate(section.rows):
            pictures += time_picture(f"{section.name}-{number}", row, extent)
        pictures.append(axis(extent))
    for number, bar in enumerate(section.bars):
        pictures += bar_picture(f"{section.name}-{number}", bar)
    return element(
        "section",
        element("h2", section.title, id=section.name),
        *(element("p", text) for text in section.texts),
        *([element("figure", *pictures)] if pictures else []),
        *(_table(table) for table in section.tables if table.rows),
        aria_labelledby=section.name,
    )


def _table(table: DataTable) -> Element:
    head = element("tr", *(_cell("th", title, is_number=n in table.numbers) for n, title in enumerate(table.titles)))
    rows = (
        element("tr", *(_cell("td", text, is_number=number in table.numbers) for number, text in enumerate(row)))
        for row in table.rows
    )
    box = element(
        "div",
        element("table", element("thead", head), element("tbody", *rows)),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=table.caption,
    )
    summary = f"{table.caption}: table of {quantity_text(len(table.rows), 'rows')}"
    notes: Iterable[Element] = [element("p", f"{table.note}.", class_="muted")] if table.note else []
    return element("details", element("summary", summary), *notes, box)


def _cell(tag: str, text: str, *, is_number: bool) -> Element:
    if is_number:
        return element(tag, text, class_="number")
    return element(tag, text, class_="long") if len(text) > LONG_CHARACTERS else element(tag, text)
