"""What a shard holds, as PostgreSQL says it: the judge's own reading, of the source and of what was restored.

Nothing of Cutline has a part in it but where PostgreSQL's tools are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from fleet.programs.wheel import run_tool

# The judge's own session, whatever the database is set to.
JUDGE = {
    "datestyle": "ISO", "intervalstyle": "postgres", "timezone": "UTC", "bytea_output": "hex",
    "extra_float_digits": "1", "search_path": "pg_catalog", "lock_timeout": "20s",
    "xmloption": "content", "quote_all_identifiers": "off", "default_transaction_isolation": r"read\ committed",
}  # fmt: skip
# The columns by name: pg_dump gives those that a heir has from its parent their place before the heir's own.
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
# A detached partition keeps the names of its parent's constraints, and pg_dump names those alone: where its script is
# run, PostgreSQL finds them taken when it names the parent's.
NOT_NULL_NAME = re.compile(r' CONSTRAINT (?:"(?:[^"]|"")*"|\w+) NOT NULL')


Sequences = Mapping[str, int | None]


class FoundError(AssertionError):
    """A case that Cutline does not get right."""


@dataclass(frozen=True, slots=True)
class State:
    """What one shard is: its tables' sorted rows, its sequences, its definitions as pg_dump has them."""

    rows: Mapping[str, bytes]
    sequences: Sequences
    definitions: str


def state_of(dsn: str) -> State:
    """A database's state; nobody may write meanwhile."""
    with psycopg.connect(judging(dsn)) as connection:
        rows = {table: _copied(connection, table, columns) for table, columns in connection.execute(TABLES_QUERY)}
    return State(rows, sequences_of(dsn), definitions_of(dsn))


def sequences_of(dsn: str) -> Sequences:
    """What every sequence has handed out last."""
    with psycopg.connect(judging(dsn)) as connection:
        return dict(connection.execute(SEQUENCES_QUERY).fetchall())


def _copied(connection: psycopg.Connection[Any], table: str, columns: str) -> bytes:
    """A table's own rows as PostgreSQL prints and sorts them."""
    query = f'COPY (SELECT {columns} FROM ONLY {table} ORDER BY ROW({columns})::text COLLATE "C") TO STDOUT'
    with connection.cursor().copy(query) as copy:
        return b"".join(bytes(piece) for piece in copy)


def judging(dsn: str) -> str:
    """The same database, read with the judge's settings; of SQL_ASCII bytes are read as LATIN1 has them."""
    with psycopg.connect(dsn) as connection:
        is_ascii = connection.info.parameter_status("server_encoding") == "SQL_ASCII"
    settings = JUDGE | {"client_encoding": "LATIN1" if is_ascii else "UTF8"}
    return make_conninfo(dsn, options=" ".join(f"-c {name}={value}" for name, value in settings.items()))


def definitions_of(dsn: str) -> str:
    """Everything but rows, as pg_dump writes it."""
    completed = run_tool(
        "pg_dump", "--dbname", make_conninfo(dsn, options="-c quote_all_identifiers=off"), "--schema-only",
        "--no-publications", "--restrict-key=fuzz",
        seconds_max=120,
    )  # fmt: skip
    return NOT_NULL_NAME.sub(" NOT NULL", completed.stdout)


def compare(expected: State, found: State, later: Sequence[Sequences], where: str) -> None:
    """Raise FoundError with the first difference. A sequence may stand where it stood `later`."""
    _compare(expected.definitions.splitlines(), found.definitions.splitlines(), f"{where}: pg_dump")
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
    told_first = f"{what}: {len(expected)} lines became {len(found)}"
    raise FoundError("\n".join([told_first, *(shown[:12] or ["in another order"])]))


def signature(error: BaseException) -> str:
    """What two failures have in common that are probably one fault."""
    first = str(error).partition("\n")[0]
    return re.sub(r'"[^"]*"|\b[\w.-]*\d[\w.-]*\b', "…", first)[:90]
