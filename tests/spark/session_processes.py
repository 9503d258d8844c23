"""The processes of a Spark session's JVM: its executors and workers are in one session of the system with it."""

from __future__ import annotations

import subprocess
import time

END_SECONDS_MAX = 60


def assert_gone(jvm: int) -> None:
    """Wait for a bounded time until no process of the JVM's session is left, including executors and workers."""
    deadline = time.monotonic() + END_SECONDS_MAX
    while sessions := [pid for pid, session in list_processes() if session == jvm]:
        assert time.monotonic() < deadline, f"processes {sessions} survive"
        time.sleep(0.1)


def list_processes() -> list[tuple[int, int]]:
    """Return every running process of the machine with its session; an ended one may wait for init to reap it."""
    listed = subprocess.run(["ps", "-eo", "stat=,pid=,sess="], capture_output=True, text=True, check=True).stdout
    entries = (line.split() for line in listed.splitlines())
    return [(int(pid), int(session)) for state, pid, session in entries if not state.startswith("Z")]
