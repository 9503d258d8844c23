"""Sequences: where each one stands, never behind what was handed out before the cut.

No WAL that can be decoded tells a sequence's value. It is read before the cut begins and again after it: nothing that
was handed out before the cut is ahead of the second reading, unless somebody set the sequence back in between; then
the first one holds. Where one is begun anew (RESTART, TRUNCATE … RESTART IDENTITY) the fingerprint of the catalogs
tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import psycopg
from msgspec import structs
from psycopg import sql

from fleet.config import Node
from fleet.nodes.relation_locks import bound_lock_waits, raising_locked
from fleet.tables.groups import quote_identifier
from snapshots.records.commit import Sequence
from storage.errors import RefusedError

# Every sequence that a statement reads is locked until its end, and a server has room for a few thousand locks.
READ_AT_ONCE = 200
READINGS_MAX = 5
SEQUENCES_QUERY = """
SELECT n.nspname, c.relname, s.seqincrement, s.seqcycle, has_sequence_privilege(c.oid, 'SELECT')
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence = 'p' AND n.nspname !~ '^pg_'
 ORDER BY 1, 2
"""


class SequenceUnreadableError(RefusedError):
    """The value of a sequence can't be had."""


def read_sequences(node: Node, connection: psycopg.Connection[Any]) -> tuple[Sequence, ...]:
    """Every permanent sequence of the node's database as it stands, by name.

    Raises SequenceUnreadableError, and RelationLockedError where one stays locked: by TRUNCATE … RESTART IDENTITY, say.
    """
    for _ in range(READINGS_MAX):
        try:
            return _read(node, connection)
        except psycopg.errors.UndefinedTable:
            # Dropped or renamed since it was listed.
            continue
    raise SequenceUnreadableError(
        f"node {node.id}: sequences were dropped or renamed each of {READINGS_MAX} times that they were to be read",
        hint="repeat the command",
    )


def _read(node: Node, connection: psycopg.Connection[Any]) -> tuple[Sequence, ...]:
    found = connection.execute(SEQUENCES_QUERY).fetchall()
    if unreadable := [f"{schema}.{name}" for schema, name, *_, readable in found if not readable]:
        raise SequenceUnreadableError(
            f"node {node.id}: role {connection.info.user} may not read {', '.join(unreadable)}",
            hint="GRANT pg_read_all_data TO the role",
        )
    values: list[tuple[int, bool]] = []
    for start in range(0, len(found), READ_AT_ONCE):
        names = [(schema, name) for schema, name, *_ in found[start : start + READ_AT_ONCE]]
        relations = [".".join(map(quote_identifier, name)) for name in names]
        with raising_locked(node, "reading sequences", relations), connection.transaction():
            bound_lock_waits(connection)
            values += _values(connection, names)
    return tuple(
        Sequence(schema, name, last_value, is_called, increment, cycles)
        for (schema, name, increment, cycles, _), (last_value, is_called) in zip(found, values, strict=True)
    )


def _values(connection: psycopg.Connection[Any], names: list[tuple[str, str]]) -> list[tuple[int, bool]]:
    # From the relation itself: no function of all versions tells the value of one that was never used.
    each = (
        sql.SQL("SELECT {}, last_value, is_called FROM {}").format(sql.Literal(number), sql.Identifier(*name))
        for number, name in enumerate(names)
    )
    rows = connection.execute(sql.SQL(" UNION ALL ").join(each) + sql.SQL(" ORDER BY 1")).fetchall()
    return [(last_value, is_called) for _, last_value, is_called in rows]


def never_back(
    before: Mapping[str, Iterable[Sequence]], after: Mapping[str, Iterable[Sequence]]
) -> dict[str, tuple[Sequence, ...]]:
    """The sequences of `after` by shard, none of them behind where it stood `before`.

    One that cycles has no direction in which to be behind.
    """
    found: dict[str, tuple[Sequence, ...]] = {}
    for shard, sequences in after.items():
        known = {(one.schema, one.name): one for one in before[shard]}
        found[shard] = tuple(_is_farther(known.get((one.schema, one.name), one), one) for one in sequences)
    return found


def _is_farther(before: Sequence, after: Sequence) -> Sequence:
    if after.cycles or before.increment * after.increment < 0:
        return after
    direction = 1 if after.increment > 0 else -1
    found = max(after, before, key=lambda one: (direction * one.last_value, one.is_called))
    return structs.replace(after, last_value=found.last_value, is_called=found.is_called)
