"""Running a shard's stored DDL, filling its materialized views, and setting its sequences."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, connect, unreachable_error
from fleet.nodes.encodings import RAW, raw_bytes
from restore.statements import batches, split_statements
from snapshots.records.commit import Sequence
from storage.errors import RefusedError

# pg_dump writes a foreign key as one statement of two lines, on partitioned tables without ONLY; every identifier
# is quoted.
FOREIGN_KEY = re.compile(
    r'^ALTER TABLE (?:ONLY )?(?P<table>\S.*)\n    ADD CONSTRAINT (?P<name>".*?") FOREIGN KEY .*?;$', re.MULTILINE
)
IDENTIFIER = r'"(?:[^"]|"")+"'
REFRESH_VIEW = re.compile(rf"^REFRESH MATERIALIZED VIEW (?P<view>{IDENTIFIER}\.{IDENTIFIER});$", re.MULTILINE)
# pg_dump of 18 writes it for every server.
TRANSACTION_TIMEOUT = "\nSET transaction_timeout = 0;\n"
BUILD_SETTINGS = {"maintenance_work_mem": "256MB", "synchronous_commit": "off"}
SET_QUERY = """
SELECT setval(format('%%I.%%I', s.space, s.name)::regclass, s.value, s.is_called)
  FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::boolean[]) AS s (space, name, value, is_called)
"""
SEQUENCES_AT_ONCE = 500
STATEMENT_SHOWN_MAX = 200


class SchemaLoadError(RefusedError):
    """A target node did not take the snapshot's DDL."""


def run_section(node: Node, section: str, script: str) -> None:
    """Run one section's SQL, raw text, not as a whole; raise SchemaLoadError with the statement's own error."""
    if not script:
        return
    # The server converts the whole of it before it runs the statement that sets another client encoding.
    with connect(node, client_encoding=RAW) as connection:
        for name, value in BUILD_SETTINGS.items():
            connection.execute(f"SET {name} = '{value}'")
        if connection.info.server_version < TRANSACTION_TIMEOUT_VERSION:
            script = script.replace(TRANSACTION_TIMEOUT, "\n", 1)
        for statements in batches(script):
            result = connection.pgconn.exec_(raw_bytes(statements))
            if result.error_message:
                message = result.error_message.decode(errors="replace")
                if connection.broken:
                    raise unreachable_error(node, psycopg.OperationalError(message))
                raise _refused_error(node, section, message, _found(connection, statements))


def _found(connection: psycopg.Connection[Any], statements: str) -> str:
    """Which of the statements the server refuses, "" if it can't be told.

    They were one transaction, and nothing of it is left: they are run once more, one by one.
    """
    connection.pgconn.exec_(b"BEGIN")
    refused = (one for one in split_statements(statements) if connection.pgconn.exec_(raw_bytes(one)).error_message)
    found = next(refused, "")
    connection.pgconn.exec_(b"ROLLBACK")
    return found


def _refused_error(node: Node, section: str, message: str, statement: str) -> SchemaLoadError:
    return SchemaLoadError(
        f"node {node.id}: the {section} DDL was refused: {' '.join(message.split())}"
        + (f": {shorten_statement(show_name(statement))}" if statement else ""),
        hint="make on the target what it names (an extension, a tablespace, a role), or restore to a server that has it"
        " (lz4), then repeat",
        details={"node": node.id, "section": section, "statement": show_name(statement)},
    )


def shorten_statement(statement: str) -> str:
    """The beginning of a statement, on one line."""
    text = " ".join(statement.split())
    return text if len(text) <= STATEMENT_SHOWN_MAX else f"{text[:STATEMENT_SHOWN_MAX]}…"


def without_foreign_keys(script: str) -> tuple[str, list[str]]:
    """The post-data script without its foreign keys, and their names: a part of the tables may not satisfy them."""
    names = [show_name(f"{match['name']} of {match['table']}") for match in FOREIGN_KEY.finditer(script)]
    return FOREIGN_KEY.sub("", script), names


def views_of(script: str) -> list[str]:
    """The materialized views that were populated, quoted, in the order in which they depend on each other."""
    return [match["view"] for match in REFRESH_VIEW.finditer(script)]


def refresh_views(node: Node, script: str, search_path: str) -> list[str]:
    """Fill the materialized views that the script refreshes; return what kept some of them from it, a line each.

    From 17 on PostgreSQL itself refreshes them with a search_path of its own, and needs none of ours.
    """
    problems: list[str] = []
    if not script:
        return problems
    with connect(node, client_encoding=RAW) as connection:
        query = "SELECT set_config('search_path', convert_from(%s, 'UTF8'), false)"
        connection.execute(query, (search_path.encode(),))
        for view in views_of(script):
            try:
                connection.execute(raw_bytes(f"REFRESH MATERIALIZED VIEW {view}"))
            except psycopg.Error as error:
                if connection.broken:
                    raise unreachable_error(node, error) from error
                reason = error.diag.message_primary or " ".join(str(error).split())
                problems.append(f"node {node.id}: materialized view {show_name(view)} is not populated: {reason}")
    return problems


def show_name(name: str) -> str:
    """Raw text as a person may read it."""
    return raw_bytes(name).decode(errors="backslashreplace")


def set_sequences(connection: psycopg.Connection[Any], sequences: Iterable[Sequence]) -> None:
    """Put every sequence where it stood, many at a time: each costs a lock, and a commit its flush."""
    found = [(one.schema, one.name, one.last_value, one.is_called) for one in sequences]
    for start in range(0, len(found), SEQUENCES_AT_ONCE):
        connection.execute(SET_QUERY, tuple(map(list, zip(*found[start : start + SEQUENCES_AT_ONCE], strict=True))))
