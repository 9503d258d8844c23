"""The working directory was deleted: a command that needs it says so, and a restore that is done stays done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.commands.restore import _folder
from cutline.cli.output.recovery import write_transactions
from cutline.cli.output.refused_statements import write_refused
from cutline.snapshots.listing.recovery_plan import InDoubtTransaction

PROGRAM = "from cutline.cli.entry import main; main()"
SECONDS_MAX = 60


@pytest.fixture
def gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which no longer exists."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    return folder


@pytest.mark.parametrize("words", [("cluster", "pack", "cutline.tar.gz"), ("demo", "up", "fleet")], ids=" ".join)
@pytest.mark.usefixtures("gone")
def test_a_command_that_needs_the_folder_names_it(words: tuple[str, ...]) -> None:
    line = [sys.executable, "-P", "-c", PROGRAM, *words, "--json", "--quiet"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    document = json.loads(done.stdout)
    assert (done.returncode, document["error"]) == (2, "folder-gone"), document
    assert document["message"] == "the current folder no longer exists"


@pytest.mark.usefixtures("gone")
def test_the_files_of_a_restore_that_is_done_are_a_warning() -> None:
    transaction = InDoubtTransaction("x", "commit", ())
    (line,) = write_transactions(("daily", 3), [transaction], _folder())
    assert line.startswith("warning: transactions in doubt at the cut of increment 3 of daily: 1")
    assert "they can't be written to daily-3-transactions.json: No such file or directory" in line
    path, line = write_refused("operation", [], _folder(), is_published=True)
    assert path is None
    assert "the refused statements can't be written to a file: operation-refused.sql" in line
