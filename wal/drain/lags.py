"""The positions of nodes, slots and standbys in WAL, and how much WAL nodes retain for Cutline's slots.

Each node is sent one query, with a time limit, because it may be unreachable. Positions of a primary and its standbys
can be compared; positions of different shards never can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import psycopg
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.config import Fleet, Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import raising_unreachable, unreachable_error
from cutline.nodes.other_databases import OldDatabase, read_old
from cutline.nodes.publications import read_own_names
from cutline.nodes.roles import ServerState, in_current_roles, read_server, servers_by_role
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.nodes.watch import NodeAnswers, NodesQuery
from cutline.wal.drain.slots import POSITION, SLOTS_HERE, STATE_FIELDS, SlotState, slot_problem, state_of_row

ASKING_SECONDS_MAX = 2.0
# Every function is evaluated once, so a slot's lag refers to the position that is reported with it.
LAGS_QUERY = f"""
WITH here AS MATERIALIZED (
    SELECT pg_is_in_recovery() AS recovers,
           {POSITION} AS at,
           greatest(extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()), 0)::float AS age
)
SELECT recovers, at::text, age, (pg_control_system()).system_identifier::text, slot_name,
       greatest(pg_wal_lsn_diff(at, confirmed_flush_lsn), 0)::bigint,
       coalesce(greatest(pg_wal_lsn_diff(at, restart_lsn), 0), 0)::bigint, {STATE_FIELDS}
  FROM here LEFT JOIN pg_replication_slots s ON {SLOTS_HERE}
 ORDER BY slot_name
"""


class SlotLag(Struct, frozen=True):
    """How much WAL lies between a slot's confirmed position and its node's, and how much is retained for the slot.

    `lag_bytes` is None for a slot that is being created. `wal_status` is as in pg_replication_slots. `problem` says why
    the slot can't continue its chain, "" if nothing prevents it; no WAL is retained for an invalidated slot.
    """

    slot: str
    lag_bytes: int | None
    retained_bytes: int
    wal_status: str = ""
    problem: str = ""


class ReplayLag(Struct, frozen=True):
    """How far a standby's replay lags behind its primary.

    `seconds` is 0 if the standby has replayed everything. Otherwise it is the age of the last replayed commit, which
    exceeds the lag after an idle period.
    """

    size_bytes: int
    seconds: float | None


class NodeLags(Struct, frozen=True):
    """The position and lags of one node. If the node did not answer, `problem` says why, and nothing else is known.

    `position` is where a primary writes or a standby replays. `replay` is None except for a standby whose primary also
    answered. `publications` are those of Cutline on a primary, of whichever store.
    """

    node: str
    problem: str = ""
    is_in_recovery: bool = False
    position: Lsn | None = None
    slots: tuple[SlotLag, ...] = ()
    replay: ReplayLag | None = None
    publications: tuple[str, ...] = ()

    def behind(self, archived: Lsn | None) -> int | None:
        """Return the bytes of WAL between an archived position and the node's; None if either is unknown."""
        return None if archived is None or self.position is None else max(self.position - archived, 0)


class FleetLags(Struct, frozen=True):
    """The lags of all nodes, in the order of fleet.toml, in the roles that their servers have now.

    `fleet` has promoted standbys in their primaries' places; `promoted` names them by primary (nodes/roles.py).
    """

    fleet: Fleet
    promoted: Mapping[str, str]
    nodes: Mapping[str, NodeLags]

    def server_of(self, node: str) -> str:
        """Return the node of fleet.toml whose server has the node's role now."""
        return servers_by_role(self.promoted).get(node, node)

    @property
    def slots(self) -> dict[str, dict[str, str]]:
        """The problem with each slot ("" if none), by slot, for each node that answered."""
        return {
            node: {slot.slot: slot.problem for slot in lags.slots}
            for node, lags in self.nodes.items()
            if not lags.problem
        }


class LagsQuery:
    """Queries all nodes in parallel for ASKING_SECONDS_MAX, in background threads that start with this object."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._query = NodesQuery(fleet.nodes, _ask, ASKING_SECONDS_MAX)

    def lags(self) -> FleetLags:
        """Return the lags; wait no longer than the time limit."""
        asked = self._query.answers()
        roles = in_current_roles(self._fleet, asked, lambda answer: answer.server)
        lags = {node.id: _lags_of(node, roles.answers) for node in roles.fleet.nodes}
        return FleetLags(roles.fleet, roles.promoted, lags)


class _Position(Struct, frozen=True):
    """A server's own position; `age_seconds` is the age of the last commit that a standby has replayed."""

    server: ServerState
    position: Lsn | None
    age_seconds: float | None
    slots: tuple[SlotLag, ...]
    publications: tuple[str, ...]

    @property
    def is_in_recovery(self) -> bool:
        return self.server.is_in_recovery


def _ask(_node: Node, connection: psycopg.Connection[Any]) -> _Position:
    rows = connection.execute(LAGS_QUERY).fetchall()
    is_in_recovery, position, age_seconds, system_identifier = rows[0][:4]
    slots = tuple(_slot_lag(row[4], row[5], row[6], state_of_row(*row[7:])) for row in rows if row[4] is not None)
    server = ServerState(is_in_recovery, system_identifier)
    publications = () if is_in_recovery else read_own_names(connection)
    return _Position(server, Lsn.parse(position) if position else None, age_seconds, slots, publications)


def _slot_lag(slot: str, lag_bytes: int | None, retained_bytes: int, state: SlotState) -> SlotLag:
    # A slot that is being created has no position and no two-phase decoding yet.
    problem = "" if lag_bytes is None and not state.invalid else slot_problem(slot, state)
    return SlotLag(slot, lag_bytes, retained_bytes, state.wal_status, problem)


def _lags_of(node: Node, answers: NodeAnswers[_Position]) -> NodeLags:
    own = answers.found.get(node.id)
    if own is None:
        return NodeLags(node.id, answers.problems[node.id])
    replay = _replay(own, answers.found, node.backup_of)
    return NodeLags(node.id, "", own.is_in_recovery, own.position, own.slots, replay, own.publications)


def _replay(own: _Position, found: Mapping[str, _Position], primary: str | None) -> ReplayLag | None:
    other = found.get(primary) if primary else None
    if other is None or not own.is_in_recovery or other.is_in_recovery:
        # After a promotion the positions belong to different timelines.
        return None
    if own.position is None or other.position is None:
        return None
    size_bytes = max(other.position - own.position, 0)
    return ReplayLag(size_bytes, own.age_seconds if size_bytes else 0.0)


# Below this, Spark saves less time than it takes to start (docs/architecture/draining.md).
SIDE_BY_SIDE_BYTES = 256 << 20
# Drains of this much WAL at the same time take some 400 MB of memory (measured). A drain of any amount takes up to
# 300 MB.
AT_ONCE_BYTES, AT_ONCE_MIN, AT_ONCE_MAX = 512 << 20, 2, 8
# Draining so little WAL consists of opening sessions and waiting for the server, so more nodes are drained at a time.
# Otherwise one node with much WAL would also slow down the drains of a thousand idle nodes.
LITTLE_BYTES, LITTLE_AT_ONCE = 4 << 20, 16
RETAINED_QUERY = f"""
SELECT slot_name, coalesce(greatest(pg_wal_lsn_diff({POSITION}, restart_lsn), 0), 0)::bigint, {STATE_FIELDS}
  FROM pg_replication_slots s WHERE {SLOTS_HERE} ORDER BY 1
"""
# A slot that is being created has no position yet: decoding begins where it gets one, so no WAL waits for it.
WAITING_QUERY = f"""
SELECT coalesce(pg_wal_lsn_diff({POSITION}, confirmed_flush_lsn), 0)::bigint
  FROM pg_replication_slots WHERE slot_name = %s
"""


class Retained(Struct, frozen=True):
    """How much WAL a node retains for one slot, and its limit; `problem` is as in SlotLag."""

    node: str
    slot: str
    size_bytes: int
    limit_bytes: int
    problem: str = ""

    @property
    def is_much(self) -> bool:
        """Whether the node retains more than an eighth of its limit, so that an operator may want to know."""
        return 8 * self.size_bytes > self.limit_bytes

    @property
    def is_past_half(self) -> bool:
        """Whether the node retains more than half of its limit, which deserves a warning."""
        return 2 * self.size_bytes > self.limit_bytes

    @property
    def is_past_limit(self) -> bool:
        """Whether the node retains more than its limit."""
        return self.size_bytes > self.limit_bytes


class RetainedAnswers(Struct, frozen=True):
    """The WAL that nodes retain, and the `old` databases that restores have set aside.

    `answered` are the nodes that answered; `unanswered` maps the others to the reason. `promoted` names the standbys
    that have taken their primaries' places, by primary.
    """

    retained: tuple[Retained, ...]
    unanswered: Mapping[str, str]
    old: tuple[OldDatabase, ...] = ()
    answered: tuple[str, ...] = ()
    promoted: Mapping[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> dict[str, dict[str, str]]:
        """The problem with each slot ("" if none), by slot, for each node that answered."""
        return {
            node: {retained.slot: retained.problem for retained in self.retained if retained.node == node}
            for node in self.answered
        }

    def of_slot(self, slot: str) -> tuple[Retained, ...]:
        """Return the WAL that the nodes retain for `slot`."""
        return tuple(retained for retained in self.retained if retained.slot == slot)


def read_retained(node: Node, connection: psycopg.Connection[Any]) -> list[Retained]:
    """Read how much WAL the node retains for each of Cutline's slots in its database; raise NodeUnreachableError."""
    try:
        rows = connection.execute(RETAINED_QUERY).fetchall()
    except psycopg.OperationalError as error:
        raise unreachable_error(node, error) from error
    lags = [_slot_lag(slot, 0 if state[0] else None, size, state_of_row(*state)) for slot, size, *state in rows]
    return [Retained(node.id, lag.slot, lag.retained_bytes, node.retained_wal_bytes_max, lag.problem) for lag in lags]


def read_waiting(sessions: Sessions, slot: str) -> dict[str, int]:
    """Return the bytes of WAL after the slot's position, keyed by node. Raises NodeUnreachableError."""

    def read(node: Node) -> int:
        with raising_unreachable(node):
            (waiting,) = sessions.connections[node.id].execute(WAITING_QUERY, (slot,)).fetchone() or (0,)
        return max(int(waiting), 0)

    return dict(zip((node.id for node in sessions.nodes), in_parallel(read, sessions.nodes), strict=True))


def is_for_spark(waiting: Mapping[str, int]) -> bool:
    """Whether Spark archives this much WAL per node faster than the command itself.

    A node is drained by one task, so executors only save the time of the nodes besides the one with the most WAL. A
    transaction that began before the slot's position and ended after it adds to the WAL that is decoded.
    """
    sizes = waiting.values()
    return sum(sizes) - max(sizes, default=0) > SIDE_BY_SIDE_BYTES


def drains_at_once(sizes: Iterable[int]) -> int:
    """Return how many nodes with these bytes of WAL the command should drain at a time: fewer if they have much WAL."""
    most = max([1, *sizes])
    return LITTLE_AT_ONCE if most <= LITTLE_BYTES else min(max(AT_ONCE_BYTES // most, AT_ONCE_MIN), AT_ONCE_MAX)


class HasWal(Protocol):
    """A task that drains `wal_bytes` of WAL."""

    @property
    def wal_bytes(self) -> int:
        """The bytes of WAL to drain."""
        ...


WalTask = TypeVar("WalTask", bound=HasWal)


def drain_rounds(tasks: Iterable[WalTask]) -> Iterator[tuple[list[WalTask], int]]:
    """Divide the tasks into rounds that run one after the other; yield each with the number of tasks to run at a time.

    The tasks with more than LITTLE_BYTES come first. Within a round, the tasks are in descending order of their WAL.
    """
    ordered = sorted(tasks, key=lambda task: -task.wal_bytes)
    for is_little in (False, True):
        if some := [task for task in ordered if (task.wal_bytes <= LITTLE_BYTES) == is_little]:
            yield some, drains_at_once(task.wal_bytes for task in some)


class RetainedQuery:
    """Queries all nodes of a fleet in parallel, in background threads that start with this object."""

    def __init__(self, fleet: Fleet, seconds_max: float = ASKING_SECONDS_MAX) -> None:
        self._fleet = fleet
        self._query = NodesQuery(fleet.nodes, _ask_retained, seconds_max)

    def answers(self) -> RetainedAnswers:
        """Wait for the answers until the time limit; return them in the roles that the servers have now."""
        roles = in_current_roles(self._fleet, self._query.answers(), lambda answer: answer.server)
        limits, answers = {node.id: node.retained_wal_bytes_max for node in roles.fleet.nodes}, roles.answers
        retained = [
            replace(one, node=node, limit_bytes=limits[node])
            for node, answer in answers.found.items()
            for one in answer.retained
        ]
        old = [replace(one, node=node) for node, answer in answers.found.items() for one in answer.old]
        return RetainedAnswers(tuple(retained), answers.problems, tuple(old), tuple(answers.found), roles.promoted)


class _NodeAnswer(Struct, frozen=True):
    server: ServerState
    retained: list[Retained]
    old: list[OldDatabase]


def _ask_retained(node: Node, connection: psycopg.Connection[Any]) -> _NodeAnswer:
    server = read_server(connection)
    old = [] if server.is_in_recovery else read_old(node, connection)
    return _NodeAnswer(server, read_retained(node, connection), old)


def query_retained(nodes: Iterable[Node], seconds_max: float = ASKING_SECONDS_MAX) -> RetainedAnswers:
    """Ask the nodes how much WAL they retain, and wait for their answers until the time limit."""
    answers = NodesQuery(nodes, read_retained, seconds_max).answers()
    retained = tuple(one for found in answers.found.values() for one in found)
    return RetainedAnswers(retained, answers.problems, answered=tuple(answers.found))
