"""How far nodes are: their WAL positions, how far their slots and standbys lag behind, and what the slots retain.

One query per node, within a time limit, as nodes may be away. Positions of a primary and its standbys are of the same
WAL; those of different shards never compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.nodes.watch import NodeAnswers, NodesQuery
from cutline.wal.slots.own_slots import POSITION, RETAINING_SLOTS

ASKING_SECONDS_MAX = 2.0
# Every function is evaluated once: a slot's lag is that of the position that is reported with it.
LAGS_QUERY = f"""
WITH here AS MATERIALIZED (
    SELECT pg_is_in_recovery() AS recovers,
           {POSITION} AS at,
           greatest(extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()), 0)::float AS age
)
SELECT recovers, at::text, age, slot_name,
       greatest(pg_wal_lsn_diff(at, confirmed_flush_lsn), 0)::bigint,
       greatest(pg_wal_lsn_diff(at, restart_lsn), 0)::bigint
  FROM here LEFT JOIN pg_replication_slots ON {RETAINING_SLOTS}
 ORDER BY slot_name
"""


@dataclass(frozen=True, slots=True)
class SlotLag:
    """How much WAL lies between a slot's confirmed position and its node's, and how much the node keeps for it."""

    slot: str
    lag_bytes: int
    retained_bytes: int


@dataclass(frozen=True, slots=True)
class ReplayLag:
    """How far a standby's replay is behind its primary; `seconds` is 0 if it has replayed everything.

    Otherwise it is the age of the last commit that it has replayed, which is more than the lag after an idle time.
    """

    size_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class NodeLags:
    """How far one node is. `problem` says why the node gave no answer: then nothing else is known.

    `position` is where a primary writes, and a standby replays. `replay` is that of a standby whose primary has
    answered, too; None of others.
    """

    node: str
    problem: str = ""
    is_in_recovery: bool = False
    position: Lsn | None = None
    slots: tuple[SlotLag, ...] = ()
    replay: ReplayLag | None = None

    def behind(self, archived: Lsn | None) -> int | None:
        """The bytes of WAL between an archived position and the node's; None if one of them is not known."""
        return None if archived is None or self.position is None else max(self.position - archived, 0)


class LagsQuery:
    """Asks all `nodes` at once, for ASKING_SECONDS_MAX, in background threads that start with this object."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._query = NodesQuery(self._nodes, _ask, ASKING_SECONDS_MAX)

    def lags(self) -> dict[str, NodeLags]:
        """How far the nodes are, by node in their order; waits until the time limit."""
        answers = self._query.answers()
        return {node.id: _lags_of(node, answers) for node in self._nodes}


@dataclass(frozen=True, slots=True)
class _Position:
    """What one node says of itself; `age_seconds` is that of the last commit that a standby has replayed."""

    is_in_recovery: bool
    position: Lsn | None
    age_seconds: float | None
    slots: tuple[SlotLag, ...]


def _ask(_node: Node, connection: psycopg.Connection[Any]) -> _Position:
    rows = connection.execute(LAGS_QUERY).fetchall()
    is_in_recovery, position, age_seconds = rows[0][:3]
    slots = tuple(SlotLag(*row[3:]) for row in rows if row[3] is not None)
    return _Position(is_in_recovery, Lsn.parse(position) if position else None, age_seconds, slots)


def _lags_of(node: Node, answers: NodeAnswers[_Position]) -> NodeLags:
    own = answers.found.get(node.id)
    if own is None:
        return NodeLags(node.id, answers.problems[node.id])
    replay = _replay(own, answers.found, node.backup_of)
    return NodeLags(node.id, "", own.is_in_recovery, own.position, own.slots, replay)


def _replay(own: _Position, found: Mapping[str, _Position], primary: str | None) -> ReplayLag | None:
    other = found.get(primary) if primary else None
    if other is None or not own.is_in_recovery or other.is_in_recovery:
        # After a promotion the positions are of different timelines.
        return None
    if own.position is None or other.position is None:
        return None
    size_bytes = max(other.position - own.position, 0)
    return ReplayLag(size_bytes, own.age_seconds if size_bytes else 0.0)
