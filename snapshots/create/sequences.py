"""Read sequences for a cut.

Logical decoding does not show sequence values, so they are read before the cut and again after it. No value handed out
before the cut is ahead of the second reading, unless the sequence was set back in between; in that case, the first
reading counts. A restart (RESTART, TRUNCATE … RESTART IDENTITY) gives the sequence a new file, and so its row in
pg_class a new version. If that happens between the two readings, the value at the cut is unknown, and the attempt is
invalid.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import psycopg
from msgspec import Struct, structs
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.messages import list_some
from cutline.fleet.table_names import quote_identifier
from cutline.fleet.wait_notes import NOTE_SECONDS
from cutline.nodes.connections import refuse_views
from cutline.nodes.relation_locks import bound_lock_waits, locked_error
from cutline.snapshots.records.commit import Sequence
from cutline.storage.errors import RefusedError

# A statement locks all sequences that it reads until it ends, and a server has room for only a few thousand locks.
READ_AT_ONCE = 200
READINGS_MAX = 5
# For a sequence that was dropped after the query started, has_sequence_privilege returns NULL.
SEQUENCES_QUERY = """
SELECT c.oid::bigint, n.nspname, c.relname, s.seqincrement, s.seqcycle, s.seqmin, s.seqmax,
       EXISTS (SELECT FROM pg_depend d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e'),
       coalesce(has_schema_privilege(n.oid, 'USAGE') AND has_sequence_privilege(c.oid, 'SELECT'), true)
  FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relpersistence = 'p' AND n.nspname !~ '^pg_'
 ORDER BY 2, 3
"""
# pg_sequence_last_value, given an oid, locks the sequence until the transaction ends; nothing else does. The lock is
# ROW EXCLUSIVE, which waits for locks in these modes. The function returns NULL unless is_called is set.
MODES = ("ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
LOCK_QUERY = "SELECT oid, pg_sequence_last_value(oid::regclass) FROM unnest(%s::bigint[]) AS of (oid)"
# The versions are null for relations that have been replaced.
VERSIONS_QUERY = """
SELECT p.name, c.xmin::text FROM unnest(%s::text[], %s::bigint[]) AS p (name, oid)
  LEFT JOIN pg_class c ON c.oid = to_regclass(p.name) AND c.oid = p.oid AND c.relkind = 'S'
"""
NAMED_MAX = 5


class SequenceUnreadableError(RefusedError):
    """The value of a sequence can't be read."""


class SequenceReading(Struct, frozen=True):
    """The permanent sequences of a database with their values, ordered by name.

    `versions` has, by name, the xmin of each sequence's row in pg_class when its value was read.
    """

    sequences: tuple[Sequence, ...]
    versions: Mapping[str, str]


def read_sequences(
    node: Node, connection: psycopg.Connection[Any], seconds_max: float, tell: Callable[[str], None] = lambda _: None
) -> SequenceReading:
    """Read every permanent sequence in the node's database with its current value.

    Raises SequenceUnreadableError, and RelationLockedError if a sequence stays locked for `seconds_max` (at least
    NOTE_SECONDS), for example by a prepared TRUNCATE … RESTART IDENTITY. After NOTE_SECONDS, `tell` is called with a
    message that names the lock's holder.
    """
    began, seconds_max = time.monotonic(), max(seconds_max, NOTE_SECONDS)
    for _ in range(READINGS_MAX):
        try:
            return _read(node, connection, began, seconds_max, tell)
        except (psycopg.errors.UndefinedTable, psycopg.errors.WrongObjectType, psycopg.errors.InternalError_):
            # A sequence was dropped, renamed or replaced since it was listed. A missing oid raises an internal error.
            continue
    raise SequenceUnreadableError(
        f"node {node.id}: sequences were dropped or renamed during each of {READINGS_MAX} attempts to read them",
        hint="repeat the command",
    )


def _grants_text(unreadable: Collection[tuple[str, str]], role: str) -> str:
    """Return two ways to let the role read the sequences, given as (schema, name), each as SQL statements."""
    names = [f"{quote_identifier(schema)}.{quote_identifier(name)}" for schema, name in unreadable]
    schemas = ", ".join(dict.fromkeys(quote_identifier(schema) for schema, _ in unreadable))
    which = f"SEQUENCE {', '.join(names)}" if len(names) <= NAMED_MAX else f"ALL SEQUENCES IN SCHEMA {schemas}"
    grantee = quote_identifier(role)
    grants = f"GRANT USAGE ON SCHEMA {schemas} TO {grantee}; GRANT SELECT ON {which} TO {grantee};"
    return f"{grants}   or: GRANT pg_read_all_data TO {grantee};"


def _read(
    node: Node, connection: psycopg.Connection[Any], began: float, seconds_max: float, tell: Callable[[str], None]
) -> SequenceReading:
    rows = connection.execute(SEQUENCES_QUERY).fetchall()
    if unreadable := [(schema, name) for _, schema, name, *_, readable in rows if not readable]:
        names = list_some((f"{schema}.{name}" for schema, name in unreadable), NAMED_MAX)
        raise SequenceUnreadableError(
            f"node {node.id}: role {connection.info.user} may not read {names}",
            hint=_grants_text(unreadable, connection.info.user),
        )
    values: dict[int, tuple[int, bool]] = {}
    versions: dict[str, str] = {}
    for start in range(0, len(rows), READ_AT_ONCE):
        some = rows[start : start + READ_AT_ONCE]
        relations = {".".join(map(quote_identifier, (schema, name))): oid for oid, schema, name, *_ in some}
        # Wait briefly first, so that a long wait is reported.
        for limit in (NOTE_SECONDS, seconds_max):
            left = began + limit - time.monotonic()
            try:
                with connection.transaction():
                    refuse_views(connection)
                    connection.execute("SET TRANSACTION READ ONLY")
                    bound_lock_waits(connection, max(left, 0))
                    called, locked_versions = _lock(connection, relations)
                    uncalled = {oid: (schema, name) for oid, schema, name, *_ in some if oid not in called}
                    values |= called | _uncalled_values(connection, uncalled)
                    versions |= locked_versions
                break
            except psycopg.errors.LockNotAvailable as error:
                waited = time.monotonic() - began
                locked = locked_error(node, "reading sequences", relations, waited, modes=MODES)
                # Compare the limit, not the time: a wait may end a moment early, and then the rows of this batch would
                # be missing.
                if limit >= seconds_max:
                    locked.hint += "; or wait longer: --wait SECONDS"
                    raise locked from error
                tell(f"{locked.message}; waiting for up to {seconds_max:.0f} s")
    sequences = tuple(Sequence(schema, name, *values[oid], *facts) for oid, schema, name, *facts, _ in rows)
    return SequenceReading(sequences, versions)


def _lock(
    connection: psycopg.Connection[Any], planned: Mapping[str, int]
) -> tuple[dict[int, tuple[int, bool]], dict[str, str]]:
    """Lock the sequences in `planned` (oid by name); return the values of those that are called, and all versions.

    The values are keyed by oid, the versions by name. Raises WrongObjectType if a name now belongs to another relation.
    Without this check, an owner could replace a sequence with a view whose functions would run as our role.
    """
    names, oids = list(planned), list(planned.values())
    values = connection.execute(LOCK_QUERY, (oids,)).fetchall()
    versions: dict[str, str] = dict(connection.execute(VERSIONS_QUERY, (names, oids)).fetchall())
    for name in (name for name, version in versions.items() if version is None):
        raise psycopg.errors.WrongObjectType(f"{name} is now a different relation")
    return {oid: (value, True) for oid, value in values if value is not None}, versions


def _uncalled_values(
    connection: psycopg.Connection[Any], names: Mapping[int, tuple[str, str]]
) -> dict[int, tuple[int, bool]]:
    """Read the sequences themselves: no function in all supported versions returns the value of one that is not called.

    That takes longer, because each is a relation of the query.
    """
    if not names:
        return {}
    each = (
        sql.SQL("SELECT {}::bigint, last_value, is_called FROM {}").format(sql.Literal(oid), sql.Identifier(*name))
        for oid, name in names.items()
    )
    rows = connection.execute(sql.SQL(" UNION ALL ").join(each)).fetchall()
    return {oid: (last_value, is_called) for oid, last_value, is_called in rows}


def find_restarted(before: SequenceReading, after: SequenceReading) -> list[str]:
    """Return the names of the sequences that may have been restarted between the two readings.

    A sequence without its name in the first reading is new or was renamed: either makes the attempt invalid, too.
    """
    return [name for name, version in after.versions.items() if before.versions.get(name) != version]


def latest_sequences(before: SequenceReading, after: SequenceReading) -> tuple[Sequence, ...]:
    """Return the sequences in `after`, each with its value in `before` if that is further ahead.

    A sequence that cycles keeps its value in `after`, since its values have no order.
    """
    earlier = {(sequence.schema, sequence.name): sequence for sequence in before.sequences}
    return tuple(
        _latest(earlier.get((sequence.schema, sequence.name), sequence), sequence) for sequence in after.sequences
    )


def _latest(before: Sequence, after: Sequence) -> Sequence:
    if after.cycles or before.increment * after.increment < 0:
        return after
    latest = max(after, before, key=lambda sequence: sequence.reach)
    return structs.replace(after, last_value=latest.last_value, is_called=latest.is_called)
