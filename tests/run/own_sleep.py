"""Replace `time.sleep` for the thread of a test. Threads that earlier tests have left behind sleep as before.

A replacement for all threads would be called by them, too, and would let them loop without a pause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest


def replace_sleep(monkeypatch: pytest.MonkeyPatch, replacement: Callable[[float], object]) -> None:
    """Let the calling thread call `replacement` in the place of `time.sleep`."""
    monkeypatch.setattr(time, "sleep", own_sleep(replacement))


def own_sleep(replacement: Callable[[float], object]) -> Callable[[float], None]:
    """Return a sleep that is `replacement` in the calling thread, and that of before in all others."""
    own, original = threading.current_thread(), time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is own:
            replacement(seconds)
        else:
            original(seconds)

    return sleep
