"""Tell a command of the user's of what has failed, and of what works again: `[notify] command` of fleet.toml."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

NOTIFY_SCHEMA = "cutline/notify/1"
NOTIFY_SECONDS_MAX = 30.0


def notify(command: Sequence[str], event: dict[str, object]) -> str:
    """Run the command with the event as JSON on stdin; return what went wrong, "" if nothing did.

    It gets NOTIFY_SECONDS_MAX, for which the watch waits.
    """
    if not command:
        return ""
    body = json.dumps({"schema": NOTIFY_SCHEMA, **event}).encode()
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    # ValueError: a word has a NUL.
    except (OSError, ValueError) as error:
        return f"[notify] command {command[0]}: {error}"
    with process:
        try:
            process.communicate(body, NOTIFY_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            _end(process)
            return f"[notify] command {command[0]} had not ended after {NOTIFY_SECONDS_MAX:.0f} s, and was killed"
        except BaseException:
            _end(process)
            raise
    return f"[notify] command {command[0]} ended with exit code {process.returncode}" if process.returncode else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it, with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
