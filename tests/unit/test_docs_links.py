"""Every link of the pages leads to a page and a heading, and every path that they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = [path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "cutline"))]
# `snapshots/fold/fold.py`, `wal/segments/`; not the keys of a store, which have names in <> after `snapshots/`.
PATHS = re.compile(
    rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})/[\w/.-]+\.(?:py|md|json)|(?:{'|'.join(FOLDERS)})/[\w/.-]*\w/)"
)
STORE_KEYS = re.compile(r"^(?:snapshots/.*\.json|snapshots/nightly)")
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors_of(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@PAGE
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


@PAGE
def test_every_path_exists(page: Path) -> None:
    for path in PATHS.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists() or STORE_KEYS.match(path), path
