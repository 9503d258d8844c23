"""The start of a thread ends, also if the thread does not.

Python waits in `Thread.start` until the new thread says that it has begun. One that gets no memory for its first call
dies before, and that wait has no end: of ours as of any library's, such as the one that Spark is reached through.
"""

from __future__ import annotations

import threading
from typing import Any

# A thread begins in a millisecond, on a machine that has no memory left for its processes in some seconds.
BEGIN_SECONDS_MAX = 30
# As Python says where the system has no more threads.
NO_THREAD = "can't start new thread"

_start = threading.Thread.start


class _Begun(threading.Event):
    """Says whether a thread has begun; a wait without a limit gets one."""

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        # Second by second: a process that was suspended meanwhile has lost one.
        for _ in range(BEGIN_SECONDS_MAX):
            if super().wait(1):
                return True
        raise RuntimeError(NO_THREAD) from MemoryError("it has not begun")


def limit_thread_starts() -> None:
    """From now on starting a thread that does not begin raises RuntimeError, in the whole process. Safe to repeat."""
    setattr(threading.Thread, "start", _start_limited)  # noqa: B010  # mypy refuses the plain form


def _start_limited(thread: threading.Thread) -> None:
    own: Any = thread
    # One that was not initialized has none, and one that was started before raises.
    begun = getattr(own, "_started", None)
    if begun is not None and not begun.is_set():
        own._started = _Begun()
    _start(thread)
