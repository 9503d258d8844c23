"""Tell a command of the user's of what has failed, and of what works again: `[notify] command` of fleet.toml."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

NOTIFY_SCHEMA = "cutline/notify/1"
NOTIFY_SECONDS_MAX = 30.0


def notify(command: Sequence[str], event: dict[str, object]) -> str:
    """Run the command with the event as JSON on stdin; return what went wrong, "" if nothing did.

    It gets NOTIFY_SECONDS_MAX. Nothing depends on it.
    """
    if not command:
        return ""
    body = json.dumps({"schema": NOTIFY_SCHEMA, **event}).encode()
    try:
        done = subprocess.run(list(command), input=body, capture_output=True, timeout=NOTIFY_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"[notify] command {command[0]}: {error}"
    return f"[notify] command {command[0]} ended with exit code {done.returncode}" if done.returncode else ""
