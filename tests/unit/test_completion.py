"""Shell completion, from outside: the program is asked as the scripts of bash and zsh ask it, and by these shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cutline.cli.main import COMMANDS
from cutline.fleet.config import load_fleet
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.local import LocalStore
from tests.programs.lacking import skip_without
from tests.run.soak import first
from tests.unit.made_garbage import StoreBuilder

# A busy machine is waited for.
ASK = "import cutline.cli.output.completing as c; c.SECONDS_MAX = 50; from cutline.cli.main import main; main()"
ROOT = Path(__file__).parent.parent.parent
SECONDS_MAX = 60
SHARED = {"--fleet", "--json", "--quiet", "--verbose"}


def ask(shell: str, **words: str) -> str:
    """What the program answers to the completion script of a shell."""
    environment = {**os.environ, "_SNAPSHOT_COMPLETE": f"complete_{shell}", **words}
    done = subprocess.run(
        [sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=True
    )
    assert done.stderr == ""
    return done.stdout


def complete(line: str) -> set[str]:
    """What bash offers for the last word of a line."""
    return set(ask("bash", COMP_WORDS=line, COMP_CWORD=str(len(line.split(" ")) - 1)).split())


def test_commands_are_completed() -> None:
    assert complete("snapshot ") == set(COMMANDS)
    assert complete("snapshot re") == {name for name in COMMANDS if name.startswith("re")} >= {"restore", "resume"}
    assert complete("snapshot --quiet cre") == {"create"}
    assert complete("snapshot demo ") == {"up", "load", "down"}


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("snapshot create nightly --incr", {"--incremental"}),
        ("snapshot --fleet x.toml restore nightly --at", {"--at"}),
        ("snapshot list --f", {"--flat", "--fleet"}),
        ("snapshot demo up try --sh", {"--shards"}),
        ("snapshot key --q", {"--quiet"}),
        # What stands before is known to the command, or shared.
        ("snapshot create nightly --json --incr", {"--incremental"}),
        ("snapshot create nightly --fleet x.toml --incr", {"--incremental"}),
        ("snapshot bogus --incr", set()),
        # No option: bash completes a file's name.
        ("snapshot check nightly --junit ", set()),
    ],
)
def test_options_are_completed_though_their_command_is_imported_late(line: str, options: set[str]) -> None:
    assert complete(line) == options


def test_the_shared_options_are_offered_after_every_command() -> None:
    assert complete("snapshot history -") == SHARED | {"--name", "--last", "--help"}


def test_zsh_gets_options_with_their_help() -> None:
    answer = ask("zsh", _TYPER_COMPLETE_ARGS="snapshot create nightly --incr")
    assert '"--incremental":"Take the next increment of snapshot NAME."' in answer


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """A fleet file whose store has the snapshots `nightly` and `weekly`, and an operation without an outcome."""
    path = tmp_path / "fleet.toml"
    path.write_text(
        f'name = "shop"\nstore = "file://{tmp_path}/store"\n'
        '[[node]]\nid = "a"\ndsn = "host=127.0.0.1 port=1 dbname=shop"\n'
    )
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, load_fleet(path))
    builder = StoreBuilder(store)
    builder.take_full("nightly")
    builder.take_full("weekly")
    builder.begin_create("other")
    return path


@pytest.mark.parametrize(
    "command", first(["show", "cancel --name", "restore", "restore-resume", "drill", "check", "delete"], 2)
)
def test_snapshots_are_completed_by_name(fleet: Path, command: str) -> None:
    assert complete(f"snapshot --fleet {fleet} {command} n") == {"nightly"}


def test_names_are_those_of_the_fleet_of_the_line_wherever_that_stands(
    fleet: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert complete("snapshot show ") == set()
    monkeypatch.setenv("SNAPSHOT_FLEET", str(fleet))
    assert complete("snapshot show ") == {"nightly", "weekly"}
    assert complete(f"snapshot --fleet {fleet}-missing show ") == set()
    assert ask("fish", _TYPER_COMPLETE_ARGS="snapshot show we", _TYPER_COMPLETE_FISH_ACTION="get-args") == "weekly\n"
    assert '"nightly"' in ask("zsh", _TYPER_COMPLETE_ARGS="snapshot show ni")


def test_operations_that_have_not_ended_are_completed_by_id(fleet: Path) -> None:
    (operation,) = complete(f"snapshot --fleet {fleet} cancel ")
    assert "other" not in operation
    assert complete(f"snapshot --fleet {fleet} wait {operation[:4]}") == {operation}
    assert complete(f"snapshot --fleet {fleet} wait x") == set()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_script_of_a_shell_is_one_that_it_can_run(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        skip_without(shell, "it is not on the PATH")
    program = tmp_path / "snapshot"
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c '{ASK}' \"$@\"\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words: str) -> str:
        done = subprocess.run(
            words, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=True
        )  # fmt: skip
        return done.stdout

    # The program asks which shell its parent is. A command that is not the last one has the shell as its parent.
    script = run(shell, "-c", "snapshot --show-completion; :")
    if shell == "bash":
        # The script's function is called as bash calls it.
        words = "COMP_WORDS=(snapshot create nightly --incr) COMP_CWORD=3"
        call = f'{script}\n{words}\n_snapshot_completion snapshot\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    else:
        # _arguments is zsh's own; what it is given is looked at.
        called = "_arguments() { print -r -- $@ }\ncompdef() { : }\nwords=(snapshot create nightly --incr) CURRENT=4"
        call = f"{called}\n{script}\n_snapshot_completion"
    assert "--incremental" in run(shell, "-c", call)
