"""End a block that does not end by itself. Only in a main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class HangError(BaseException):
    """The block took longer than it may. Nothing may catch it, so it is no Exception."""


@contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Raise HangError in the block after `seconds`."""

    def end(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
