"""Read the sequences, so that none is behind a value that it handed out before the cut.

Logical decoding does not show a sequence's value. It is read before the cut begins and again after it. A value handed
out before the cut is never ahead of the second reading, unless somebody set the sequence back in between; then the
first reading counts. A restart (RESTART, TRUNCATE … RESTART IDENTITY) changes the fingerprint of the catalogs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from msgspec import structs
from psycopg import sql

from fleet.config import Node
from fleet.nodes.relation_locks import bound_lock_waits, raising_locked
from fleet.tables.names import quote_identifier
from snapshots.records.commit import Sequence
from storage.errors import RefusedError

# A statement locks every sequence that it reads until it ends, and a server has room for a few thousand locks.
READ_AT_ONCE = 200
READINGS_MAX = 5
SEQUENCES_QUERY = """
SELECT n.nspname, c.relname, s.seqincrement, s.seqcycle, has_sequence_privilege(c.oid, 'SELECT')
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence = 'p' AND n.nspname !~ '^pg_'
 ORDER BY 1, 2
"""


class SequenceUnreadableError(RefusedError):
    """The value of a sequence can't be read."""


def read_sequences(node: Node, connection: psycopg.Connection[Any]) -> tuple[Sequence, ...]:
    """Every permanent sequence of the node's database with its current value, ordered by name.

    Raises SequenceUnreadableError, and RelationLockedError if one stays locked, by TRUNCATE … RESTART IDENTITY say.
    """
    for _ in range(READINGS_MAX):
        try:
            return _read(node, connection)
        except psycopg.errors.UndefinedTable:
            # Dropped or renamed since it was listed.
            continue
    raise SequenceUnreadableError(
        f"node {node.id}: sequences were dropped or renamed during each of {READINGS_MAX} attempts to read them",
        hint="repeat the command",
    )


def _read(node: Node, connection: psycopg.Connection[Any]) -> tuple[Sequence, ...]:
    rows = connection.execute(SEQUENCES_QUERY).fetchall()
    if unreadable := [f"{schema}.{name}" for schema, name, *_, readable in rows if not readable]:
        raise SequenceUnreadableError(
            f"node {node.id}: role {connection.info.user} may not read {', '.join(unreadable)}",
            hint="GRANT pg_read_all_data TO the role",
        )
    values: list[tuple[int, bool]] = []
    for start in range(0, len(rows), READ_AT_ONCE):
        names = [(schema, name) for schema, name, *_ in rows[start : start + READ_AT_ONCE]]
        relations = [".".join(map(quote_identifier, name)) for name in names]
        with raising_locked(node, "reading sequences", relations), connection.transaction():
            bound_lock_waits(connection)
            values += _values(connection, names)
    return tuple(
        Sequence(schema, name, last_value, is_called, increment, cycles)
        for (schema, name, increment, cycles, _), (last_value, is_called) in zip(rows, values, strict=True)
    )


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
        earlier = {(one.schema, one.name): one for one in before[shard]}
        latest[shard] = tuple(_latest(earlier.get((one.schema, one.name), one), one) for one in sequences)
    return latest


def _latest(before: Sequence, after: Sequence) -> Sequence:
    if after.cycles or before.increment * after.increment < 0:
        return after
    direction = 1 if after.increment > 0 else -1
    latest = max(after, before, key=lambda one: (direction * one.last_value, one.is_called))
    return structs.replace(after, last_value=latest.last_value, is_called=latest.is_called)
