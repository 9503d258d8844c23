"""Run another `snapshot` command in its own process, and stop it if this process is interrupted.

The command's memory and JVM are gone when its process ends, and a user can run the same command.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import IO, Any

from msgspec import Struct

from cutline.cli.process.detaching import PROGRAM
from cutline.spark.session_folder import lasting_folder

# Long enough to undo a command, for example to wait for a slot or to drop databases. The watch may wait for the command
# of its task and then for those that run concurrently, and its supervisor gives it two minutes (docs/systemd,
# docs/kubernetes).
CLEAN_UP_SECONDS_MAX = 50.0
POLL_SECONDS = 0.1
READER_SECONDS_MAX = 5.0


class CommandResult(Struct, frozen=True):
    """The exit code of a command and its JSON document; {} if it did not write a document."""

    code: int
    document: dict[str, Any]

    @property
    def text(self) -> str:
        """The message of the command's error, or its result."""
        ended = f"exit code {self.code}" if self.code >= 0 else f"ended by signal {-self.code}"
        return str(self.document.get("message") or self.document.get("result") or ended)

    @property
    def hint(self) -> str:
        """The hint of the command's error."""
        return str(self.document.get("hint") or "")


class RunningCommand(Struct):
    """A running command. Its stdout goes to an unnamed temporary file."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]
    reader: Thread | None = None  # of the command's notes

    def result(self) -> CommandResult | None:
        """Return the result; None while the command is running."""
        code = self.process.poll()
        if code is None:
            return None
        if self.reader is not None:
            # A program that the command has left running may keep stderr open.
            self.reader.join(READER_SECONDS_MAX)
        self.output.seek(0)
        try:
            document = json.loads(self.output.read() or b"{}")
        except ValueError:
            document = {}
        return CommandResult(code, document if isinstance(document, dict) else {})

    def stop(self) -> None:
        """Stop the command with SIGTERM, and wait until it has cleaned up; kill it if that takes too long."""
        self.ask_to_stop()
        self.end_by(time.monotonic() + CLEAN_UP_SECONDS_MAX)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the command, if it is running."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    def end_by(self, deadline: float) -> None:
        """Wait for the end of the command; kill it if it is still running at this time.monotonic."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            # Kill the process group, which includes the JVM.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


_starts: list[Future[RunningCommand]] = []


def start_command(fleet_file: Path, words: Sequence[str], note: Callable[[str], None] | None = None) -> RunningCommand:
    """Start `snapshot` with these words; signals to this process group will not reach it.

    `note` gets the command's notes as soon as they are written, in another thread.
    """
    # With --quiet, notes about waits would be left out.
    options = ["--json"] if note else ["--json", "--quiet"]
    return start_program([*PROGRAM, "--fleet", str(fleet_file), *options, *words], note)


def start_program(arguments: Sequence[str], note: Callable[[str], None] | None = None) -> RunningCommand:
    """Start this Python with arguments, as start_command starts `snapshot`."""
    _starts[:] = [start for start in _starts if not start.done() or _runs(start)]
    start: Future[RunningCommand] = Future()
    # Append it first, so that stop_commands finds it if this thread is interrupted.
    _starts.append(start)
    # A signal could interrupt this thread between the start of the process and Popen's return, so use another thread.
    try:
        Thread(target=_start, args=(start, arguments, note), name="start command", daemon=True).start()
    except RuntimeError as error:  # for example, if the limit on processes is reached
        raise OSError(errno.EAGAIN, str(error)) from error
    return start.result()


def stop_commands() -> None:
    """Stop all commands that are running; together they have as much time to clean up as one of them."""
    # A start that could be cancelled will never run.
    running = [start.result() for start in list(_starts) if not start.cancel() and _runs(start)]
    for command in running:
        command.ask_to_stop()
    deadline = time.monotonic() + CLEAN_UP_SECONDS_MAX
    for command in running:
        command.end_by(deadline)


def _runs(start: Future[RunningCommand]) -> bool:
    """Whether the command is running; waits for it to start."""
    return start.exception() is None and start.result().process.poll() is None


def _start(start: Future[RunningCommand], arguments: Sequence[str], note: Callable[[str], None] | None) -> None:
    if not start.set_running_or_notify_cancel():
        return
    try:
        start.set_result(_spawn(arguments, note))
    except BaseException as error:  # noqa: BLE001  # raised in the thread that waits
        start.set_exception(error)


def _spawn(arguments: Sequence[str], note: Callable[[str], None] | None) -> RunningCommand:
    output = tempfile.TemporaryFile()  # noqa: SIM115  # it stays open as long as the command runs
    # If the watch is killed, its command continues, and the next command deletes the watch's folder.
    environment = os.environ | {"TMPDIR": lasting_folder()}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.PIPE if note else subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )
    if note is None or process.stderr is None:
        return RunningCommand(process, output)
    reader = Thread(target=_read_notes, args=(process.stderr, note), name="read notes", daemon=True)
    reader.start()
    return RunningCommand(process, output, reader)


def _read_notes(stream: IO[bytes], note: Callable[[str], None]) -> None:
    """Hand on the notes among the lines of a command's progress; other programs may write to the stream, too."""
    with stream:
        for line in stream:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                if isinstance(document, dict) and "note" in document:
                    note(str(document["note"]))


def run_command(fleet_file: Path, words: Sequence[str], note: Callable[[str], None] | None = None) -> CommandResult:
    """Run `snapshot` with these words until it ends; stop it if this process is interrupted.

    `note` gets the command's notes as soon as they are written, in another thread.
    """
    running = start_command(fleet_file, words, note)
    try:
        while (result := running.result()) is None:
            time.sleep(POLL_SECONDS)
    except BaseException:
        running.stop()
        raise
    return result
