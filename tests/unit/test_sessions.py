"""Work on several nodes at once, and how an interrupt ends it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from fleet.nodes.sessions import in_parallel

SECONDS_MAX = 10.0


def test_an_interrupt_ends_the_others_also_after_one_has_failed() -> None:
    ended = threading.Event()
    has_waited: list[bool] = []

    def work(name: str) -> None:
        if name == "a":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            raise ConnectionError(name)
        has_waited.append(ended.wait(SECONDS_MAX))

    with pytest.raises(KeyboardInterrupt):
        in_parallel(work, ["a", "b"], ended.set)
    assert has_waited == [True]


def test_all_are_waited_for_and_the_first_error_counts() -> None:
    done: list[str] = []

    def work(name: str) -> str:
        if name != "c":
            raise ConnectionError(name)
        done.append(name)
        return name

    with pytest.raises(ConnectionError, match=r"^a$"):
        in_parallel(work, ["a", "b", "c"])
    assert done == ["c"]
    assert in_parallel(str.upper, ["x", "y"]) == ["X", "Y"]
