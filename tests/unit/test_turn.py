"""What a watch says of a node on which it can't renew its turn."""

from __future__ import annotations

from concurrent.futures import wait
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from cutline.cli.watch.turn import RENEW_SECONDS, Turn
from cutline.fleet.config import Node
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.lock import FleetLock, FleetLockLostError
from cutline.nodes.watch import SilentNodeError


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_node_whose_session_was_ended_here_is_called_silent(*, is_silent: bool) -> None:
    said: list[str] = []

    def renew() -> None:
        raise NodeUnreachableError("node a: server closed the connection")

    def check() -> None:
        if is_silent:
            raise SilentNodeError("node a: no answer for 30 s")

    lock = SimpleNamespace(renew=renew, sessions=SimpleNamespace(watch=SimpleNamespace(check=check)))
    turn = Turn(cast(FleetLock, lock), lambda text, **_: said.append(text))
    for _ in range(2):
        turn._renewed_at = -RENEW_SECONDS
        assert turn.keep()
    why = "no answer for 30 s" if is_silent else "server closed the connection"
    assert said == [f"the watch lock: node a: {why}"]


def test_a_node_that_does_not_answer_holds_up_neither_the_tasks_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Event()
    lock = SimpleNamespace(renew=answered.wait, interrupt=answered.set)
    turn = Turn(cast(FleetLock, lock), lambda *_, **__: None)
    turn.end()
    assert not answered.is_set()
    monkeypatch.setattr("cutline.cli.watch.turn.ANSWER_SECONDS", 0.01)
    for _ in range(2):
        assert turn.keep()
    assert turn._renewal is not None
    assert not turn._renewal.done()
    turn.end()
    wait([turn._renewal])
    assert turn.keep()
    assert turn._renewal is None


def test_a_renewal_that_ends_after_the_turn_takes_no_lock() -> None:
    closed: list[str] = []

    class Sessions:
        """A session that is lost; while it is replaced, the turn ends."""

        connections = cast(Any, {"a": SimpleNamespace(execute=lost)})
        nodes = (Node("a", "postgresql:///shop"),)

        def renew(self, node: Node) -> object:
            lock._pending = {}
            lock.interrupt()
            return SimpleNamespace(close=lambda: closed.append(node.id))

    lock = FleetLock(cast(Any, Sessions()), "shop watch", "label", _taken={"a": 1})
    with pytest.raises(FleetLockLostError, match="an interrupt ended its session"):
        lock.renew()
    assert closed == ["a"]


def lost(*_: object) -> None:
    raise psycopg.OperationalError("server closed the connection")
