"""Report waits for a store that does not answer as it should to the operator, and end them early.

A request is repeated for minutes (storage/s3_retries.py), in any thread. The driver tells its operator. A task's
process has nobody to tell: it writes to the file that the driver named in its environment and reads (`pass_on`), or on
another machine to the executor's log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

Listener: TypeAlias = Callable[[str], None]

# The file for the reports of tasks on this machine.
VARIABLE = "CUTLINE_STORE_WAITS"
# Every process of a command meets the same trouble; and in a minute an operator has not forgotten it.
SAME_SECONDS = 60.0
# The clean-up requests of a stopped command are repeated for no longer.
HURRY_SECONDS = 5.0

LOGGER = logging.getLogger(__name__)

_listeners: list[Listener] = []
_told: dict[str, float] = {}
_lock, _reading = threading.Lock(), threading.Lock()
_hurried_at: list[float] = []
_read_bytes: dict[str, int] = {}


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass reports from any thread to `listener` in this block; it replaces the previous listener."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(text: str) -> None:
    """Tell the operator, unless the same text was reported in the last SAME_SECONDS."""
    now = time.monotonic()
    with _lock:
        for old in [key for key, at in _told.items() if now - at >= SAME_SECONDS]:
            del _told[old]
        if text in _told:
            return
        _told[text] = now
        listeners = list(_listeners)
    if listeners:
        listeners[-1](text)
    elif file := os.environ.get(VARIABLE):
        # One write of a short line to a file that is only appended to: lines of several processes don't mix.
        with suppress(OSError), Path(file).open("a", encoding="utf-8") as out:
            out.write(f"{text}\n")
    else:
        # Without a handler, which executors have not, it goes to the log of their standard error.
        LOGGER.warning(text)


def pass_on() -> None:
    """Pass on the reports of tasks on this machine since the last call."""
    file = os.environ.get(VARIABLE)
    if not file or not _listeners:
        return
    with _reading, suppress(OSError), Path(file).open("rb") as lines:
        lines.seek(_read_bytes.get(file, 0))
        for line in lines:
            if line.endswith(b"\n"):
                _read_bytes[file] = _read_bytes.get(file, 0) + len(line)
                tell(line.decode(errors="replace").rstrip())


def hurry() -> None:
    """From now on no request is repeated for longer than HURRY_SECONDS: the command was stopped. Safe in a signal."""
    _hurried_at[:] = [time.monotonic()]


def stop_hurrying() -> None:
    """The process continues with other work: let requests be repeated as before."""
    _hurried_at.clear()


def hurried_seconds() -> float | None:
    """For how long requests have been hurried; None if they are not."""
    at = next(iter(_hurried_at), None)
    return None if at is None else time.monotonic() - at
