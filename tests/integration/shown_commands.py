"""The commands that README.md and docs/ show: find them in the pages, parse them with the real parser, run them.

Pages show commands in code blocks, indented or fenced, and in inline code. In a block with `$ ` prompts, the lines
below a command are its whole output on stdout.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import typer.main

from cutline.cli.main import COMMANDS, app, hoist_shared_options, run
from cutline.embedded.fleet import is_fleet, stop_fleet
from cutline.fleet.config import load_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent.parent.parent
PROGRAM = "snapshot"
# The fleet of the README's tour.
FLEET = Path("try")
PROMPT = "$ "
# Stands for any number of lines in a page's output.
ELISION = "…"
FENCE = re.compile(r"^(`{3,})(\w*).*\n((?:.*\n)*?)^\1\n", re.MULTILINE)
INDENTED = re.compile(r"(?:^\n|\A)((?: {4}.*\n|\n(?= {4}))+)", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
# A variable of the shell and the command whose output it takes.
ASSIGNMENT = re.compile(rf"(\w+)=\$\(({PROGRAM} .*)\)")
# Placeholders that pages write for a number.
NUMBERS = {"N": "1", "D": "30", "K": "2"}
WAIT_SECONDS_MAX = 300

# What differs from run to run. Words and columns remain.
MASKS = (
    (re.compile(r"(?i)\d{8}t\d{6}z[_-][0-9a-f]+"), "ID"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\dZ?"), "MOMENT"),
    (re.compile(r"/\S*/\S*"), "PATH"),
    (re.compile(r"(?<![A-Za-z0-9])(?=[a-f]*\d)[0-9a-f]{8,}(?![A-Za-z0-9])"), "ID"),
    # A chain that nobody has written to has none.
    (re.compile(r"[▁▂▃▄▅▆▇█]+"), " "),
    (re.compile(r"just now|\d+ (?:s|min|h|d) ago"), "AGE"),
    (re.compile(r"\d[\d,]*(?:\.\d+)? (?:B|bytes|KiB|MiB|GiB)(?![A-Za-z])"), "SIZE"),
    (re.compile(r"\d+ (?:min \d+ s|h \d+ min)|\d+\.\d+ m?s(?![A-Za-z])"), "TIME"),
    (re.compile(r"(?<![A-Za-z])\d[\d,.:-]*"), "0"),
    (re.compile(r" +"), " "),
)


@dataclass(frozen=True, slots=True)
class ShownCommand:
    """A command line of a page, without its comment. `output` is None if the page does not show it."""

    page: str
    line: str
    output: tuple[str, ...] | None = None
    in_sentence: bool = False

    @property
    def words(self) -> list[str]:
        """The words after `snapshot`, as the shell would split them."""
        return shlex.split(ASSIGNMENT.sub(r"\2", self.line))[1:]


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(text: str) -> list[list[str]]:
    """The code blocks of a page, in order, as lines without indentation."""
    found: list[tuple[int, str]] = [(match.start(), match[3]) for match in FENCE.finditer(text)]
    # Same length, so that positions in the rest are those of the page.
    rest = FENCE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), text)
    found += [(match.start(), match[1]) for match in INDENTED.finditer(rest)]
    return [re.sub(r"(?m)^ {4}", "", body).strip("\n").split("\n") for _, body in sorted(found)]


def commands_of(page: Path) -> list[ShownCommand]:
    """The shell commands in a page's blocks: those after a prompt, with their output, and bare `snapshot` lines.

    A line such as `operation=$(snapshot …)` is one, too.
    """
    found: list[ShownCommand] = []
    for block in blocks_of(page.read_text(encoding="utf-8")):
        has_prompts = any(line.startswith(PROMPT) for line in block)
        for line in block:
            if line.startswith(PROMPT):
                found.append(ShownCommand(page.name, line.removeprefix(PROMPT), ()))
            elif has_prompts:
                last = found[-1]
                found[-1] = ShownCommand(last.page, last.line, (*(last.output or ()), line))
            elif ASSIGNMENT.fullmatch(line):
                found.append(ShownCommand(page.name, line))
            elif line.startswith(f"{PROGRAM} "):
                lines = re.split(r"\s*(?:&&|;)\s*", re.sub(r"\s+#.*", "", line))
                found += [ShownCommand(page.name, one) for one in lines]
    return found


def mentions_of(page: Path) -> list[ShownCommand]:
    """The commands in a page's sentences, such as `snapshot gc` or, without the program, `create NAME --terminal`."""
    found: list[ShownCommand] = []
    for match in INLINE.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = match[1].removeprefix(f"{PROGRAM} ")
        name, *rest = text.split()
        is_command = name in COMMANDS and any(word.startswith("--") or word.isupper() for word in rest)
        if is_command or (name in COMMANDS and text != match[1]):
            found.append(ShownCommand(page.name, f"{PROGRAM} {text}", in_sentence=True))
    return found


def parse(command: ShownCommand) -> None:
    """Parse a command line as the program does; raise its usage error.

    In a sentence, arguments may be missing, and so may the value of the last option: `restore --to`.
    """
    words = [NUMBERS.get(word, word) for word in hoist_shared_options(command.words)]
    try:
        with typer.main.get_command(app).make_context(PROGRAM, words) as context:
            _parse_command(context, words[words.index(context.invoked_subcommand or words[0]) :])
    except Exception as error:
        if not (command.in_sentence and type(error).__name__ in {"MissingParameter", "BadOptionUsage"}):
            raise


def _parse_command(parent: Any, words: list[str]) -> None:
    name, *rest = [word for word in words if word != "&"]
    with parent.command.commands[name].make_context(name, rest, parent=parent) as context:
        if rest and rest[0] in getattr(context.command, "commands", {}):
            _parse_command(context, rest)


def shape_of(line: str) -> str:
    """Mask what differs from run to run in a line of output."""
    for mask, name in MASKS:
        line = mask.sub(name, line)
    return line.strip()


def difference(expected: tuple[str, ...], output: str) -> str:
    """How the shape of an output differs from the page's; "" if it does not."""
    shown = [shape_of(line) for line in expected]
    while shown and not shown[-1]:
        shown.pop()
    # An elision stands for any lines, or none.
    pattern = "".join(r"(?:.*\n)?" if line == ELISION else f"{re.escape(line)}\n" for line in shown)
    # A command that prints nothing has no lines.
    lines = output.rstrip("\n").split("\n") if output.strip("\n") else []
    printed = "".join(f"{shape_of(line)}\n" for line in lines)
    return (
        ""
        if re.fullmatch(pattern, printed, re.DOTALL)
        else f"the page shows\n{chr(10).join(expected)}\nbut the command printed\n{output}"
    )


@dataclass(slots=True)
class Shell:
    """Runs command lines one after the other in this process; a line with `&` runs in a subprocess until `wait`.

    `--background` starts its own command line again, so a line that has it runs in a subprocess, too.

    `changes` are regular expressions and their replacements, applied to every line first. `codes` are the exit codes of
    commands that do not end with 0. `outputs` holds the output of every command that was run, as the page shows the
    command.
    """

    changes: Mapping[str, str] = field(default_factory=dict)
    codes: Mapping[str, int] = field(default_factory=dict)
    outputs: dict[ShownCommand, str] = field(default_factory=dict)
    _background: subprocess.Popen[str] | None = None
    _variables: dict[str, str] = field(default_factory=dict)

    def run_shown(self, command: ShownCommand) -> None:
        """Run one line and keep its output; raise AssertionError unless it exits as it should."""
        line = command.line
        for pattern, text in self.changes.items():
            line = re.sub(pattern, text, line)
        self.outputs[command] = self._run(line)

    def close(self) -> None:
        """End the background process if it is still running."""
        if self._background:
            self._background.terminate()
            self._background.communicate(timeout=WAIT_SECONDS_MAX)

    def _run(self, line: str) -> str:
        if assignment := ASSIGNMENT.fullmatch(line):
            self._variables[assignment[1]] = self._run(assignment[2]).strip()
            return ""
        program, *words = shlex.split(Template(line).safe_substitute(self._variables))
        if program == "export":
            name, _, value = words[0].partition("=")
            os.environ[name] = value
            return ""
        if program == "wait" and self._background:
            output = _output_of(self._background)
            self._background = None
            return output
        assert program == PROGRAM, f"{line}: only {PROGRAM}, export and wait can be run"
        if words[-1] == "&":
            self._background = _start(words[:-1])
            if words[:2] == ["demo", "load"]:
                _await_transfers()
            return ""
        if "--background" in words:
            return _output_of(_start(words))
        with _captured() as streams:
            code = run(words)
        assert code == self.codes.get(line, 0), f"{line}: exit {code}\n{streams[0].getvalue()}{streams[1].getvalue()}"
        return streams[0].getvalue()


@dataclass(frozen=True, slots=True)
class SharedSpark:
    """A stand-in for a SparkStart: the session of all tests, which no command stops."""

    running: SparkSession
    is_brief: bool = False

    def session(self) -> SparkSession:
        return self.running

    def ended(self, _: BaseException | None) -> None:
        return None

    def stop(self, **_: object) -> None:
        pass


@contextlib.contextmanager
def shell_in(directory: Path, spark: SparkSession, shell: Shell) -> Iterator[Shell]:
    """Let the shell run its lines in the folder, in one Spark session; at the end delete their fleet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("SNAPSHOT_FLEET", "")
        patch.setenv("TERM", "xterm")
        patch.setenv("XDG_STATE_HOME", str(directory / "state"))
        patch.setattr("cutline.spark.start.start_spark", lambda *_, **__: SharedSpark(spark))
        try:
            yield shell
        finally:
            shell.close()
            if is_fleet(FLEET):
                stop_fleet(FLEET, delete=True)


def _start(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from cutline.cli.main import main; main()", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def _await_transfers() -> None:
    """Wait until the bank writes: the pages show its changes, and the commands in this warm process are fast."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    with psycopg.connect(load_fleet(FLEET / "fleet.toml").primaries[0].dsn, autocommit=True) as connection:
        while connection.execute("SELECT EXISTS (SELECT FROM transfer)").fetchone() != (True,):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _output_of(process: subprocess.Popen[str]) -> str:
    output, problems = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 0, problems
    return output


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield out, err
