"""Report waits for a failing store to the operator, and cut them short when the command is stopped.

A failed request is repeated for minutes (storage/s3_retries.py), in any thread. The driver reports this to the
operator. A Spark task's process writes its reports to a file named in its environment, which the driver reads
(`pass_on`); on another machine it writes them to the executor's log. A process of the command
(spark/task_processes.py) sends them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TypeAlias

Listener: TypeAlias = Callable[[str], None]

# The environment variable that names the file for the reports of tasks on this machine.
VARIABLE = "CUTLINE_STORE_WAITS"
# All of a command's processes run into the same problem, which is reported once a minute.
SAME_SECONDS = 60.0
# A task's process may run tasks of several commands, each of which has to be told; the driver leaves out repetitions.
SAME_SECONDS_OF_TASKS = 5.0
# How long the clean-up requests of a stopped command are repeated.
HURRY_SECONDS = 5.0

LOGGER = logging.getLogger(__name__)

_listeners: list[Listener] = []
_told: dict[str, float] = {}
_lock, _reading = threading.Lock(), threading.Lock()
_hurried_at: list[float] = []
_read_bytes: dict[str, int] = {}
_is_urgent: ContextVar[bool] = ContextVar("is_urgent", default=False)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Pass reports from any thread to `listener` in this block; it replaces the previous listener.

    The new listener has not heard any report, so a report is not left out because an earlier one was the same.
    """
    with _lock:
        _told.clear()
        _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(text: str) -> None:
    """Report `text` to the operator, unless it was already reported in the last SAME_SECONDS."""
    now = time.monotonic()
    with _lock:
        same_seconds = SAME_SECONDS if _listeners else SAME_SECONDS_OF_TASKS
        for old in [key for key, at in _told.items() if now - at >= same_seconds]:
            del _told[old]
        if text in _told:
            return
        _told[text] = now
        listeners = list(_listeners)
    if listeners:
        listeners[-1](text)
    elif file := os.environ.get(VARIABLE):
        # A short line is appended in one write, so lines from several processes don't mix.
        with suppress(OSError), Path(file).open("a", encoding="utf-8") as out:
            out.write(f"{text}\n")
    else:
        # Executors have no logging handler, so this is written to their standard error.
        LOGGER.warning(text)


def pass_on() -> None:
    """Report all lines that tasks on this machine have written since the last call."""
    file = os.environ.get(VARIABLE)
    if not file or not _listeners:
        return
    with _reading, suppress(OSError), Path(file).open("rb") as lines:
        lines.seek(_read_bytes.get(file, 0))
        for line in lines:
            if line.endswith(b"\n"):
                _read_bytes[file] = _read_bytes.get(file, 0) + len(line)
                tell(line.decode(errors="replace").rstrip())


@contextmanager
def urgent_requests() -> Iterator[None]:
    """Let this thread's requests in the block pass others that wait because the store has asked for fewer requests."""
    before = _is_urgent.set(True)
    try:
        yield
    finally:
        _is_urgent.reset(before)


def is_urgent() -> bool:
    """Whether the request is one of `urgent_requests`."""
    return _is_urgent.get()


def hurry() -> None:
    """Stop repeating requests HURRY_SECONDS from now, because the command was stopped. Safe in a signal handler."""
    _hurried_at[:] = [time.monotonic()]


def stop_hurrying() -> None:
    """Repeat requests for as long as before `hurry`: the process continues with other work."""
    _hurried_at.clear()


def hurried_seconds() -> float | None:
    """Return the seconds since `hurry` was called; None if it was not called, or after `stop_hurrying`."""
    at = next(iter(_hurried_at), None)
    return None if at is None else time.monotonic() - at
