"""End a block that hangs. Works only in the main thread."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class HangError(BaseException):
    """The block took too long. It is not an Exception, so that no handler catches it."""


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
