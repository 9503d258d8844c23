"""The one rule of the commands that destroy: who is asked, who needs --yes, and what a refusal looks like."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import cutline.cli.main
from cutline.fleet.config import Fleet
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.local import LocalStore
from tests.commands.at_terminal import answer
from tests.commands.snapshot_runs import command_line
from tests.unit.made_fleets import unreachable_fleet
from tests.unit.made_garbage import StoreBuilder

SECONDS_MAX = 60
COMMANDS = [
    ("delete", "daily"),
    ("prune", "--keep-last", "1"),
    ("gc", "--grace", "0"),
    ("restore --replace", "daily"),
    ("restore-abandon", "daily"),
    ("restore-discard",),
]


def run(fleet: Fleet, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(fleet, *words), stdin=stdin, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A fleet none of whose nodes is reachable."""
    return unreachable_fleet(tmp_path)


@pytest.fixture
def builder(fleet: Fleet, tmp_path: Path) -> StoreBuilder:
    """Makes objects in the fleet's store."""
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, fleet)
    return StoreBuilder(store)


@pytest.fixture
def leftover(builder: StoreBuilder) -> str:
    """The key of an object that is garbage."""
    failed = builder.begin_create("other")
    builder.store_base(failed)
    record_outcome(builder.store, failed, "failed")
    return next(key for key in builder.store.list("snapshots/other"))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_without_a_terminal_a_command_needs_yes_and_contacts_nothing(
    tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *arguments = words
    # There is not even a fleet file.
    line = ["--fleet", str(tmp_path / "none.toml"), *command.split(), *arguments]
    assert cutline.cli.main.run(line) == 2
    assert capsys.readouterr().err == (
        f"error: snapshot {command} needs confirmation, and stdin or stderr is not a terminal; nothing was changed\n"
        "hint: in a script, add --yes; to see only the plan, add --dry-run\n"
    )
    assert cutline.cli.main.run([*line, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["error"], document["code"]) == ("confirmation-missing", 2)
    assert document["details"] == {"command": command, "option": "--yes"}
    # With --yes it goes on, and misses the file.
    assert cutline.cli.main.run([*line, "--yes"]) == 2
    assert "none.toml" in capsys.readouterr().err


def test_a_script_meets_the_refusal_of_the_last_snapshot_before_the_missing_yes(
    fleet: Fleet, builder: StoreBuilder
) -> None:
    builder.take_full("daily")
    refused = run(fleet, "delete", "daily")
    assert (refused.returncode, "daily is the last restorable snapshot" in refused.stderr) == (3, True), refused
    missing = run(fleet, "delete", "daily", "--force")
    assert (missing.returncode, "needs confirmation" in missing.stderr) == (2, True), missing


@pytest.mark.parametrize("text", ["y\n", "yes\n", "n\n", "\n"])
def test_a_terminal_is_asked_and_only_yes_goes_ahead(
    fleet: Fleet, builder: StoreBuilder, leftover: str, text: str
) -> None:
    is_done = text.startswith("y")
    code, shown = answer(fleet, text, "gc", "--grace", "0")
    assert "would remove" in shown
    assert "remove this garbage? [y/N]" in shown
    assert (code, "nothing was changed" in shown) == ((0, False) if is_done else (3, True)), shown
    assert builder.store.exists(leftover) is not is_done


def test_a_plan_that_goes_to_a_file_is_not_asked_about(fleet: Fleet, builder: StoreBuilder, leftover: str) -> None:
    terminal, other_end = os.openpty()
    try:
        os.write(terminal, b"y\n")
        done = subprocess.run(
            command_line(fleet, "gc", "--grace", "0"), stdin=other_end, stdout=subprocess.PIPE, stderr=other_end,
            timeout=SECONDS_MAX, check=False,
        )  # fmt: skip
        shown = os.read(terminal, 4096).decode()
    finally:
        os.close(terminal)
        os.close(other_end)
    assert (done.returncode, builder.store.exists(leftover)) == (2, True)
    assert "would go to a file or a pipe" in shown


def test_the_end_of_the_input_is_a_no(fleet: Fleet, builder: StoreBuilder, leftover: str) -> None:
    code, _ = answer(fleet, "\x04", "gc", "--grace", "0")
    assert (code, builder.store.exists(leftover)) == (3, True)


def test_bytes_in_another_encoding_are_a_no(
    fleet: Fleet, builder: StoreBuilder, leftover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in all locales but C.
    monkeypatch.setenv("PYTHONIOENCODING", "utf-8:strict")
    code, shown = answer(fleet, "j\udce4\n", "gc", "--grace", "0")
    assert (code, builder.store.exists(leftover)) == (3, True), shown


def test_yes_asks_nothing_and_a_dry_run_needs_none(fleet: Fleet, leftover: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    done = run(fleet, "gc", "--grace", "0", "--dry-run")
    assert (done.returncode, "[y/N]" in done.stderr, store.exists(leftover)) == (0, False, True)
    done = run(fleet, "gc", "--grace", "0", "--yes")
    assert (done.returncode, "[y/N]" in done.stderr, store.exists(leftover)) == (0, False, False)


def test_where_nothing_would_be_destroyed_nothing_is_asked(fleet: Fleet, builder: StoreBuilder) -> None:
    builder.take_full("daily")
    code, shown = answer(fleet, "", "gc", "--grace", "0")
    assert (code, "[y/N]" in shown) == (0, False), shown


def test_the_word_error_has_a_colour_at_a_terminal_alone(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    red = "\x1b[1;31merror:\x1b[0m "
    code, shown = answer(fleet, "", "show", "a/b")
    assert (code, red in shown) == (2, True), shown
    assert run(fleet, "show", "a/b").stderr.startswith("error: ")
    monkeypatch.setenv("NO_COLOR", "1")
    assert red not in answer(fleet, "", "show", "a/b")[1]
