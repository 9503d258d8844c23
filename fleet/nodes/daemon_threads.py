"""Threads for work with nodes that may be silent: a command ends without waiting for them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from cutline.storage.process_memory import TooLittleMemoryError

Item = TypeVar("Item")
# A fleet may have a thousand nodes. What is asked of each takes milliseconds, or waits for what all of them wait for.
THREADS_MAX = 64
LOOK_SECONDS = 1.0


def start_daemons(work: Callable[[Item], object], left: deque[Item], name: str) -> list[threading.Thread]:
    """Start up to THREADS_MAX threads that do `work` on what is `left`, each on one after the other; return them.

    Whoever clears `left` lets them end. They are daemons: a node that accepts a connection and never answers must not
    keep the command from ending.
    """

    def run() -> None:
        while True:
            try:
                # A deque can be emptied by several threads.
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
    """Wait until the threads have set the futures. Raises TooLittleMemoryError if they end before they have."""
    while wait(futures, LOOK_SECONDS).not_done:
        if not any(thread.is_alive() for thread in threads) and wait(futures, 0).not_done:
            raise TooLittleMemoryError("a thread has ended before its work was done")
