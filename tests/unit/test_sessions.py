"""Work on several nodes at once, and how an interrupt ends it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

import fleet.nodes.sessions as module
from fleet.config import Node
from fleet.nodes.sessions import in_parallel, open_sessions
from tests.unit.made_fleets import new_fleet

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


@pytest.fixture
def silent() -> Iterator[Node]:
    """A node that takes connections and never answers, as a stopped server."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Node("silent", f"postgresql://postgres@127.0.0.1:{server.getsockname()[1]}/bank")


def test_an_interrupt_waits_for_no_node_that_does_not_answer(silent: Node) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), open_sessions(new_fleet(), [silent]):
        pass
    # A connection is tried for 10 s.
    assert time.monotonic() - begun < 5


def test_what_is_connected_after_the_interrupt_is_closed(silent: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, closed = threading.Event(), threading.Event()

    class Late:
        def close(self) -> None:
            closed.set()

    def connect(_: Node) -> Late:
        answers.wait(SECONDS_MAX)
        return Late()

    monkeypatch.setattr(module, "connect", connect)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), open_sessions(new_fleet(), [silent]):
        pass
    assert not closed.is_set()
    answers.set()
    assert closed.wait(SECONDS_MAX)
