"""How far a task has come before it ends. Tasks in executors can't say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


@contextmanager
def following(listener: Callable[[int], None]) -> Iterator[None]:
    """Pass what this thread's task tells in the block to `listener`."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tell_read(size_bytes: int) -> None:
    """Tell that the task has read so many more bytes of those that were planned."""
    if (listener := _listener.get()) is not None:
        listener(size_bytes)
