"""`snapshot check`, `list` and `restore` before they do any work; no node is reachable."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.config import Fleet, load_fleet
from snapshots.records.store_identity import ensure_identity
from storage.local import LocalStore
from tests.commands.in_process import run_here


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{tmp_path}/store"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    return load_fleet(path)


@pytest.mark.parametrize("words", [["list"], ["check"], ["restore", "daily"], ["show", "daily"]])
def test_a_missing_folder_is_named_and_an_empty_one_is_not_initialised(
    fleet: Fleet, tmp_path: Path, words: list[str]
) -> None:
    code, document = run_here(fleet, *words)
    assert (code, document["error"]) == (3, "store-not-initialised")
    assert f"there is no folder {tmp_path}/store" in document["message"]
    assert "mount" in document["hint"]
    (tmp_path / "store").mkdir()
    code, document = run_here(fleet, *words)
    assert (code, document["error"], document["hint"]) == (3, "store-not-initialised", "run: snapshot init")


def test_a_junit_file_that_can_not_be_written_ends_a_check_before_its_work(fleet: Fleet, tmp_path: Path) -> None:
    # The store is not initialised, so any work would end with code 3.
    file = tmp_path / "missing" / "report.xml"
    code, document = run_here(fleet, "check", "--junit", str(file))
    assert (code, document["error"]) == (2, "usage")
    assert str(file) in document["message"]


def test_a_check_that_does_not_end_leaves_no_junit_file_and_no_other_report(fleet: Fleet, tmp_path: Path) -> None:
    new, old = tmp_path / "new.xml", tmp_path / "old.xml"
    old.write_text("<testsuites/>")
    for file in (new, old):
        assert run_here(fleet, "check", "--junit", str(file))[0] == 3
    assert not new.exists()
    assert old.read_text() == "<testsuites/>"
    ensure_identity(LocalStore(tmp_path / "store"), fleet)
    assert run_here(fleet, "check", "--junit", str(new))[0] == 4
    assert "testsuites" in new.read_text()
