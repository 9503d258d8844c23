"""Run a program with an event as JSON on its stdin: a hook, or the command in `[notify]`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from cutline.spark.session_folder import lasting_folder

# An error shows this many characters from the end of the output of a failed program.
OUTPUT_CHARACTERS_MAX = 500


def run_program(what: str, words: Sequence[str], event: Mapping[str, object], seconds_max: float) -> str:
    """Run the program with the event; return the problem, which begins with `what`, or "" if it ended with 0.

    A program that is still running after `seconds_max` is killed, with its process group. If this thread is
    interrupted, so is the program. Its output goes to a file: it must not mix with the command's own, and a program
    that it leaves running must not keep the command waiting. That program may also keep temporary files for longer than
    this process, whose own folder is deleted when it ends.
    """
    body, name = json.dumps(event).encode(), f"{what} {words[0]}"
    try:
        output = tempfile.TemporaryFile()  # noqa: SIM115  # closed below
    except OSError as error:
        # The folder for temporary files may be full, or somebody has deleted it.
        return f"{name} was not run: no temporary file for its output could be created: {error}"
    with output:
        try:
            process = subprocess.Popen(
                list(words),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": lasting_folder()},
                start_new_session=True,
            )
        # ValueError: a word contains NUL.
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
        with process:
            try:
                process.communicate(body, seconds_max)
            except subprocess.TimeoutExpired:
                _end(process)
                return f"{name} was still running after {seconds_max:g} s and was killed{_last_of(output)}"
            except BaseException:
                _end(process)
                raise
        return f"{name} ended with exit code {process.returncode}{_last_of(output)}" if process.returncode else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_of(output: IO[bytes]) -> str:
    size = output.seek(0, os.SEEK_END)
    # A character has up to four bytes.
    output.seek(max(size - 4 * OUTPUT_CHARACTERS_MAX, 0))
    text = " ".join(output.read().decode(errors="replace").split())
    return f": {text[-OUTPUT_CHARACTERS_MAX:]}" if text else ""
