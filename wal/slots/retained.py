"""How much WAL nodes retain for Cutline's slots: a query with a time limit, as nodes may be down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.beside import OldDatabase, read_old
from cutline.fleet.nodes.connections import raising_unreachable, unreachable_error
from cutline.fleet.nodes.sessions import Sessions, in_parallel
from cutline.fleet.nodes.watch import NodesQuery
from cutline.wal.slots.own_slots import POSITION, RETAINING_SLOTS

ASKING_SECONDS_MAX = 2.0
# Little WAL, of a node and of all nodes together (docs/architecture.md, "Draining").
LITTLE_BYTES, LITTLE_BYTES_TOTAL = 64 << 20, 256 << 20
RETAINED_QUERY = f"""
SELECT slot_name, pg_wal_lsn_diff({POSITION}, restart_lsn)::bigint
  FROM pg_replication_slots WHERE {RETAINING_SLOTS} ORDER BY 1
"""
WAITING_QUERY = f"""
SELECT pg_wal_lsn_diff({POSITION}, confirmed_flush_lsn)::bigint FROM pg_replication_slots WHERE slot_name = %s
"""


@dataclass(frozen=True, slots=True)
class Retained:
    """How much WAL a node retains for one slot, and its limit."""

    node: str
    slot: str
    size_bytes: int
    limit_bytes: int

    @property
    def is_past_half(self) -> bool:
        """Whether the node retains more than half of its limit: time to warn."""
        return 2 * self.size_bytes > self.limit_bytes

    @property
    def is_past_limit(self) -> bool:
        """Whether the node retains more than its limit."""
        return self.size_bytes > self.limit_bytes


@dataclass(frozen=True, slots=True)
class RetainedAnswers:
    """What nodes retain: WAL, and `old` databases that restores have put aside.

    `not_asked` says, by node, why others gave no answer.
    """

    retained: tuple[Retained, ...]
    not_asked: Mapping[str, str]
    old: tuple[OldDatabase, ...] = ()

    def of_slot(self, slot: str) -> tuple[Retained, ...]:
        """What the nodes retain for one slot."""
        return tuple(one for one in self.retained if one.slot == slot)


def read_retained(node: Node, connection: psycopg.Connection[Any]) -> list[Retained]:
    """Read what the node retains for each of Cutline's slots in its database; raise NodeUnreachableError."""
    try:
        rows = connection.execute(RETAINED_QUERY).fetchall()
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error
    return [Retained(node.id, slot, size_bytes, node.retained_wal_bytes_max) for slot, size_bytes in rows]


def read_waiting(sessions: Sessions, slot: str) -> dict[str, int]:
    """The bytes of WAL, by node, that the slot has not been advanced past. Raises NodeUnreachableError."""

    def read(node: Node) -> int:
        with raising_unreachable(node):
            (waiting,) = sessions.connections[node.id].execute(WAITING_QUERY, (slot,)).fetchone() or (0,)
        return max(int(waiting), 0)

    return dict(zip((node.id for node in sessions.nodes), in_parallel(read, sessions.nodes), strict=True))


def is_little(waiting: Mapping[str, int]) -> bool:
    """Whether so much WAL, by node, is archived in less time than Spark takes to start.

    A transaction that began before the slot's position and ends after it adds to what is decoded.
    """
    sizes = waiting.values()
    return max(sizes, default=0) <= LITTLE_BYTES and sum(sizes) <= LITTLE_BYTES_TOTAL


class RetainedQuery:
    """Asks all `nodes` at once, in background threads that start with this object."""

    def __init__(self, nodes: Iterable[Node], seconds_max: float = ASKING_SECONDS_MAX) -> None:
        self._query = NodesQuery(nodes, _ask, seconds_max)

    def answers(self) -> RetainedAnswers:
        """Wait for the answers until the time limit."""
        answers = self._query.answers()
        return RetainedAnswers(
            tuple(one for found in answers.found.values() for one in found.retained),
            answers.problems,
            tuple(one for found in answers.found.values() for one in found.old),
        )


@dataclass(frozen=True, slots=True)
class _NodeAnswer:
    """What one node retains, and its databases that restores have put aside."""

    retained: list[Retained]
    old: list[OldDatabase]


def _ask(node: Node, connection: psycopg.Connection[Any]) -> _NodeAnswer:
    return _NodeAnswer(read_retained(node, connection), read_old(node, connection) if node.backup_of is None else [])


def query_retained(nodes: Iterable[Node], seconds_max: float = ASKING_SECONDS_MAX) -> RetainedAnswers:
    """Ask the nodes how much WAL they retain, and wait for the answers until the time limit."""
    return RetainedQuery(nodes, seconds_max).answers()
