"""What an earlier process of the same restore has run of a database's DDL.

Each transaction of several entries enters its mark in the database's ledger, and a mark for each of them that was
refused. Indexes, keys and foreign keys that sessions create side by side need none: each is one statement, and is
done if its object exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.nodes.encodings import raw_bytes, raw_text
from cutline.restore.ddl.ddl import DdlEntry, SchemaLoadError

DIGEST_SHOWN = 16
REFUSED = "refused"
# The names are ASCII: a session in any encoding reads them.
MARKS_QUERY = "SELECT convert_to(task, 'UTF8') FROM {ledger} WHERE starts_with(task, '{section} ')"
# Schema, table and name: an archive names an index without its table.
EXISTING_QUERY = """
SELECT namesend(n.nspname), ''::bytea, namesend(c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('i', 'I')
UNION ALL
SELECT namesend(n.nspname), namesend(c.relname), namesend(o.conname)
  FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
"""
SIZES_QUERY = """
SELECT namesend(n.nspname), namesend(c.relname), pg_relation_size(c.oid)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema')
"""


class BuiltObject(NamedTuple):
    """An index or a constraint, as raw text; `table` is "" for an index."""

    schema: str
    table: str
    name: str


def name_marks(section: str, batches: Iterable[bytes]) -> list[str]:
    """The name of each batch's mark: its number, and a digest of what is run."""
    return [
        f"{section} {number} {hashlib.sha256(batch).hexdigest()[:DIGEST_SHOWN]}" for number, batch in enumerate(batches)
    ]


def read_marks(connection: psycopg.Connection[Any], ledger: str, section: str, names: Iterable[str]) -> set[str]:
    """The marks of a section in the ledger; raise SchemaLoadError if one is not among `names`."""
    query = MARKS_QUERY.format(ledger=ledger, section=section)
    found = {raw_text(bytes(task)) for (task,) in connection.execute(query.encode())}
    if not found <= set(names):
        raise SchemaLoadError(
            f"the {section} DDL is not the one that the restore began with: the target's roles have changed, or it"
            " was begun by other programs",
            hint="go on as the same role, where it began, with the roles that the target had then; or undo it",
        )
    return found


def refused_mark(section: str, entry: DdlEntry) -> str:
    """The name of the mark of a refused entry."""
    return f"{REFUSED} {section} {hashlib.sha256(raw_bytes(entry.statements)).hexdigest()[:DIGEST_SHOWN]}"


def read_refused(connection: psycopg.Connection[Any], ledger: str) -> set[str]:
    """The marks of refused entries in the ledger."""
    query = MARKS_QUERY.format(ledger=ledger, section=REFUSED)
    return {raw_text(bytes(task)) for (task,) in connection.execute(query.encode())}


def remove_refused(ledger: str, name: str) -> str:
    """The statement that removes the mark of an entry that was refused."""
    return f"DELETE FROM {ledger} WHERE task = '{name}';"


def read_existing(connection: psycopg.Connection[Any]) -> set[BuiltObject]:
    """The indexes and constraints of the database."""
    found = connection.execute(EXISTING_QUERY).fetchall()
    return {BuiltObject(*(raw_text(bytes(one)) for one in row)) for row in found}


def read_table_sizes(connection: psycopg.Connection[Any]) -> dict[tuple[str, str], int]:
    """The bytes of the database's tables, by schema and name (raw text)."""
    found = connection.execute(SIZES_QUERY).fetchall()
    return {(raw_text(bytes(schema)), raw_text(bytes(name))): size for schema, name, size in found}


def mark(ledger: str, name: str) -> str:
    """The statement that enters a mark, unless it is there."""
    return f"INSERT INTO {ledger} VALUES ('{name}', 0, 0) ON CONFLICT DO NOTHING;"


def drop_statement(ledger: str) -> str:
    """The statement that drops the ledger and its schema."""
    return f"DROP SCHEMA {ledger.partition('.')[0]} CASCADE;"
