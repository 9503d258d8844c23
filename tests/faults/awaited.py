"""Wait, with a bound, for what ends by itself after a fault: processes, sessions, slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

QUIET_SECONDS_MAX = 60


def await_none(left: Callable[[], object]) -> None:
    """Wait until `left` returns nothing."""
    deadline = time.monotonic() + QUIET_SECONDS_MAX
    while found := left():
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
