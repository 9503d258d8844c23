"""Work on several nodes at once, and how an interrupt ends it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

import cutline.nodes.sessions as module
from cutline.fleet.config import Node
from cutline.nodes.connections import NodeUnreachableError, raising_unreachable
from cutline.nodes.sessions import in_parallel, open_sessions
from cutline.nodes.watch import watch_nodes
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


PLAIN = "check that the server is running, and that its dsn and your password file are correct"
ONLY_PRIMARY = f"{PLAIN}; to take a full snapshot without standbys: snapshot create NAME --only-primary"


@pytest.mark.parametrize(("nodes", "needs_all", "hint"), [
    (("a-b1", "b"), False, PLAIN),
    (("a", "b"), False, PLAIN),
    (("a-b1", "b-b1"), False, ONLY_PRIMARY),
    (("a-b1",), False, ONLY_PRIMARY),
    (("a-b1",), True, PLAIN),
])  # fmt: skip
def test_all_nodes_that_can_not_be_reached_are_named_and_left_out_only_if_that_helps(
    nodes: tuple[str, ...], hint: str, *, needs_all: bool
) -> None:
    away = [Node(one, "host=127.0.0.1 port=1", one.partition("-")[0] if "-" in one else None) for one in nodes]
    with pytest.raises(NodeUnreachableError) as raised, open_sessions(new_fleet(), away, needs_all=needs_all):
        pass
    assert [one.partition(": ")[0] for one in raised.value.message.split("; ")] == [f"node {one}" for one in nodes]
    assert (raised.value.hint, raised.value.exit_code) == (hint, 6)


def test_an_error_while_the_sessions_are_open_suggests_leaving_standbys_out_only_if_that_helps() -> None:
    nodes = [Node("a", "host=127.0.0.1 port=1"), Node("a-b1", "host=127.0.0.1 port=1", "a")]
    for needs_all, node, hint in ((False, nodes[1], ONLY_PRIMARY), (False, nodes[0], PLAIN), (True, nodes[1], PLAIN)):
        with (
            pytest.raises(NodeUnreachableError) as raised,
            module._naming_lost(nodes, {}, needs_all=needs_all),
            raising_unreachable(node),
        ):
            raise psycopg.OperationalError("the connection is lost")
        assert raised.value.hint == hint


def test_a_command_may_continue_without_nodes_that_can_not_be_reached_but_not_without_any_primary() -> None:
    nodes = [Node(one, "port=1", one.partition("-")[0] if "-" in one else None) for one in ("a", "a-b1", "b", "b-b1")]
    lost = {one: NodeUnreachableError(f"node {one}: gone", details={"node": one}) for one in ("a", "b-b1", "b")}
    away: dict[str, str] = {}
    # The standby of a primary that can't be reached is left out as well.
    assert module._without_away(nodes, {one: lost[one] for one in ("a", "b-b1")}, away) == (nodes[2],)
    assert away == {"a": "gone", "b-b1": "gone"}
    with pytest.raises(NodeUnreachableError, match="node a: gone; node b: gone"):
        module._without_away(nodes, {one: lost[one] for one in ("a", "b")}, {})
    with pytest.raises(ConnectionError):
        module._without_away(nodes, {"a": ConnectionError(), "b-b1": lost["b-b1"]}, {})


def test_the_watch_ignores_a_node_that_is_left_out(silent: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutline.nodes.watch.SILENCE_SECONDS_MAX", 0.3)
    monkeypatch.setattr("cutline.nodes.watch.PROBE_SECONDS", 0.1)
    acts: list[float] = []
    with watch_nodes([silent]) as watch:
        with watch.on_silence(lambda: acts.append(time.monotonic())):
            deadline = time.monotonic() + SECONDS_MAX
            while not watch.silent() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert list(watch.silent()) == ["silent"]
            watch.leave_out("silent")
            count = len(acts)
            time.sleep(0.5)
            assert (len(acts) - count <= 1, watch.silent()) == (True, {})
        watch.check()


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
