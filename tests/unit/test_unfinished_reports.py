"""A JUnit report of an earlier run does not survive the start of the next run, however early that is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cutline.check.report import CheckReport, Compared, SnapshotReport
from cutline.cli import entry
from cutline.cli.output import failure
from cutline.cli.output.junit import junit_of, junit_of_error, reporting_errors
from cutline.cli.process.unfinished_reports import find_report, name_stop, replace_earlier_report
from cutline.storage.errors import StoppedError

VALID = junit_of(CheckReport((SnapshotReport("a", 1, Compared(objects=1)),), 1.0))
# The program is stopped while it imports the module of a command.
STOPPED = """
import builtins, os, signal, sys
from cutline.cli.entry import main
original = builtins.__import__
def importing(name, *rest, **named):
    if name == "cutline.cli.main":
        os.kill(os.getpid(), signal.{name})
    return original(name, *rest, **named)
builtins.__import__ = importing
main()
"""


def same(report: str, expected: str) -> bool:
    return ElementTree.canonicalize(report, strip_text=True) == ElementTree.canonicalize(expected, strip_text=True)


@pytest.mark.parametrize(("words", "found"), [
    (["check", "--junit", "a.xml"], ("check", "a.xml")),
    (["--fleet", "check", "drill", "daily", "--junit=b.xml", "--quiet"], ("drill", "b.xml")),
    (["--quiet", "check", "--junit", "a.xml", "--junit", "c.xml"], ("check", "c.xml")),
    (["check"], None),
    (["check", "--", "--junit", "a.xml"], None),
    (["check", "--help", "--junit", "a.xml"], None),
    (["create", "check", "--junit", "a.xml"], None),
    (["--junit", "a.xml"], None),
    (["check", "--junit"], None),
])  # fmt: skip
def test_the_report_is_found_in_the_words(words: list[str], found: tuple[str, str] | None) -> None:
    assert find_report(words) == found


def test_an_earlier_report_says_that_this_run_did_not_finish(tmp_path: Path) -> None:
    file = tmp_path / "check.xml"
    file.write_text(VALID)
    replace_earlier_report(["check", "--junit", str(file)])
    expected = junit_of_error("snapshot check", "the check did not finish", "unfinished")
    assert same(file.read_text(), expected)
    name_stop(["check", "--junit", str(file)], 'stopped by "SIGTERM" <&>\x1b', "terminated")
    assert same(file.read_text(), junit_of_error("snapshot check", 'stopped by "SIGTERM" <&>\x1b', "terminated"))


@pytest.mark.parametrize("text", ["notes", "<?xml version='1.0'?><project/>", ""])
def test_no_other_file_is_replaced(text: str, tmp_path: Path) -> None:
    file = tmp_path / "check.xml"
    file.write_text(text)
    replace_earlier_report(["check", "--junit", str(file)])
    name_stop(["check", "--junit", str(file)], "stopped by SIGTERM", "terminated")
    assert file.read_text() == text
    missing = tmp_path / "none.xml"
    replace_earlier_report(["check", "--junit", str(missing)])
    assert not missing.exists()
    replace_earlier_report(["check", "--junit", str(tmp_path)])


def test_a_finished_report_names_no_signal_that_came_later(tmp_path: Path) -> None:
    file = tmp_path / "check.xml"
    file.write_text(VALID)
    name_stop(["check", "--junit", str(file)], "stopped by SIGTERM", "terminated")
    assert file.read_text() == VALID


def test_a_stopped_command_that_reports_its_work_leaves_its_report_unfinished(tmp_path: Path) -> None:
    """The signal is named together with what the command left (cli/main.py)."""
    file = tmp_path / "drill.xml"
    with pytest.raises(StoppedError), reporting_errors(file, "snapshot drill"):
        raise StoppedError("the servers are gone")
    assert "the drill did not finish" in file.read_text()


@pytest.mark.parametrize(("name", "code", "message", "kind"), [
    ("SIGTERM", 8, "stopped by SIGTERM", "terminated"),
    ("SIGINT", 130, "stopped by Ctrl-C", "interrupted"),
])  # fmt: skip
def test_a_check_that_is_stopped_while_it_starts_names_the_signal(
    name: str, code: int, message: str, kind: str, tmp_path: Path
) -> None:
    file = tmp_path / "check.xml"
    file.write_text(VALID)
    words = [sys.executable, "-c", STOPPED.format(name=name), "check", "--quiet", "--junit", str(file)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, timeout=60, env=dict(os.environ))
    assert done.returncode == code, done.stderr
    assert same(file.read_text(), junit_of_error("snapshot check", message, kind))


def test_the_exit_codes_at_the_start_are_those_of_all_commands() -> None:
    assert (entry.CANCELLED, entry.INTERRUPTED) == (failure.CANCELLED, failure.INTERRUPTED)
