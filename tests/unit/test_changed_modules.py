"""`make test TESTS=changed` runs the modules that a change can break, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.run.changed import concerned

ROOT = Path(__file__).parents[2]
FOLDER = "tests/integration/damage"


@pytest.mark.parametrize(
    ("changed", "is_among", "is_not"),
    [
        ("tests/unit/test_lsn.py", "tests/unit/test_lsn.py", "tests/unit/test_label.py"),
        ("fleet/lsn.py", "tests/unit/test_lsn.py", "tests/unit/test_label.py"),
        ("cli/commands/check.py", f"{FOLDER}/test_damage.py", "tests/unit/test_lsn.py"),
        ("restore/run/restore.py", "tests/integration/restoring/test_restore_walk.py", "tests/unit/test_lsn.py"),
        (f"{FOLDER}/conftest.py", f"{FOLDER}/test_damage.py", "tests/integration/test_lock.py"),
        ("tests/faults/cases.py", "tests/integration/test_fault_walk.py", "tests/integration/test_lock.py"),
        ("docs/spark.md", "tests/unit/test_docs_links.py", "tests/unit/test_lsn.py"),
        ("pyproject.toml", "tests/unit/test_lsn.py", ""),
    ],
)
def test_a_change_concerns_what_imports_or_names_it(changed: str, is_among: str, is_not: str) -> None:
    found = concerned([changed])
    assert is_among in found
    assert is_not not in found


def test_a_file_concerns_only_what_names_it() -> None:
    assert concerned(["benchmarks/nobody.txt"]) == {Path(__file__).relative_to(ROOT).as_posix()}
