"""Make the calls to the store that a command makes in parallel one after the other, always in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from cutline.snapshots.operations import ended_operations, open_operations
from cutline.snapshots.records import proven_chains
from cutline.snapshots.removal import gc, old_records, removing


class InlineExecutor:
    """A ThreadPoolExecutor without threads: it makes the calls in the caller, in order."""

    def __init__(self, _threads: int) -> None: ...

    def __enter__(self) -> InlineExecutor:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def shutdown(self, *, cancel_futures: bool) -> None:
        """See Executor."""

    def map(self, ask: Callable[[Any], Any], *items: Iterable[Any]) -> Iterator[Any]:
        """See Executor."""
        return map(ask, *items)


@contextmanager
def calls_in_order() -> Iterator[None]:
    """Run everything that reads or removes objects without threads."""
    with ExitStack() as stack:
        for module in (proven_chains, ended_operations, open_operations, gc, old_records, removing):
            stack.enter_context(patch.object(module, "ThreadPoolExecutor", InlineExecutor))
        yield
