"""Read a cut's data other than rows: sequences, and the counters that show changes of append-only tables.

nodes/table_state.py describes PostgreSQL's counters. They are read before anything is changed, and again after
the cut, because sessions report to them late.

Logical decoding does not show a sequence's value. It is read before the cut begins and again after it. A value handed
out before the cut is never ahead of the second reading, unless somebody set the sequence back in between; then the
first reading counts. A restart (RESTART, TRUNCATE … RESTART IDENTITY) changes the fingerprint of the catalogs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import psycopg
from msgspec import structs
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import raising_unreachable, refuse_views
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.nodes.relation_locks import bound_lock_waits, locked_error
from cutline.nodes.sessions import Sessions
from cutline.nodes.table_state import Counters, TableState, check_counters, read_counters, unknown_counters_warnings
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence
from cutline.storage.errors import RefusedError
from cutline.wal.drain.waiting import NOTE_SECONDS


def check_append_only(
    sessions: Sessions, states: Mapping[str, Mapping[str, TableState]], since: str
) -> tuple[LeftOut, ...]:
    """Raise AppendOnlyChangedError if an append-only table was updated or deleted from since the `states`, by shard.

    Returns a warning for each table whose counters can't be compared. `since` names the moment of the states.
    """
    warnings: list[LeftOut] = []
    for node, connection in sessions.primaries.items():
        oids, was = _counters_in(states.get(node, {}).values())
        if not was:
            continue
        with raising_unreachable(sessions.fleet.node(node)):
            read = read_counters(connection, oids)
        now = {name: read[oid] for oid, name in oids.items()}
        check_counters(node, since, was, now)
        warnings += unknown_counters_warnings(node, was, now)
    return tuple(warnings)


def _counters_in(states: Iterable[TableState]) -> tuple[dict[int, str], dict[str, Counters]]:
    """The names by oid, and the counters by name, of the tables whose states have counters."""
    counted = [(state, state.counted) for state in states if state.counted]
    return {state.oid: state.table for state, _ in counted}, {state.table: counters for state, counters in counted}


def states_to_compare(plan: DdlPlan, known: KnownTables) -> dict[str, dict[str, TableState]]:
    """The states since which nobody may have updated or deleted, by shard and by the tables' current names.

    They are those of the previous commit; for a table that is copied again, that of the plan, which precedes the copy.
    """
    states: dict[str, dict[str, TableState]] = {}
    for shard, one in plan.shards.items():
        before = {state.oid: state for state in known.states[shard].values()}
        copied = {table.oid for table in one.to_copy}
        states[shard] = {
            name: state if state.oid in copied else structs.replace(before[state.oid], table=name)
            for name, state in one.states.items()
        }
    return states


def last_commit_label(chain: Chain) -> str:
    """The chain's last commit as error messages name it."""
    return f"increment {chain.last.increment}" if chain.last.increment else "the full snapshot"


def with_warnings(
    left_out: Iterable[LeftOut], chain: Chain, warnings: Iterable[LeftOut], copied: Collection[tuple[str, str]] = ()
) -> tuple[LeftOut, ...]:
    """Add to `left_out` the new `warnings` and those of the chain's previous commits.

    A warning about a table holds for all later commits, until the table is `copied` (node and name) again.
    """
    kind = LeftOutKind.UNCOUNTED_TABLE
    before = [out for out in chain.left_out if out.kind == kind and (out.node, out.name) not in copied]
    return tuple(dict.fromkeys((*left_out, *before, *warnings)))


# A statement locks every sequence that it reads until it ends, and a server has room for a few thousand locks.
READ_AT_ONCE = 200
READINGS_MAX = 5
SEQUENCES_QUERY = """
SELECT c.oid::bigint, n.nspname, c.relname, s.seqincrement, s.seqcycle, has_sequence_privilege(c.oid, 'SELECT')
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence = 'p' AND n.nspname !~ '^pg_'
 ORDER BY 2, 3
"""
# Asking for the last value locks a sequence, by oid, until the transaction ends. No other function or statement does.
# The lock is ROW EXCLUSIVE, and waits for these.
MODES = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
LOCK_QUERY = "SELECT pg_sequence_last_value(oid::regclass) FROM unnest(%s::bigint[]) AS of (oid)"
REPLACED_QUERY = """
SELECT p.name FROM unnest(%s::text[], %s::bigint[]) AS p (name, oid)
 WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = to_regclass(p.name) AND c.oid = p.oid AND c.relkind = 'S')
 LIMIT 1
"""


class SequenceUnreadableError(RefusedError):
    """The value of a sequence can't be read."""


def read_sequences(
    node: Node, connection: psycopg.Connection[Any], seconds_max: float, tell: Callable[[str], None] = lambda _: None
) -> tuple[Sequence, ...]:
    """Every permanent sequence of the node's database with its current value, ordered by name.

    Raises SequenceUnreadableError, and RelationLockedError if one stays locked for `seconds_max` (at least
    NOTE_SECONDS), by a prepared TRUNCATE … RESTART IDENTITY say. `tell` is told who holds it after NOTE_SECONDS.
    """
    began, seconds_max = time.monotonic(), max(seconds_max, NOTE_SECONDS)
    for _ in range(READINGS_MAX):
        try:
            return _read(node, connection, began, seconds_max, tell)
        except (psycopg.errors.UndefinedTable, psycopg.errors.WrongObjectType, psycopg.errors.InternalError_):
            # Dropped, renamed or replaced since it was listed. For an oid that is gone it is an internal error.
            continue
    raise SequenceUnreadableError(
        f"node {node.id}: sequences were dropped or renamed during each of {READINGS_MAX} attempts to read them",
        hint="repeat the command",
    )


def _read(
    node: Node, connection: psycopg.Connection[Any], began: float, seconds_max: float, tell: Callable[[str], None]
) -> tuple[Sequence, ...]:
    rows = connection.execute(SEQUENCES_QUERY).fetchall()
    if unreadable := [f"{schema}.{name}" for _, schema, name, *_, readable in rows if not readable]:
        raise SequenceUnreadableError(
            f"node {node.id}: role {connection.info.user} may not read {', '.join(unreadable)}",
            hint="GRANT SELECT on the sequences, or pg_read_all_data, TO the role",
        )
    values: list[tuple[int, bool]] = []
    for start in range(0, len(rows), READ_AT_ONCE):
        some = rows[start : start + READ_AT_ONCE]
        relations = {".".join(map(quote_identifier, (schema, name))): oid for oid, schema, name, *_ in some}
        # A short wait first, so that a long one is told.
        for limit in (NOTE_SECONDS, seconds_max):
            left = began + limit - time.monotonic()
            try:
                with connection.transaction():
                    refuse_views(connection)
                    connection.execute("SET TRANSACTION READ ONLY")
                    bound_lock_waits(connection, max(left, 0))
                    _lock(connection, relations)
                    values += _values(connection, [(schema, name) for _, schema, name, *_ in some])
                break
            except psycopg.errors.LockNotAvailable as error:
                waited = time.monotonic() - began
                locked = locked_error(node, "reading sequences", relations, waited, modes=MODES)
                # By the limit, not by the time: a wait may be over a moment early, and rows would lack.
                if limit >= seconds_max:
                    locked.hint += "; or wait longer: --wait SECONDS"
                    raise locked from error
                tell(f"{locked.message}; it waits for up to {seconds_max:.0f} s")
    return tuple(
        Sequence(schema, name, last_value, is_called, increment, cycles)
        for (_, schema, name, increment, cycles, _), (last_value, is_called) in zip(rows, values, strict=True)
    )


def _lock(connection: psycopg.Connection[Any], planned: Mapping[str, int]) -> None:
    """Lock the sequences, planned as name and oid; raise WrongObjectType unless each name is still that sequence's.

    Otherwise an owner could put a view in its place, whose functions would run as our role.
    """
    names, oids = list(planned), list(planned.values())
    connection.execute(LOCK_QUERY, (oids,))
    for (name,) in connection.execute(REPLACED_QUERY, (names, oids)).fetchall():
        raise psycopg.errors.WrongObjectType(f"{name} is another relation now")


def _values(connection: psycopg.Connection[Any], names: list[tuple[str, str]]) -> list[tuple[int, bool]]:
    # From the relation itself: no function of all versions returns the value of a sequence that was never used.
    each = (
        sql.SQL("SELECT {}, last_value, is_called FROM {}").format(sql.Literal(number), sql.Identifier(*name))
        for number, name in enumerate(names)
    )
    rows = connection.execute(sql.SQL(" UNION ALL ").join(each) + sql.SQL(" ORDER BY 1")).fetchall()
    return [(last_value, is_called) for _, last_value, is_called in rows]


def latest_sequences(
    before: Mapping[str, Iterable[Sequence]], after: Mapping[str, Iterable[Sequence]]
) -> dict[str, tuple[Sequence, ...]]:
    """The sequences of `after` by shard, none of them behind its value `before`.

    A sequence that cycles is taken as it is `after`: its values have no order.
    """
    latest: dict[str, tuple[Sequence, ...]] = {}
    for shard, sequences in after.items():
        earlier = {(sequence.schema, sequence.name): sequence for sequence in before[shard]}
        latest[shard] = tuple(
            _latest(earlier.get((sequence.schema, sequence.name), sequence), sequence) for sequence in sequences
        )
    return latest


def _latest(before: Sequence, after: Sequence) -> Sequence:
    if after.cycles or before.increment * after.increment < 0:
        return after
    direction = 1 if after.increment > 0 else -1
    latest = max(after, before, key=lambda sequence: (direction * sequence.last_value, sequence.is_called))
    return structs.replace(after, last_value=latest.last_value, is_called=latest.is_called)
