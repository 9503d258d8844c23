"""What a restore needs of a shard's DDL, however it is stored; views are refreshed and sequences set here.

Names of views are raw text, quoted (fleet.nodes.encodings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import psycopg

from fleet.config import Node
from fleet.nodes.connections import connect, raising_unreachable, unreachable_error
from fleet.nodes.encodings import RAW, raw_bytes
from fleet.nodes.server_messages import shorten_message
from fleet.nodes.shut_down import shut_down
from fleet.nodes.watch import Watch
from restore.parts.role_changes import RoleChanges
from restore.parts.scope import TableMove
from snapshots.ddl.archive import ArchiveEntry
from snapshots.records.commit import Sequence as StoredSequence
from storage.errors import RefusedError

SET_QUERY = """
SELECT setval(format('%%I.%%I', s.space, s.name)::regclass, s.value, s.is_called)
  FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::boolean[]) AS s (space, name, value, is_called)
"""
SEQUENCES_AT_ONCE = 500
STATEMENT_SHOWN_MAX = 200


class SchemaLoadError(RefusedError):
    """A target node refused the snapshot's DDL."""


class Ddl(Protocol):
    """A shard's DDL as it is run: sections of statements, in the order of DDL_SCRIPTS."""

    @property
    def search_path(self) -> str | None:
        """The search_path that was set for the database; None if none was."""

    @property
    def views(self) -> Sequence[str]:
        """The materialized views that were populated, in the order of their dependencies."""

    def run_before_rows(self, node: Node, watch: Watch) -> None:
        """Run what precedes the rows; end if `watch` finds a node silent or the command is interrupted.

        This and the next two raise SchemaLoadError with the server's message and the statement, NodeUnreachableError.
        """

    def run_after_rows(self, node: Node, ledger: str, watch: Watch) -> None:
        """Run what follows the rows, but event triggers and no refresh; what an earlier process has run is left out."""

    def run_last(self, node: Node, ledger: str, watch: Watch, first: str = "") -> None:
        """Run the statements `first` (raw text), drop the ledger and create event triggers, in one transaction.

        Event triggers would act on the others.
        """


class ChangedRoles(NamedTuple):
    """What is left out of DDL whose roles were changed, and why, and the roles that it had named (raw text)."""

    left_out: Mapping[str, str]
    met: frozenset[str]


class StoredDdl(Ddl, Protocol):
    """A shard's DDL as the snapshot has it."""

    @property
    def entries(self) -> Sequence[ArchiveEntry]:
        """The entries of its archive that are restored; none if it is stored as scripts."""

    def without_dependents(self) -> tuple[StoredDdl, list[str]]:
        """The DDL for a restore of some tables: without foreign keys, which they may violate, and without views.

        Also returns what is left out. A view that is filled from some of the tables would be wrong, and nothing would
        show it.
        """

    def without_view_rows(self) -> tuple[StoredDdl, list[str]]:
        """The DDL without the rows of materialized views, and what is left out."""

    def with_roles(self, changes: RoleChanges) -> tuple[StoredDdl, ChangedRoles]:
        """The DDL with other roles; raise RefusedError naming what can't be changed with certainty."""

    def check_moves(self, moves: Iterable[TableMove]) -> None:
        """Raise RefusedError if something has a name that a table is to have (raw text)."""

    def without_foreign_keys(self, keeps: Callable[[str], bool]) -> tuple[StoredDdl, list[str]]:
        """The DDL without the foreign keys whose statements `keeps` denies, and what depends on them; and their names.

        A statement is `ALTER TABLE … ADD CONSTRAINT … FOREIGN KEY …`, with every identifier quoted.
        """

    def without_system_grants(self) -> tuple[StoredDdl, list[str]]:
        """The DDL without privileges of PostgreSQL's own objects, which only a superuser grants; and what is left."""

    def write_scripts(self, node: Node) -> dict[str, str]:
        """The statements of all sections as scripts (raw text), by section, for the server of `node`."""


def refused_error(node: Node, section: str, message: str, statement: str, named: str = "") -> SchemaLoadError:
    """The error for a statement that the server refused; the object is `named` if it is known.

    The texts may have several lines.
    """
    return SchemaLoadError(
        f"node {node.id}: the {section} DDL was refused{f' at {named}' if named else ''}: {' '.join(message.split())}"
        + (f": {shorten_statement(statement)}" if statement else ""),
        hint="create what the statement needs on the target (an extension, a tablespace, a role), or restore to a"
        " server that supports it (lz4), then repeat the command",
        details={"node": node.id, "section": section, "object": named, "statement": statement},
    )


def shorten_statement(statement: str) -> str:
    """The statement on one line, cut off after STATEMENT_SHOWN_MAX characters."""
    text = " ".join(statement.split())
    return text if len(text) <= STATEMENT_SHOWN_MAX else f"{text[:STATEMENT_SHOWN_MAX]}…"


def ending(watch: Watch, connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
    """While the block runs, shut the session down if the command is interrupted."""
    return watch.on_silence(partial(shut_down, connection))


def refresh_views(node: Node, views: Iterable[str], search_path: str, watch: Watch) -> list[str]:
    """Refresh the materialized views; return one line for each that could not be, with the reason.

    `search_path` matters before PostgreSQL 17; later versions set their own while they refresh.
    """
    problems: list[str] = []
    due = list(views)
    if not due:
        return problems
    with raising_unreachable(node), connect(node, client_encoding=RAW) as connection, ending(watch, connection):
        query = "SELECT set_config('search_path', convert_from(%s, 'UTF8'), false)"
        connection.execute(query, (search_path.encode(),))
        for view in due:
            try:
                connection.execute(raw_bytes(f"REFRESH MATERIALIZED VIEW {view}"))
            except psycopg.Error as error:
                if connection.broken:
                    raise unreachable_error(node, error) from error
                what = f"materialized view {show_name(view)} is not populated"
                problems.append(f"node {node.id}: {what}: {shorten_message(error)}")
    return problems


def show_name(name: str) -> str:
    """Raw text in a printable form."""
    return raw_bytes(name).decode(errors="backslashreplace")


def set_sequences(connection: psycopg.Connection[Any], sequences: Iterable[StoredSequence]) -> None:
    """Set every sequence to its stored value, SEQUENCES_AT_ONCE at a time.

    Each holds a lock until the commit, and each commit flushes the WAL. Raises SchemaLoadError if one can't be.
    """
    values = [(one.schema, one.name, one.last_value, one.is_called) for one in sequences]
    for start in range(0, len(values), SEQUENCES_AT_ONCE):
        some = values[start : start + SEQUENCES_AT_ONCE]
        try:
            connection.execute(SET_QUERY, tuple(map(list, zip(*some, strict=True))))
        except psycopg.Error as error:
            if connection.broken:
                raise
            raise SchemaLoadError(
                f"a sequence can't have the value of the commit: {shorten_message(error)}",
                hint="somebody changed the store: put its objects back from a copy; see: snapshot check",
            ) from error
