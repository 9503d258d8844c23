"""Commands in the background: the prompt is back with the operation's id, and nothing that happens is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.storage.ids import OPERATION_ID
from tests.commands.at_terminal import answer
from tests.commands.snapshot_runs import Runs, command_line, run_command, runs_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS_MAX = 300
LINE = re.compile(rf"{OPERATION_ID.pattern}\n")


@pytest.fixture(scope="module")
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a full snapshot `daily`."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("background"), spark) as found:
        found.full("daily")
        yield found


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for the output of commands in the background."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "cutline"


def begin(runs: Runs, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    """Run a command with --background, to the end of the process that was typed."""
    return subprocess.run(
        [*command_line(runs.fleet, *words), "--background"],
        stdin=stdin, capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
    )  # fmt: skip


def wait_for(runs: Runs, operation: str) -> tuple[int, dict[str, Any]]:
    code, document = run_command(runs.fleet, "wait", operation)
    return code, document["operations"][0]


def until_written(file: Path) -> str:
    """What is in the file at last: the outcome is stored a moment before."""
    deadline = time.monotonic() + SECONDS_MAX
    while not (text := file.read_text()).endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return text


def test_the_prompt_is_back_with_the_id_and_wait_ends_as_the_command_does(runs: Runs, state: Path) -> None:
    typed = begin(runs, "create", "daily", "--incremental")
    assert typed.returncode == 0, typed.stderr
    assert LINE.fullmatch(typed.stdout)
    operation = typed.stdout.strip()
    assert f"snapshot --fleet {runs.fleet.path} wait {operation}\n" in typed.stderr
    code, ended = wait_for(runs, operation)
    assert (code, ended["kind"], ended["snapshot"], ended["increment"]) == (0, "create", "daily", 1)
    assert "is committed" in until_written(state / f"{operation}.out")
    assert "archive WAL" in (state / f"{operation}.log").read_text()
    assert {file.stat().st_mode & 0o777 for file in state.iterdir()} == {0o600}
    assert wait_for(runs, operation)[0] == 0


def test_it_outlives_its_terminal(runs: Runs) -> None:
    with psycopg.connect(runs.fleet.node("s1").dsn) as older:
        # The create waits for this transaction, so its process is there.
        older.execute("SELECT pg_current_xact_id()")
        words = ("create", "hung-up", "--wait", str(SECONDS_MAX), "--background")
        code, document = run_command(runs.fleet, *words)
        process = document["process"]
        assert (code, document["schema"]) == (0, "cutline/background/1")
        assert os.getsid(process) == process != os.getsid(0)
        assert Path(f"/proc/{process}/fd/0").readlink() == Path(os.devnull)
        os.kill(process, signal.SIGHUP)
    assert wait_for(runs, document["operation"])[0] == 0
    result = json.loads(until_written(Path(document["result"])))
    assert (result["snapshot"], result["operation"]) == ("hung-up", document["operation"])
    code, found = run_command(runs.fleet, "delete", "hung-up", "--yes", "--background")
    assert (code, wait_for(runs, found["operation"])[0]) == (0, 0)


@pytest.mark.parametrize("words", [("check", "daily", "--metadata-only"), ("gc", "--yes")], ids=" ".join)
def test_an_operation_without_an_intent_is_found_at_once_and_later(runs: Runs, words: tuple[str, ...]) -> None:
    expected, _ = run_command(runs.fleet, *words)
    code, document = run_command(runs.fleet, *words, "--background")
    assert code == 0
    for _ in range(2):
        code, ended = wait_for(runs, document["operation"])
        assert (code, ended["kind"]) == (expected, words[0])
    assert run_command(runs.fleet, "status")[1]["operations"] == []


def test_what_is_refused_is_shown_as_in_the_foreground(runs: Runs, state: Path) -> None:
    code, document = run_command(runs.fleet, "create", "nothing", "--incremental", "--background")
    assert (code, document["error"]) == (3, "snapshot-missing")
    typed = begin(runs, "create", "daily", "--comment", "")
    assert (typed.returncode, typed.stdout) == (3, "")
    assert "error: snapshot daily already exists" in typed.stderr
    assert "hint: " in typed.stderr
    # Nobody can be asked there.
    code, document = run_command(runs.fleet, "prune", "--keep-last", "1", "--background")
    assert (code, document["error"]) == (2, "confirmation-missing")
    assert "a background command can't ask" in document["message"]
    assert list(state.iterdir()) == []
    code, document = run_command(runs.fleet, "gc", "--dry-run", "--background")
    assert (code, document["error"]) == (2, "usage")


def test_at_a_terminal_a_command_in_the_background_asks_nothing_either(runs: Runs) -> None:
    code, shown = answer(runs.fleet, "y\n", "restore", "daily", "--replace", "--background")
    assert code == 2, shown
    assert "snapshot restore --replace needs confirmation, and a background command can't ask" in shown


def test_ctrl_c_ends_the_command_that_has_no_operation_yet(runs: Runs, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        file = tmp_path / "silent.toml"
        dsn = runs.fleet.primaries[0].dsn
        port = silent.getsockname()[1]
        text = runs.fleet.path.read_text()
        assert dsn in text
        file.write_text(text.replace(dsn, f"postgresql:///bank?host=127.0.0.1&port={port}&user=postgres"))
        words = ["--fleet", str(file), "create", "never", "--background"]
        typed = subprocess.Popen(
            [sys.executable, "-c", "from cutline.cli.main import main; main()", *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        silent.settimeout(SECONDS_MAX)
        connection, _ = silent.accept()
        with connection:
            (child,) = Path(f"/proc/{typed.pid}/task/{typed.pid}/children").read_text().split()
            typed.send_signal(signal.SIGINT)
            out, err = typed.communicate(timeout=SECONDS_MAX)
    assert (typed.returncode, out) == (130, "")
    assert "error: stopped by Ctrl-C" in err
    assert not Path(f"/proc/{child}").exists()


def test_a_prune_is_waited_for_as_a_whole(runs: Runs) -> None:
    """Its removals, one after the other, are operations of their own. This test is the last one: `daily` goes."""
    for name in ("second", "third"):
        runs.full(name)
    typed = begin(runs, "prune", "--keep-last", "1", "--yes")
    assert typed.returncode == 0, typed.stderr
    operation = typed.stdout.strip()
    code, ended = wait_for(runs, operation)
    assert (code, ended["kind"], ended["snapshot"], ended["state"]) == (0, "prune", None, "done")
    store = runs.fleet.store.open()
    assert [store.list(f"snapshots/{name}") for name in ("daily", "second")] == [[], []]
    _, document = run_command(runs.fleet, "history", "--last", "3")
    removals = {one["snapshot"]: one for one in document["operations"] if one["operation"] != operation}
    assert {name: one["kind"] for name, one in removals.items()} == {"daily": "delete", "second": "delete"}
    assert all(
        ended["began_at"] <= one["began_at"] <= one["ended_at"] <= ended["ended_at"] for one in removals.values()
    )
    for unit in ("objects", "bytes"):
        assert ended["volumes"][unit] == sum(one["volumes"][unit] for one in removals.values())
    # What it has nothing to do for has no operation.
    code, document = run_command(runs.fleet, "prune", "--keep-last", "1", "--yes", "--background")
    assert (code, document["schema"], document["steps"]) == (0, "cutline/prune/1", [])
    _, document = run_command(runs.fleet, "history", "--last", "1")
    assert document["operations"][0]["operation"] in {operation, *(one["operation"] for one in removals.values())}
