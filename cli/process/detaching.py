"""Detach a command from the prompt: start it in the background, and wait until it reports its operation.

This module must stay cheap to import: `snapshot --help` imports it.

The background process has its own session, without a terminal: neither Ctrl-C nor the closing of the terminal reaches
it. It has the environment and the command line of this process, so the command line reveals nothing new.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from msgspec import Struct

from cutline.fleet.own_files import find_private_folder
from cutline.spark.session_folder import lasting_folder
from cutline.storage.errors import RefusedError

# With -P, modules in the working directory are never imported.
PROGRAM = ("-P", "-c", "from cutline.cli.entry import main; main()")


# The environment variable that tells the background process which pipe leads to its starter.
VARIABLE = "CUTLINE_STARTED_BY"


class _Starter(Struct):
    """The process that started this process. `pipe` is None once the operation has been reported."""

    pipe: int | None


_starters: list[_Starter] = []


def find_starter() -> None:
    """Find out whether this process runs in the background; hide this from its child processes."""
    if (pipe := os.environ.pop(VARIABLE, None)) is None:
        return
    os.set_inheritable(int(pipe), False)  # noqa: FBT003  # it takes no keyword
    _starters.append(_Starter(int(pipe)))
    # The output goes to files, so it does not matter if the terminal is closed.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def is_in_background() -> bool:
    """Whether this process runs in the background."""
    return bool(_starters)


def announce(operation: str) -> None:
    """Report the id of this process's first operation to the starter. Others must already be able to see it."""
    for starter in _starters:
        if starter.pipe is None:
            continue
        pipe, starter.pipe = starter.pipe, None
        # The starter may have ended.
        with suppress(BrokenPipeError):
            os.write(pipe, f"{operation}\n".encode())
        os.close(pipe)


KEPT_DAYS = 30
POLL_SECONDS = 0.1
ANSWER_BYTES_MAX = 200


class NoStateFolderError(RefusedError):
    """There is no suitable folder for the output of a background command."""


class BackgroundDiedError(RefusedError):
    """The background process was killed before its operation started."""


class OutputFiles(Struct, frozen=True):
    """The files that a background command writes: its result, and its progress and errors."""

    result: Path
    log: Path

    def rename(self, operation: str) -> OutputFiles:
        """Rename the files after the operation."""
        return OutputFiles(
            self.result.rename(self.result.with_name(f"{operation}.out")),
            self.log.rename(self.log.with_name(f"{operation}.log")),
        )

    def delete(self) -> None:
        """Delete the files."""
        for file in (self.result, self.log):
            file.unlink(missing_ok=True)


class DetachedCommand(Struct, frozen=True):
    """A command that continues in the background."""

    operation: str
    process: int
    files: OutputFiles


class EndedEarly(Struct, frozen=True):
    """The exit code and result of a command that ended, or was stopped, before its operation started."""

    code: int
    result: str


def detach_command(words: Sequence[str], stderr: TextIO) -> DetachedCommand | EndedEarly:
    """Run `snapshot` with these words in the background; return when its operation has started, or when it has ended.

    Until then its output is shown on `stderr`, and Ctrl-C and SIGTERM stop it. Raises NoStateFolderError and
    BackgroundDiedError.
    """
    files = _new_files()
    pipe, end = os.pipe()
    # This process deletes its own folder for temporary files when it ends.
    environment = os.environ | {VARIABLE: str(end), "TMPDIR": lasting_folder()}
    with files.result.open("wb") as result, files.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=result,
            stderr=log,
            env=environment,
            pass_fds=[end],
            start_new_session=True,
        )
    os.close(end)
    with os.fdopen(pipe, "rb", buffering=0) as answers, files.log.open("rb") as log:
        operation = _await_operation(process, answers, _Relay(log, stderr))
    if operation:
        return DetachedCommand(operation, process.pid, files.rename(operation))
    code = process.wait()
    if code < 0:
        raise BackgroundDiedError(
            f"the background process was killed by {signal.Signals(-code).name}",
            hint=f"see its output in {files.log}, then repeat the command",
            details={"log": str(files.log)},
        )
    ended = EndedEarly(code, files.result.read_text(errors="replace"))
    files.delete()
    return ended


class _Relay(Struct, frozen=True):
    log: IO[bytes]
    stream: TextIO

    def pass_on(self) -> None:
        self.stream.write(self.log.read().decode(errors="replace"))
        self.stream.flush()


def _await_operation(process: subprocess.Popen[bytes], answers: IO[bytes], relay: _Relay) -> str:
    """Return the process's operation, or "" if the process ended or was stopped before its operation started."""
    is_ended = False
    while True:
        try:
            if not is_ended and select.select([answers], [], [], POLL_SECONDS)[0]:
                if operation := answers.read(ANSWER_BYTES_MAX).decode().strip():
                    return operation
                is_ended = True
            if is_ended:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
            relay.pass_on()
            if is_ended and process.poll() is not None:
                relay.pass_on()
                return ""
        except KeyboardInterrupt as interrupt:
            number = interrupt.args[0] if interrupt.args else signal.SIGINT
            # A background process is not affected when the terminal is closed, but its files must still be renamed.
            if number != signal.SIGHUP:
                is_ended = True
                process.send_signal(number)


def _new_files() -> OutputFiles:
    """Create two empty files that only the user can read; delete old files."""
    folder = find_private_folder("XDG_STATE_HOME", "~/.local/state")
    if isinstance(folder, str):
        raise NoStateFolderError(
            f"no folder can be used for the output of a background command: {folder}",
            hint="set XDG_STATE_HOME to a folder that only you can change",
        )
    oldest = time.time() - KEPT_DAYS * 24 * 3600
    for file in (*folder.glob("*.out"), *folder.glob("*.log")):
        with suppress(OSError):
            if file.lstat().st_mtime < oldest:
                file.unlink()
    handles = [tempfile.mkstemp(prefix="starting-", suffix=suffix, dir=folder) for suffix in (".out", ".log")]
    for handle, _ in handles:
        os.close(handle)
    return OutputFiles(*(Path(file) for _, file in handles))
