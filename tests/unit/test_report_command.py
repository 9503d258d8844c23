"""`snapshot report`: its file, its refusals, and the same figures as JSON; no node is reachable."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from msgspec import structs

from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.local import LocalStore
from tests.commands.in_process import run_here
from tests.unit.made_commits import counted, full_commit
from tests.unit.made_figures import timed

COMMENT = "<script>alert(1)</script>"


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A fleet whose store has the snapshot `daily`."""
    (tmp_path / "store").mkdir()
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{tmp_path}/store"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    found = load_fleet(path)
    store = LocalStore(tmp_path / "store")
    identity, _ = ensure_identity(store, found)
    full = structs.replace(timed(full_commit(), 0, in_flight=7), comment=COMMENT)
    assert isinstance(full, FullSnapshot)
    put_commit(store, counted(structs.replace(full, fleet_id=identity.fleet_id)))
    return found


def test_the_page_and_the_document_have_the_same_figures(fleet: Fleet, tmp_path: Path) -> None:
    code, document = run_here(fleet, "report", "daily", "--html", str(tmp_path / "report.html"))
    assert code == 0
    (snapshot,) = document["snapshots"]
    (point,) = snapshot["points"]
    assert (point["in_flight"], point["comment"], point["cut_at"]) == (7, COMMENT, "2026-11-20T00:00:00.000Z")
    page = (tmp_path / "report.html").read_text()
    assert COMMENT not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert document["file"] == str(tmp_path / "report.html")
    # Without a file, and of all snapshots.
    code, other = run_here(fleet, "report")
    assert (code, other["snapshots"], other["file"]) == (0, document["snapshots"], None)


def test_a_snapshot_that_is_not_there_leaves_the_file_as_it_was(fleet: Fleet, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("before")
    code, document = run_here(fleet, "report", "weekly", "--html", str(file))
    assert (code, document["error"]) == (3, "snapshot-missing")
    assert file.read_text() == "before"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["fleet.toml", "report.html", "store"]


def test_a_damaged_snapshot_is_in_the_report_with_its_problem(fleet: Fleet, tmp_path: Path) -> None:
    (commit,) = (tmp_path / "store" / "snapshots" / "daily").glob("snapshot.json")
    commit.write_bytes(commit.read_bytes().replace(b"op-0", b"op-1"))
    code, document = run_here(fleet, "report")
    (snapshot,) = document["snapshots"]
    assert (code, snapshot["state"], snapshot["points"]) == (0, "broken", [])
    assert "is damaged" in snapshot["remark"]


@pytest.mark.parametrize("place", ["missing/report.html", "store", "fifo"])
def test_a_file_that_cannot_be_written_is_refused_before_the_store_is_read(tmp_path: Path, place: str) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(f'name = "shop"\nstore = "file://{tmp_path}/store"\n[[node]]\nid = "a"\ndsn = "port=1"\n')
    (tmp_path / "store").mkdir()
    os.mkfifo(tmp_path / "fifo")
    # The store is not initialised, so that reading it would end with code 3.
    code, document = run_here(load_fleet(path), "report", "--html", str(tmp_path / place))
    assert (code, document["error"]) == (2, "usage")
    assert str(tmp_path / place) in document["message"]
    assert document["hint"]
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
