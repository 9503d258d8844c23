"""A release has a version of three numbers, and the first section of the changelog is its own."""

from __future__ import annotations

import pytest

from tests.run.release import changelog_problem


@pytest.mark.parametrize("heading", ["## 1.2.3", "## 1.2.3 (not released yet)", "## 1.2.3\n\n## 1.2.2"])
def test_the_first_section_of_the_changelog_is_that_of_the_version(heading: str) -> None:
    assert changelog_problem(f"# Changelog\n\n{heading}\n\n- A change.\n", "1.2.3") is None


@pytest.mark.parametrize("heading", ["## Unreleased", "## 1.2.2\n\n## 1.2.3", "## 1.2.30", "", "### 1.2.3"])
def test_a_changelog_of_another_version_is_refused(heading: str) -> None:
    assert "CHANGELOG.md" in (changelog_problem(f"# Changelog\n\n{heading}\n", "1.2.3") or "")


@pytest.mark.parametrize("version", ["1.2", "1.2.3.dev1", "1.2.3rc1", ""])
def test_a_version_that_is_no_release_is_refused(version: str) -> None:
    assert changelog_problem(f"## {version}", version)
