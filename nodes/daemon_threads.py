"""Threads that ask nodes, and do not keep the process from ending if a node never answers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from cutline.storage.process_limits import TooLittleMemoryError

Item = TypeVar("Item")
# A fleet may have a thousand nodes. A query takes milliseconds, unless all nodes are waiting for the same event.
THREADS_MAX = 64
LOOK_SECONDS = 1.0


def start_daemons(work: Callable[[Item], object], left: deque[Item], name: str) -> list[threading.Thread]:
    """Start up to THREADS_MAX threads that take items from `left` and call `work` on each; return the threads.

    The threads end once `left` is empty; the caller may clear it.
    """

    def run() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            work(item)

    threads = [
        threading.Thread(target=run, name=f"{name} {number}", daemon=True)
        for number in range(min(len(left), THREADS_MAX))
    ]
    for thread in threads:
        thread.start()
    return threads


def await_futures(futures: Collection[Future[Any]], threads: Collection[threading.Thread]) -> None:
    """Wait until the threads have set all futures; raise TooLittleMemoryError if they end before that."""
    while wait(futures, LOOK_SECONDS).not_done:
        if not any(thread.is_alive() for thread in threads) and wait(futures, 0).not_done:
            raise TooLittleMemoryError("a thread ended before its work was done")
