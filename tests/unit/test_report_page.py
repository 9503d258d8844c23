"""The page of a report: it loads and runs nothing, whatever names say; each picture has a table; it stays small."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser

from msgspec.structs import replace

from cutline.cli.commands.report import figures_document
from cutline.cli.report.page import page_of
from cutline.fleet.record import Time
from cutline.snapshots.listing.figures import NodeLag, OperationFigures, PhaseFigures, StoreFigures
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CheckedPoint, CheckFigures, SkippedPart
from tests.unit.made_figures import BEGIN, made_figures, made_snapshot

HOSTILE = "</td></table><script>alert('&')</script><img src=x onerror=\"alert(1)\">\x1b[2J\u202e"
MEBIBYTE = 1 << 20


class Reader(HTMLParser):
    """What a page has: its elements with attributes, and the text of each."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


def hostile_figures() -> StoreFigures:
    """Figures whose every text from the store is hostile."""
    figures = CheckFigures({HOSTILE: 1}, 0, 1, (SkippedPart(HOSTILE, HOSTILE),))
    check = EndedCheck(HOSTILE, Time.of(BEGIN), CheckedPoint(HOSTILE, 1, "inconclusive", full=True, figures=figures))
    operations = OperationFigures(1, phases=(PhaseFigures(HOSTILE, HOSTILE, 1, 1.0, 1.0),), checks=(check,))
    snapshot = made_snapshot(4, comment=HOSTILE)
    points = tuple(
        replace(one, snapshot=HOSTILE, causes=(HOSTILE,), operation=HOSTILE, lags={HOSTILE: NodeLag(1.0, None)})
        for one in snapshot.points
    )
    hostile = replace(snapshot, name=HOSTILE, remark=HOSTILE, state="lost", points=points)
    return replace(made_figures(hostile, operations=operations), fleet=HOSTILE)


def test_nothing_that_stores_and_nodes_say_becomes_markup() -> None:
    page = page_of(hostile_figures())
    reader = Reader(page)
    allowed = {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "nav", "a", "main", "section", "figure",
        "div", "span", "svg", "path", "rect", "details", "summary", "table", "thead", "tbody", "tr", "th", "td",
    }  # fmt: skip
    assert {tag for tag, _ in reader.elements} <= allowed
    assert not any(name.startswith("on") or name in ("src", "style") for _, one in reader.elements for name in one)
    assert all(one["href"].startswith("#") for one in reader.all("a"))
    # It is shown, as text: in the comments of the cuts, among others.
    shown = [text for text in reader.texts if "<script>alert('&')</script>" in text]
    assert len(shown) > 10
    # What would hide text in a browser, or act in a terminal, is shown as its escape.
    assert not {"\x1b", "\u202e"} & set(page)


def test_the_page_may_load_nothing_and_its_policy_has_the_digest_of_its_style() -> None:
    page = page_of(made_figures(made_snapshot(3)))
    (policy,) = (one["content"] for one in Reader(page).all("meta") if "http-equiv" in one)
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in page.replace("http-equiv", "")


def test_every_picture_has_a_title_and_every_section_with_one_has_a_table() -> None:
    page = page_of(hostile_figures())
    reader = Reader(page)
    ids = [one["id"] for _, one in reader.elements if "id" in one]
    assert len(ids) == len(set(ids))
    pictures = reader.all("svg")
    assert len(pictures) >= 6
    assert all(one["role"] == "img" and one["aria-labelledby"] in ids for one in pictures)
    sections = page.split("<section")[1:]
    assert len(sections) == 7
    for one in sections:
        assert ("<svg" not in one) or ("<table" in one)


def test_the_lag_of_each_node_is_drawn_the_greatest_first() -> None:
    snapshot = made_snapshot(2)
    lags = ({}, {"a": 0.25, "b": 3.0}, {"a": 0.5, "b": 1.0})
    points = tuple(
        replace(one, lags={node: NodeLag(seconds, 60.0) for node, seconds in found.items()})
        for one, found in zip(snapshot.points, lags, strict=True)
    )
    section = page_of(made_figures(replace(snapshot, points=points))).split("<section")[-1]
    assert section.count("<svg") == 2
    texts = Reader(section).texts
    assert [text for text in texts if text.startswith("at most")] == ["at most 3.0 s", "at most 500.0 ms"]
    rows = [Reader(row).texts for row in section.split("<tr>")[2:]]
    # The node, its cuts, the lag at the newest, the median, the greatest and when that was, and since when it is idle.
    assert rows[0][:5] == ["b", "2", "1.0 s", "2.0 s", "3.0 s"]
    assert rows[1][:5] == ["a", "2", "500.0 ms", "375.0 ms", "500.0 ms"]
    assert rows[1][5:7] == ["2026-11-20 00:02:00Z", "1 min 00 s"]


def test_thousands_of_increments_make_a_page_of_few_mebibytes() -> None:
    small = page_of(made_figures(made_snapshot(500, comment="a comment of the usual length, more or less")))
    figures = made_figures(made_snapshot(5000, comment="a comment of the usual length, more or less"))
    large = page_of(figures)
    assert len(large.encode()) < 2 * MEBIBYTE
    # Pictures have no more columns than before; tables end, and say so.
    assert large.count("the newest 1,000 of 5,001") == 2
    pictures = [sum(len(part) for part in page.split("<svg")[1:]) for page in (small, large)]
    assert len(large.split("<path")) == len(small.split("<path"))
    assert max(len(part.partition("</svg>")[0]) for part in large.split("<svg")[1:]) < 10_000
    assert all(pictures)
    # The document has them all.
    assert len(figures_document(figures)["snapshots"][0]["points"]) == 5001


def test_hundreds_of_snapshots_are_in_the_table_and_the_newest_in_the_picture() -> None:
    figures = made_figures(*(made_snapshot(1, name=f"s{number}") for number in range(300)))
    points = page_of(figures).split("<section")[2]
    assert points.count("<svg") == 13
    assert "The chart shows the newest 12 of 300 snapshots." in points
    assert points.count("<tr>") > 300
