"""The process in the background: it tells the one that has started it which operation it is.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass

# Says to the process in the background which pipe leads to its starter, and whether a user sits there.
VARIABLE = "CUTLINE_STARTED_BY"
TERMINAL = "terminal"


@dataclass(slots=True)
class _Starter:
    """The process that has started this one. `pipe` is None once it was told."""

    pipe: int | None
    is_at_terminal: bool


_starters: list[_Starter] = []


def find_starter() -> None:
    """Find out whether this process runs in the background; no process that it starts is told so."""
    if (started := os.environ.pop(VARIABLE, None)) is None:
        return
    pipe, _, terminal = started.partition(",")
    os.set_inheritable(int(pipe), False)  # noqa: FBT003  # it takes no keyword
    _starters.append(_Starter(int(pipe), terminal == TERMINAL))
    # Its output goes to files: the end of a terminal is nothing to it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def is_in_background() -> bool:
    """Whether this process runs in the background."""
    return bool(_starters)


def is_user_present() -> bool:
    """Whether somebody at a terminal has typed the command."""
    return sys.stdin.isatty() or any(one.is_at_terminal for one in _starters)


def announce(operation: str) -> None:
    """Tell the starter the id of the first operation that this process works on. Others can see that operation."""
    for starter in _starters:
        if starter.pipe is None:
            continue
        pipe, starter.pipe = starter.pipe, None
        # The starter may have ended.
        with suppress(BrokenPipeError):
            os.write(pipe, f"{operation}\n".encode())
        os.close(pipe)
