"""The page of a report in a real browser, on a telephone and a desktop, in light and dark.

It needs headless Chromium: $CUTLINE_CHROMIUM or `chromium` in PATH. Without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cutline.cli.report.page import page_of
from cutline.snapshots.listing.figures import NodeLag
from tests.browser.chromium import VARIABLE, Browser, chromium, find_chromium
from tests.programs.lacking import skip_without
from tests.unit.made_figures import made_figures, made_snapshot
from tests.unit.test_report_page import hostile_figures

TELEPHONE, DESKTOP = 390, 1280
# WCAG 2.2, 1.4.3 and 1.4.11: the least contrast of text, and of what is drawn.
TEXT_CONTRAST, DRAWN_CONTRAST = 4.5, 3.0
CONTRAST = """
(() => {
  const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = numbers(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = (colour, element) => {
    const [a, b] = [light(numbers(colour)), light(ground(element))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const texts = [...document.body.querySelectorAll('*')].filter(one => !one.closest('svg') &&
    [...one.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));
  const drawn = [...document.querySelectorAll('svg path, svg rect')];
  return {
    texts: texts.length, drawn: drawn.length,
    text: Math.min(...texts.map(one => contrast(getComputedStyle(one).color, one))),
    part: Math.min(...drawn.map(one => contrast(getComputedStyle(one).fill, one.parentElement))),
    size: Math.min(...texts.map(one => parseFloat(getComputedStyle(one).fontSize))),
  };
})()
"""
OPEN_TABLES = "document.querySelectorAll('details').forEach(one => one.open = true)"
WIDTHS = "[document.documentElement.scrollWidth, innerWidth]"
# What a picture shows and where, and whether its marks are within it.
PICTURES = """
[...document.querySelectorAll('svg')].map(svg => {
  const box = svg.getBoundingClientRect(), marks = svg.querySelector('path, rect').getBoundingClientRect();
  return {
    clip: {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height},
    inside: marks.left >= box.left - 1 && marks.right <= box.right + 1 && marks.width > 0 && marks.height > 0,
  };
})
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        skip_without("chromium", f"neither ${VARIABLE} names it nor is it on the PATH")
    with chromium(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a chain of 400 restore points with a gap, whose comments are long."""
    first, second = made_snapshot(400, comment="a comment without end " * 20), made_snapshot(9, name="other")
    first = replace(first, points=first.points[:200] + first.points[260:])
    second = replace(
        second,
        points=tuple(replace(one, lags={"a": NodeLag(0.5 * one.increment, 2.0)}) for one in second.points),
        is_given_up=True,
    )
    file = tmp_path_factory.mktemp("page") / "report.html"
    file.write_text(page_of(made_figures(first, second)))
    return file


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [TELEPHONE, DESKTOP])
def test_the_page_is_legible(browser: Browser, page: Path, width: int, *, is_dark: bool) -> None:
    assert browser.show(page, width=width, is_dark=is_dark) == [page.as_uri()]
    browser.value(OPEN_TABLES)
    # Wide tables scroll within their boxes.
    scroll_width, inner_width = browser.value(WIDTHS)
    assert inner_width == width
    assert scroll_width <= width
    found = browser.value(CONTRAST)
    assert found["texts"] > 1000
    assert found["drawn"] > 5
    assert found["text"] >= TEXT_CONTRAST
    assert found["part"] >= DRAWN_CONTRAST
    assert found["size"] >= 13.0
    ground = browser.value("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")


@pytest.mark.parametrize("width", [TELEPHONE, DESKTOP])
def test_every_picture_shows_something(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, width=width, is_dark=False)
    pictures = browser.value(PICTURES)
    assert len(pictures) >= 8
    before = [browser.photograph(one["clip"]) for one in pictures]
    assert all(one["inside"] and one["clip"]["width"] > 0.8 * min(width, 1100) for one in pictures)
    browser.value("document.querySelectorAll('svg > :not(title)').forEach(one => one.remove())")
    after = [browser.photograph(one["clip"]) for one in pictures]
    # An empty picture would look the same without what it has drawn.
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_no_text_of_the_store_runs_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "hostile.html"
    file.write_text(page_of(hostile_figures()))
    asked = browser.show(file, width=DESKTOP, is_dark=False)
    # No image, no script, no style from anywhere.
    assert asked == [file.as_uri()]
    assert browser.value("document.querySelectorAll('script, img, [onerror]').length") == 0
    assert browser.value("document.body.innerText.includes('<script>alert')")


def test_the_policy_keeps_scripts_from_running_even_if_one_were_on_the_page(browser: Browser, tmp_path: Path) -> None:
    script = "<script>document.title = 'it ran'</script><img src='x.png'></body>"
    marked = page_of(made_figures(made_snapshot(1))).replace("</body>", script)
    file = tmp_path / "marked.html"
    file.write_text(marked)
    assert browser.show(file, width=DESKTOP, is_dark=False) == [file.as_uri()]
    assert browser.value("document.title") == "Snapshot daily of fleet shop"
    # Without the policy it would run, and the picture be loaded: the test sees what does.
    file.write_text(marked.replace("Content-Security-Policy", "Other"))
    assert browser.show(file, width=DESKTOP, is_dark=False) == [file.as_uri(), (tmp_path / "x.png").as_uri()]
    assert browser.value("document.title") == "it ran"
