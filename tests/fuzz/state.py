"""The state of a shard as PostgreSQL reports it, read by the judge from the source and from a restored database.

Nothing of Cutline takes part but what finds PostgreSQL's tools.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.nodes.programs import run_tool

# The settings of the judge's session, which override the database's.
JUDGE = {
    "datestyle": "ISO", "intervalstyle": "postgres", "timezone": "UTC", "bytea_output": "hex",
    "extra_float_digits": "1", "search_path": "pg_catalog", "lock_timeout": "20s",
    "xmloption": "content", "quote_all_identifiers": "off", "default_transaction_isolation": r"read\ committed",
}  # fmt: skip
# The columns are ordered by name: pg_dump puts a child's inherited columns before its own.
TABLES_QUERY = """
SELECT format('%I.%I', n.nspname, c.relname), coalesce(string_agg(quote_ident(a.attname), ', ' ORDER BY a.attname), '')
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|information_schema)'
 GROUP BY 1, c.oid ORDER BY 1
"""
SEQUENCES_QUERY = """
SELECT n.nspname || '.' || c.relname, pg_sequence_last_value(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'S' AND c.relpersistence = 'p' ORDER BY 1
"""
# A detached partition keeps the names of its parent's constraints, and pg_dump writes only these names: when its script
# runs, PostgreSQL finds them taken when it names the parent's constraints.
NOT_NULL_NAME = re.compile(r' CONSTRAINT (?:"(?:[^"]|"")*"|\w+) NOT NULL')


Sequences = Mapping[str, int | None]


class FoundError(AssertionError):
    """Cutline got a case wrong."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of one shard: its tables' sorted rows, its sequences, its DDL as pg_dump writes it."""

    rows: Mapping[str, bytes]
    sequences: Sequences
    ddl: str


def state_of(dsn: str) -> State:
    """Read the state of a database; nobody may write meanwhile."""
    with psycopg.connect(judge_dsn(dsn)) as connection:
        rows = {table: _copy_rows(connection, table, columns) for table, columns in connection.execute(TABLES_QUERY)}
    return State(rows, sequences_of(dsn), ddl_of(dsn))


def sequences_of(dsn: str) -> Sequences:
    """The last value of every sequence."""
    with psycopg.connect(judge_dsn(dsn)) as connection:
        return dict(connection.execute(SEQUENCES_QUERY).fetchall())


def _copy_rows(connection: psycopg.Connection[Any], table: str, columns: str) -> bytes:
    """A table's own rows as PostgreSQL prints and sorts them."""
    query = f'COPY (SELECT {columns} FROM ONLY {table} ORDER BY ROW({columns})::text COLLATE "C") TO STDOUT'
    with connection.cursor().copy(query) as copy:
        return b"".join(bytes(piece) for piece in copy)


def judge_dsn(dsn: str) -> str:
    """The database with the judge's settings; the bytes of an SQL_ASCII database are read as LATIN1."""
    with psycopg.connect(dsn) as connection:
        is_ascii = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
    settings = JUDGE | {"client_encoding": "LATIN1" if is_ascii else "UTF8"}
    return make_conninfo(dsn, options=" ".join(f"-c {name}={value}" for name, value in settings.items()))


def ddl_of(dsn: str) -> str:
    """Everything but rows, as pg_dump writes it."""
    completed = run_tool(
        "pg_dump", "--dbname", make_conninfo(dsn, options="-c quote_all_identifiers=off"), "--schema-only",
        "--no-publications", "--restrict-key=fuzz",
        seconds_max=120,
    )  # fmt: skip
    return NOT_NULL_NAME.sub(" NOT NULL", completed.stdout)


def compare(expected: State, found: State, later: Sequence[Sequences], where: str) -> None:
    """Raise FoundError with the first difference; a sequence may also have a value that it had `later`."""
    _compare(expected.ddl.splitlines(), found.ddl.splitlines(), f"{where}: pg_dump")
    if found.rows.keys() != expected.rows.keys():
        raise FoundError(f"{where}: tables: {sorted(expected.rows)} became {sorted(found.rows)}")
    for table, text in expected.rows.items():
        _compare(text.split(b"\n"), found.rows[table].split(b"\n"), f"{where}: rows of {table}")
    for name, value in expected.sequences.items():
        if found.sequences.get(name) not in [value, *(one.get(name) for one in later)]:
            raise FoundError(f"{where}: sequence {name}: {value} became {found.sequences.get(name)}")


def _compare(expected: list[Any], found: list[Any], what: str) -> None:
    if expected == found:
        return
    lost, new = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    shown = [f"- {line!r:.1500}" for line in lost] + [f"+ {line!r:.1500}" for line in new]
    summary = f"{what}: {len(expected)} lines became {len(found)}"
    raise FoundError("\n".join([summary, *(shown[:12] or ["in another order"])]))


def signature(error: BaseException) -> str:
    """What failures with probably the same cause have in common."""
    first = str(error).partition("\n")[0]
    return re.sub(r'"[^"]*"|\b[\w.-]*\d[\w.-]*\b', "…", first)[:90]
