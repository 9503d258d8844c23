"""Ask many nodes at once, without waiting for those that are silent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect, unreachable_error
from cutline.fleet.nodes.daemon_threads import start_daemons
from cutline.fleet.nodes.shut_down import shut_down_after
from cutline.storage.errors import SnapshotError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeAnswers(Generic[T]):
    """The answers by node, and by node why others gave none."""

    found: Mapping[str, T]
    problems: Mapping[str, str]


class NodesQuery(Generic[T]):
    """Asks all `nodes`, up to THREADS_MAX at a time, in background threads that start with this object.

    `ask` has the node and a session of its own, which ends when the time is up: a thread waits for no node much longer.
    """

    def __init__(
        self, nodes: Iterable[Node], ask: Callable[[Node, psycopg.Connection[Any]], T], seconds_max: float
    ) -> None:
        self._nodes, self._ask, self._seconds_max = tuple(nodes), ask, seconds_max
        self._found: dict[str, T] = {}
        self._problems: dict[str, str] = {}
        self._errors: list[Exception] = []
        self._deadline = time.monotonic() + seconds_max
        self._left = deque(self._nodes)
        self._threads = start_daemons(self._ask_one, self._left, "query")

    def _ask_one(self, node: Node) -> None:
        seconds = max(self._deadline - time.monotonic(), 0.0)
        try:
            with (
                connect(node, connect_timeout=str(int(seconds) or 1)) as connection,
                shut_down_after(connection, seconds),
            ):
                self._found[node.id] = self._ask(node, connection)
        except SnapshotError as error:
            self._problems[node.id] = error.message.removeprefix(f"node {node.id}: ")
        except psycopg.Error as error:
            self._problems[node.id] = unreachable_error(node, error).message.removeprefix(f"node {node.id}: ")
        except Exception as error:  # noqa: BLE001  # answers() raises it: such as that this process gets no more memory
            self._errors.append(error)

    def answers(self) -> NodeAnswers[T]:
        """Wait for the answers until the time limit."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        self._left.clear()
        for error in self._errors:
            raise error
        found, problems = dict(self._found), dict(self._problems)
        late = f"no answer within {self._seconds_max:.0f} s"
        return NodeAnswers(
            {node.id: found[node.id] for node in self._nodes if node.id in found},
            {node.id: problems.get(node.id, late) for node in self._nodes if node.id not in found},
        )
