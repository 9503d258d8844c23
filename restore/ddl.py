"""Run a shard's stored DDL, refresh its materialized views, and set its sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, connect, unreachable_error
from fleet.nodes.encodings import RAW, raw_bytes
from restore.statements import batches, statements_of
from snapshots.records.commit import Sequence
from storage.errors import RefusedError

# Whole statements, as the scanner of restore/statements.py finds them. pg_dump quotes every identifier, and writes a
# foreign key without ONLY for a partitioned table.
IDENTIFIER = r'"(?:[^"]|"")+"'
RELATION = rf"{IDENTIFIER}\.{IDENTIFIER}"
FOREIGN_KEY = re.compile(
    rf"ALTER TABLE (?:ONLY )?(?P<table>{RELATION})\s+ADD CONSTRAINT (?P<name>{IDENTIFIER}) FOREIGN KEY .*", re.DOTALL
)
REFRESH_VIEW = re.compile(rf"REFRESH MATERIALIZED VIEW (?P<view>{RELATION});")
# pg_dump 18 writes this for servers of every version.
TRANSACTION_TIMEOUT = "SET transaction_timeout = 0;"
BUILD_SETTINGS = {"maintenance_work_mem": "256MB", "synchronous_commit": "off"}
SET_QUERY = """
SELECT setval(format('%%I.%%I', s.space, s.name)::regclass, s.value, s.is_called)
  FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::boolean[]) AS s (space, name, value, is_called)
"""
SEQUENCES_AT_ONCE = 500
STATEMENT_SHOWN_MAX = 200


class SchemaLoadError(RefusedError):
    """A target node refused the snapshot's DDL."""


def run_section(node: Node, section: str, script: str) -> None:
    """Run one section's SQL (raw text), one batch of statements per transaction.

    Raises SchemaLoadError with the server's message and the statement.
    """
    if not script:
        return
    # The server converts a whole message before it runs the SET client_encoding in it: so the session is raw already.
    with connect(node, client_encoding=RAW) as connection:
        for name, value in BUILD_SETTINGS.items():
            connection.execute(f"SET {name} = '{value}'")
        if connection.info.server_version < TRANSACTION_TIMEOUT_VERSION:
            script = "".join(one.text for one in statements_of(script) if one.bare != TRANSACTION_TIMEOUT)
        for statements in batches(script):
            result = connection.pgconn.exec_(raw_bytes(statements))
            if result.error_message:
                message = result.error_message.decode(errors="replace")
                if connection.broken:
                    raise unreachable_error(node, psycopg.OperationalError(message))
                raise _refused_error(node, section, message, _find_refused(connection, statements))


def _find_refused(connection: psycopg.Connection[Any], statements: str) -> str:
    """The statement that the server refuses, "" if it can't be found.

    The batch was one transaction and was rolled back: its statements are run again one by one, and rolled back.
    """
    connection.pgconn.exec_(b"BEGIN")
    bare = (one.bare for one in statements_of(statements) if one.bare)
    refused = (one for one in bare if connection.pgconn.exec_(raw_bytes(one)).error_message)
    statement = next(refused, "")
    connection.pgconn.exec_(b"ROLLBACK")
    return statement


def _refused_error(node: Node, section: str, message: str, statement: str) -> SchemaLoadError:
    return SchemaLoadError(
        f"node {node.id}: the {section} DDL was refused: {' '.join(message.split())}"
        + (f": {shorten_statement(show_name(statement))}" if statement else ""),
        hint="create what the statement needs on the target (an extension, a tablespace, a role), or restore to a"
        " server that supports it (lz4), then repeat the command",
        details={"node": node.id, "section": section, "statement": show_name(statement)},
    )


def shorten_statement(statement: str) -> str:
    """The statement on one line, cut off after STATEMENT_SHOWN_MAX characters."""
    text = " ".join(statement.split())
    return text if len(text) <= STATEMENT_SHOWN_MAX else f"{text[:STATEMENT_SHOWN_MAX]}…"


def remove_foreign_keys(script: str) -> tuple[str, list[str]]:
    """The post-data script without its foreign keys, and their names: some of the tables alone may violate them."""
    kept: list[str] = []
    names: list[str] = []
    for one in statements_of(script):
        if match := FOREIGN_KEY.fullmatch(one.bare):
            names.append(show_name(f"{match['name']} of {match['table']}"))
        else:
            kept.append(one.text)
    return "".join(kept), names


def find_views(script: str) -> list[str]:
    """The quoted names of the materialized views that were populated, in the order of their dependencies."""
    return [match["view"] for one in statements_of(script) if (match := REFRESH_VIEW.fullmatch(one.bare))]


def refresh_views(node: Node, script: str, search_path: str) -> list[str]:
    """Refresh the script's materialized views; return one line for each that could not be, with the reason.

    `search_path` matters before PostgreSQL 17; later versions set their own while they refresh.
    """
    problems: list[str] = []
    if not script:
        return problems
    with connect(node, client_encoding=RAW) as connection:
        query = "SELECT set_config('search_path', convert_from(%s, 'UTF8'), false)"
        connection.execute(query, (search_path.encode(),))
        for view in find_views(script):
            try:
                connection.execute(raw_bytes(f"REFRESH MATERIALIZED VIEW {view}"))
            except psycopg.Error as error:
                if connection.broken:
                    raise unreachable_error(node, error) from error
                reason = error.diag.message_primary or " ".join(str(error).split())
                problems.append(f"node {node.id}: materialized view {show_name(view)} is not populated: {reason}")
    return problems


def show_name(name: str) -> str:
    """Raw text in a printable form."""
    return raw_bytes(name).decode(errors="backslashreplace")


def set_sequences(connection: psycopg.Connection[Any], sequences: Iterable[Sequence]) -> None:
    """Set every sequence to its stored value, SEQUENCES_AT_ONCE at a time.

    Each holds a lock until the commit, and each commit flushes the WAL.
    """
    values = [(one.schema, one.name, one.last_value, one.is_called) for one in sequences]
    for start in range(0, len(values), SEQUENCES_AT_ONCE):
        connection.execute(SET_QUERY, tuple(map(list, zip(*values[start : start + SEQUENCES_AT_ONCE], strict=True))))
