"""Every promise in docs/postgresql.md, and every event in docs/consistency.md, is shown by a test."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "postgresql.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.sub(r"`[^`\n]*`", lambda quoted: quoted[0].replace("|", "/"), TEXT).splitlines()
    if line.startswith("| ")
]
# A footnote is the name of a test.
NOTES = dict(re.findall(r"(?m)^(\[\^\d+\]): `(test_\w+)`$", TEXT))
# The second column of a row that no test shows begins with this.
UNSHOWN = "not yet"
# The rows of the tables in docs/consistency.md of what is copied again, and of what is refused.
COPIED, REFUSED = 11, 13


@cache
def names_of_tests() -> frozenset[str]:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for source in sources for name in re.findall(r"(?m)^ *def (test_\w+)\(", source))


def test_every_line_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert named
    assert named - names_of_tests() == set()


def test_every_promise_names_a_test() -> None:
    # Tables with two columns describe servers, and promise nothing.
    promises = [row for row in ROWS if len(row) == 3 and row[0] != "feature"]
    assert len(promises) > 40
    for what, how, shown in promises:
        notes = re.findall(r"\[\^\d+\]", shown)
        assert notes or shown.startswith("every test") or how.startswith(UNSHOWN), what
        assert set(notes) <= NOTES.keys(), what


def test_every_event_in_the_life_of_a_chain_names_tests_that_exist() -> None:
    _, found, text = (ROOT / "docs" / "consistency.md").read_text(encoding="utf-8").partition("## What ends a chain")
    assert found
    notes = dict(re.findall(r"(?m)^(\[\^\d+\]): `(test_\w+)`$", text))
    events = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith(" tests |")]
    cells = [[cell.strip() for cell in event.strip("|").split("|")] for event in events]
    # What happened, before, now, and the tests; or why it is refused, before, the error, the remedy and the tests.
    assert sorted(map(len, cells)) == [4] * COPIED + [5] * REFUSED
    assert not [of_event for of_event in cells if "" in of_event]
    named = [re.findall(r"\[\^\d+\]", of_event[-1]) for of_event in cells]
    assert [] not in named
    assert {note for of_event in named for note in of_event} == notes.keys()
    assert set(notes.values()) - names_of_tests() == set()
