"""Tables that are restored under other names: what would be in their way, and the renaming at the end.

A table moves to another schema with its indexes, its constraints and the sequences of its columns, so their names must
be free there, too.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psycopg
from msgspec import structs

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect, raising_unreachable
from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.tables.names import quote_identifier, table_name
from cutline.restore.ddl.ddl import show_name
from cutline.restore.parts.scope import TableMove
from cutline.snapshots.ddl.archive import ArchiveEntry
from cutline.storage.errors import RefusedError

TABLE, CONSTRAINT = "TABLE", "CONSTRAINT"
# What has a name among relations or types, and what moves with its table.
FOLLOWING = ("SEQUENCE", "INDEX", CONSTRAINT)
NAMED = (*FOLLOWING, TABLE, "VIEW", "MATERIALIZED VIEW", "FOREIGN TABLE", "TYPE", "SHELL TYPE", "DOMAIN")
NAMES_QUERY = """
SELECT convert_to(name, getdatabaseencoding()) FROM unnest(%s::text[]) WITH ORDINALITY AS given (name, n) ORDER BY n
"""
# Nobody but the owner of the database can act as pg_database_owner: a new schema is that owner's anyway.
OWNER_QUERY = """
SELECT convert_to(pg_get_userbyid(n.nspowner)::text, getdatabaseencoding()),
       n.nspowner <> 'pg_database_owner'::regrole OR u.rolsuper
  FROM pg_namespace n, pg_roles u WHERE n.nspname = %s AND u.rolname = current_user
"""


class TableInTheWayError(RefusedError):
    """The snapshot has something of the name that a table is to be restored under."""


def check_moves(entries: Iterable[ArchiveEntry], moves: Iterable[TableMove]) -> None:
    """Raise TableInTheWayError if something has a name that a moved table, or what moves with it, is to have.

    All names are raw text.
    """
    entries, moves = list(entries), list(moves)
    tables = {(entry.schema, entry.name): entry.number for entry in entries if entry.kind == TABLE}
    by_number = {entry.number: entry for entry in entries}
    names = {entry.number: _own_name(entry, by_number) for entry in entries if entry.kind in NAMED}
    taken = {(by_number[number].schema, name): by_number[number].kind.lower() for number, name in names.items()}
    for move in moves:
        number = tables.get((move.schema, move.table), -1)
        following = [one for one in entries if one.kind in FOLLOWING and number in one.dependencies]
        moved = [move.to_table]
        if move.schema != move.to_schema:
            moved += [names[entry.number] for entry in following]
        for name in moved:
            kind = taken.get((move.to_schema, name))
            if kind is not None:
                raise TableInTheWayError(
                    f"--group {show_name(move.label)}: the name {show_name(table_name(move.to_schema, name))} is taken"
                    f" by {kind}",
                    hint="choose another name, or another schema",
                    details={"table": show_name(move.label)},
                )
            taken[move.to_schema, name] = "what another --group moves there"


def _own_name(entry: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    """The name of the entry's object; that of a constraint follows the name of its table, on which it depends."""
    tables = [entries[number].name for number in entry.dependencies if number in entries]
    prefixes = [f"{name} " for name in tables if entry.kind == CONSTRAINT and entry.name.startswith(f"{name} ")]
    return entry.name.removeprefix(max(prefixes, key=len, default=""))


def move_statements(node: Node, moves: Iterable[TableMove]) -> str:
    """The statements (raw text) that give the tables of the database their other names; "" if there are none.

    A schema that is missing is made, and belongs to the owner of the table's first one.
    """
    moves = list(moves)
    if not moves:
        return ""
    with raising_unreachable(node), connect(node) as connection:
        return "".join(f"{one};\n" for move in moves for one in _statements_of(connection, move))


def _statements_of(connection: psycopg.Connection[Any], move: TableMove) -> Iterator[str]:
    names = connection.execute(NAMES_QUERY, (list(structs.astuple(move)),)).fetchall()
    schema, table, to_schema, to_table = (quote_identifier(raw_text(bytes(name))) for (name,) in names)
    # While it moves, neither schema may have another table of its name.
    between = quote_identifier(f"cutline_{secrets.token_hex(8)}")
    yield f"ALTER TABLE {schema}.{table} RENAME TO {between}"
    if to_schema != schema:
        owner, is_named = connection.execute(OWNER_QUERY, (move.schema,)).fetchone() or (b"", False)
        authorization = f" AUTHORIZATION {quote_identifier(raw_text(bytes(owner)))}" if is_named else ""
        yield f"CREATE SCHEMA IF NOT EXISTS {to_schema}{authorization}"
        yield f"ALTER TABLE {schema}.{between} SET SCHEMA {to_schema}"
    yield f"ALTER TABLE {to_schema}.{between} RENAME TO {to_table}"
