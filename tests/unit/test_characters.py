"""Output where the encoding lacks characters: no command ends with that, and what is drawn has an ASCII form.

Commands run as real processes, in a pipe and at a terminal, on the store of a snapshot whose comment is not ASCII.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec import structs

from cutline.cli.output.restore_report import SQL_SHOWN_MAX, drill_lines
from cutline.cli.process.streams import ASCII_LEVELS, BLOCKS, FORMS, RULE, writable
from cutline.fleet.config import AssertionTable, load_fleet
from cutline.fleet.record import Time
from cutline.restore.drill.assertions import AssertionResult
from cutline.restore.drill.drill import DrillReport
from cutline.restore.plan.report import NodeReport, RestoreReport
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.local import LocalStore
from tests.unit.made_commits import counted, full_commit
from tests.unit.made_figures import timed

PROGRAM = (sys.executable, "-c", "from cutline.cli.main import main; main()")
COMMENT = "ça va … 長 — ok"
ASCII_COMMENT = r"\xe7a va ... \u9577 - ok"
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}
UTF_8 = {"PYTHONUTF8": "1"}
COMMANDS = (
    ("list",), ("list", "--flat"), ("list", "--csv"), ("show", "daily"), ("show", "daily", "--timeline"), ("history",),
    ("status", "--nodes"),
)  # fmt: skip
TABLES = [words for words in COMMANDS if "--csv" not in words]


class Shown(NamedTuple):
    """What a process wrote, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet that no node answers for, whose store has the snapshot `daily` and a check that has failed."""
    folder = tmp_path_factory.mktemp("characters")
    (folder / "store").mkdir()
    (folder / "fleet.toml").write_text(
        f'name = "shop"\nstore = "file://{folder}/store"\n'
        # Without merges, the chain would be warned of once it is old.
        '[retention]\nmerge = "weekly"\n[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    store = LocalStore(folder / "store")
    identity, _ = ensure_identity(store, load_fleet(folder / "fleet.toml"))
    full = structs.replace(timed(full_commit(), 0, in_flight=7), comment=COMMENT, fleet_id=identity.fleet_id)
    assert isinstance(full, FullSnapshot)
    put_commit(store, counted(full))
    command = Command("check", "daily", "20261120T000000Z-000000000a")
    ending = Ending("failed", COMMENT, code=6)
    record_without_intent(store, command, Time("2026-11-20T00:00:00.000Z"), "cutline check daily ops@db7:1", ending)
    return folder


def environment(**extra: str) -> dict[str, str]:
    unset = ("LC_", "LANG", "PYTHONIO", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    return kept | {"TERM": "xterm-256color"} | extra


def in_pipe(folder: Path, *words: str, **extra: str) -> Shown:
    done = subprocess.run(
        [*PROGRAM, *words, "--fleet", str(folder / "fleet.toml")],
        env=environment(**extra), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return Shown(done.returncode, done.stdout.decode(), done.stderr.decode())


def at_terminal(folder: Path, width: int, *words: str, **extra: str) -> Shown:
    leader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    process = subprocess.Popen(
        [*PROGRAM, *words, "--fleet", str(folder / "fleet.toml")],
        env=environment(**extra), stdin=terminal, stdout=terminal, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(terminal)
    written = b""
    try:
        while part := os.read(leader, 65536):
            written += part
    except OSError:
        pass  # the other end is closed
    os.close(leader)
    _, err = process.communicate(timeout=60)
    return Shown(process.returncode, written.decode().replace("\r\n", "\n"), err.decode())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_in_a_pipe_neither_encoding_nor_width_change_what_is_said(folder: Path, words: tuple[str, ...]) -> None:
    shown = in_pipe(folder, *words, COLUMNS="40", **ASCII)
    assert shown.code == 0, shown.err
    assert shown.out.isascii()
    assert shown.err.isascii()
    whole = in_pipe(folder, *words, COLUMNS="300", PYTHONUTF8="1")
    assert (COMMENT in whole.out) == (ASCII_COMMENT in shown.out) == (words[0] != "status")
    # But for what is drawn, and spaces, since columns become wider.
    levels = str.maketrans(dict.fromkeys("-_.:=+*#/~", "?"))
    expected, found = writable(whole.out, "ascii").translate(levels), shown.out.translate(levels)
    assert [line.split() for line in found.splitlines()] == [line.split() for line in expected.splitlines()]


@pytest.mark.parametrize(
    ("words", "extra"),
    [*((words, ASCII) for words in TABLES), (("list",), UTF_8), (("show", "daily", "--timeline"), UTF_8)],
)
def test_no_line_of_a_table_is_longer_than_the_terminal(
    folder: Path, words: tuple[str, ...], extra: dict[str, str]
) -> None:
    shown = at_terminal(folder, 80, *words, NO_COLOR="1", **extra)
    assert shown.code == 0, shown.err
    text = shown.out.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\x1b" not in text
    # The terminal breaks what is a sentence.
    lines = [line for line in text.splitlines() if ": " not in line[:10]]
    assert [line for line in lines if len(line) > 80] == []


def test_what_is_drawn_has_an_ascii_form_as_wide_as_it() -> None:
    assert "".join(FORMS.values()).isascii()
    assert {one for one, form in FORMS.items() if len(form) != 1} == {"…"}
    assert writable(BLOCKS, "ascii") == ASCII_LEVELS
    # Where the encoding has a character, it stays.
    assert writable("ç …", "iso-8859-1") == "ç ..."
    assert writable("長", "no such encoding") == r"\u9577"
    assert writable("長", None) == "長"


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "cp1252", "gbk", "utf-8"])
def test_a_stream_takes_every_character(encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=RULE)
    # Surrogates are what a file name that is no text has.
    stream.write("".join(map(chr, (*range(0xA0, 0x3000), 0xDCC3, 0x1F600))))
    stream.flush()


def test_the_lines_of_a_drill_are_written_in_ascii() -> None:
    failed = AssertionResult(AssertionTable("a", f"SELECT '{'長' * SQL_SHOWN_MAX}'"), holds=False, why="é")
    restored = RestoreReport("daily", 0, "op", [NodeReport("a", "drill", 5)], rows=5)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=RULE)
    stream.writelines(drill_lines(DrillReport(restored, (failed,), 1.0)))
    stream.seek(0)
    assert r"\u9577...: \xe9" in stream.read()
