"""Timers for blocks that may take too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def calling_after(seconds: float, call: Callable[[], object], *, waits: bool = False) -> Iterator[None]:
    """Call `call` in a thread if the block is still running after `seconds`.

    If it `waits`, a call that has begun is complete when the block has ended; otherwise it may still be running. The
    end of the process doesn't wait for it.
    """
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if waits:
            timer.join()
