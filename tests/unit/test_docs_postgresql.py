"""Every promise in docs/postgresql.md is shown by a test."""

from __future__ import annotations

import ast
import re
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


def names_of_tests() -> set[str]:
    return {
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


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
