"""Links of the pages lead to pages and headings, the paths that they name exist, and prose has 120 columns."""

from __future__ import annotations

import re
import tomllib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import Struct
from msgspec.structs import fields

from cutline.fleet.config import FleetFile, load_fleet
from cutline.fleet.example import EXAMPLE, HEAD, FleetFileExistsError, write_example

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
COLUMNS_MAX = 120
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


@PAGE
def test_no_line_of_prose_is_longer_than_120_columns(page: Path) -> None:
    """Code and tables may be longer."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    long = [
        line
        for line in text.splitlines()
        if len(line) > COLUMNS_MAX and not line.lstrip(" ").startswith("|") and not line.startswith("    ")
    ]
    assert not long


def test_the_example_that_init_writes_is_a_fleet_file_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    write_example(path)
    assert [node.id for node in load_fleet(path).nodes] == ["s1", "s1-b1", "s2", "s2-b1"]
    written = path.read_text()
    assert set(tomllib.loads(written)) == {"name", "store", "node"}
    lines = [line.removeprefix("# ") for line in written.removeprefix(HEAD).splitlines()]
    assert tomllib.loads("\n".join(lines)) == tomllib.loads(EXAMPLE)
    with pytest.raises(FleetFileExistsError):
        write_example(path)
    assert path.read_text() == written


def keys_left_out(table: type[Struct], text: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of the table, and of the tables in it, that no table of the text has."""
    for field in fields(table):
        if field.encode_name not in text:
            yield prefix + field.encode_name
            continue
        tables = [
            one for one in (field.type, *get_args(field.type)) if isinstance(one, type) and issubclass(one, Struct)
        ]
        if tables:
            found = text[field.encode_name]
            merged = ChainMap(*found) if isinstance(found, list) else found
            yield from keys_left_out(tables[0], merged, f"{prefix}{field.encode_name}.")


def test_the_complete_fleet_file_of_the_page_is_one(tmp_path: Path) -> None:
    """It has every key that a fleet.toml may have, except two other ways to name the encryption key."""
    (text,) = re.findall(r"(?ms)^```toml\n(.*?)^```$", (ROOT / "docs" / "fleet-file.md").read_text(encoding="utf-8"))
    assert text == EXAMPLE, "docs/fleet-file.md and fleet/example.py have the same file"
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    assert [node.id for node in load_fleet(path).nodes] == ["s1", "s1-b1", "s2", "s2-b1"]
    assert set(keys_left_out(FleetFile, tomllib.loads(text))) == {"encryption.key_variable", "encryption.key_command"}
