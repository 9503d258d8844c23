"""The page: one HTML file that loads nothing, runs nothing, and fits a telephone."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.cli.output.format import moment_text, quantity_text
from cutline.cli.report.drawing import DataTable, Extent, Section
from cutline.cli.report.elements import Element, element, html_of
from cutline.cli.report.pictures import axis, bar_picture, time_picture
from cutline.cli.report.sections import counts_text, extent_of_points, sections_of
from cutline.cli.report.style import STYLE, content_policy
from cutline.snapshots.listing.figures import StoreFigures

# Longer texts are wrapped.
LONG_CHARACTERS = 48


def page_of(figures: StoreFigures) -> str:
    """The page as HTML."""
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
    # As it is: the policy has its digest.
    head[-1].text = STYLE
    counts = counts_text(figures)
    body = element(
        "body",
        element("h1", title),
        element("p", f"{counts}. Made at {moment_text(figures.made_at)} from what the store records.", class_="muted"),
        element("nav", *(element("a", one.title, href=f"#{one.name}") for one in sections), aria_label="Sections"),
        element("main", *(_section(one, extent) for one in sections)),
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
        *(_table(one) for one in section.tables if one.rows),
        aria_labelledby=section.name,
    )


def _table(table: DataTable) -> Element:
    head = element("tr", *(_cell("th", title, is_number=n in table.numbers) for n, title in enumerate(table.titles)))
    rows = (
        element("tr", *(_cell("td", text, is_number=number in table.numbers) for number, text in enumerate(row)))
        for row in table.rows
    )
    box = element(
        "div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll", tabindex="0",
        role="region", aria_label=table.caption,
    )  # fmt: skip
    summary = f"{table.caption}: table of {quantity_text(len(table.rows), 'rows')}"
    notes: Iterable[Element] = [element("p", f"{table.note}.", class_="muted")] if table.note else []
    return element("details", element("summary", summary), *notes, box)


def _cell(tag: str, text: str, *, is_number: bool) -> Element:
    if is_number:
        return element(tag, text, class_="number")
    return element(tag, text, class_="long") if len(text) > LONG_CHARACTERS else element(tag, text)
