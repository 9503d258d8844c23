"""Run SQL scripts: the DDL that earlier versions of Cutline stored, and what pg_restore writes if it can't connect.

A scanner finds where statements end (restore/ddl/statements.py); foreign keys and views of a stored script are found
among whole statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, connect, raising_unreachable, unreachable_error
from fleet.nodes.encodings import RAW, raw_bytes
from fleet.nodes.watch import Watch
from restore.ddl.ddl import ChangedRoles, ending, refused_error, show_name
from restore.ddl.marks import drop_statement, mark, name_marks, read_marks
from restore.ddl.statements import batches, settings_of, statements_of
from restore.parts.role_changes import RoleChanges
from restore.parts.scope import TableMove
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH
from snapshots.ddl.search_path import read_stored_path
from storage.errors import RefusedError

# Whole statements, as the scanner of restore/ddl/statements.py finds them. pg_dump quotes every identifier, and writes
# a foreign key without ONLY for a partitioned table.
IDENTIFIER = r'"(?:[^"]|"")+"'
RELATION = rf"{IDENTIFIER}\.{IDENTIFIER}"
FOREIGN_KEY = re.compile(
    rf"ALTER TABLE (?:ONLY )?(?P<table>{RELATION})\s+ADD CONSTRAINT (?P<name>{IDENTIFIER}) FOREIGN KEY .*", re.DOTALL
)
COMMENT = re.compile(rf"COMMENT ON CONSTRAINT (?P<name>{IDENTIFIER}) ON (?P<table>{RELATION}) IS .*", re.DOTALL)
REFRESH_VIEW = re.compile(rf"REFRESH MATERIALIZED VIEW (?P<view>{RELATION});")
# pg_dump 18 writes this for servers of every version.
TRANSACTION_TIMEOUT = "SET transaction_timeout = 0;"
BUILD_SETTINGS = {"maintenance_work_mem": "256MB", "synchronous_commit": "off"}


class StoredScriptError(RefusedError):
    """Roles and names in stored scripts can't be changed."""


@dataclass(frozen=True, slots=True)
class ScriptDdl:
    """A shard's DDL as earlier versions of Cutline stored it: a script (raw text) for each section."""

    scripts: Mapping[str, str]

    @property
    def search_path(self) -> str | None:
        """The search_path that was set for the database; None if none was."""
        return read_stored_path(self.scripts[PRE_DATA])

    @property
    def entries(self) -> tuple[()]:
        """None: these are no archive."""
        return ()

    @property
    def views(self) -> list[str]:
        """The materialized views that were populated, in the order of their dependencies."""
        return find_views(self.scripts[REFRESH])

    def without_dependents(self) -> tuple[ScriptDdl, list[str]]:
        """The DDL for a restore of some tables, and what it leaves out."""
        post_data, keys = remove_foreign_keys(self.scripts[POST_DATA])
        ddl, views = ScriptDdl({**self.scripts, POST_DATA: post_data}).without_view_rows()
        return ddl, [*(f"foreign key {name}" for name in keys), *views]

    def without_view_rows(self) -> tuple[ScriptDdl, list[str]]:
        """The DDL without the rows of materialized views, and what is left out."""
        views = [f"rows of materialized view {show_name(name)}" for name in self.views]
        return ScriptDdl({**self.scripts, REFRESH: ""}), views

    def with_roles(self, _changes: RoleChanges) -> tuple[ScriptDdl, ChangedRoles]:
        """Refuse: a script does not tell what is an owner."""
        raise StoredScriptError(
            "an early version of Cutline stored the DDL of this snapshot as scripts, whose roles can't be changed",
            hint="restore without --no-owner and --role-map, or take a new full snapshot: snapshot create NAME",
        )

    def check_moves(self, _moves: Iterable[TableMove]) -> None:
        """Refuse: a script does not tell which names are taken."""
        raise StoredScriptError(
            "an early version of Cutline stored the DDL of this snapshot as scripts, so its tables keep their names",
            hint="restore the table under its own name: --group S.T",
        )

    def without_foreign_keys(self, keeps: Callable[[str], bool]) -> tuple[ScriptDdl, list[str]]:
        """The DDL without the foreign keys whose statements `keeps` denies, and their names."""
        post_data, keys = remove_foreign_keys(self.scripts[POST_DATA], keeps)
        return ScriptDdl({**self.scripts, POST_DATA: post_data}), [f"foreign key {name}" for name in keys]

    def without_system_grants(self) -> tuple[ScriptDdl, list[str]]:
        """The DDL as it is: a script does not tell what its privileges are of."""
        return self, []

    def write_scripts(self, _node: Node) -> dict[str, str]:
        """The scripts, by section."""
        return dict(self.scripts)

    def run_before_rows(self, node: Node, watch: Watch) -> None:
        """Run the script of what precedes the rows."""
        run_script(node, PRE_DATA, self.scripts[PRE_DATA], watch)

    def run_after_rows(self, node: Node, ledger: str, watch: Watch) -> None:
        """Run the batches of what follows the rows that the ledger has no mark of."""
        run_script(node, POST_DATA, self.scripts[POST_DATA], watch, ledger)

    def run_last(self, node: Node, ledger: str, watch: Watch, first: str = "") -> None:
        """Run the statements `first`, drop the ledger and create event triggers, in one transaction."""
        run_whole(node, EVENT_TRIGGERS, first + drop_statement(ledger) + self.scripts[EVENT_TRIGGERS], watch)


def run_script(node: Node, section: str, script: str, watch: Watch, ledger: str | None = None) -> None:
    """Run one section's SQL (raw text), one batch of statements per transaction.

    Batches are marked in the `ledger`, and run only if it has no mark of them. Raises SchemaLoadError with the server's
    message and the statement, NodeUnreachableError.
    """
    if not script:
        return
    with _session(node, watch) as connection:
        texts = list(batches(for_version(script, connection.info.server_version)))
        names = name_marks(section, map(raw_bytes, texts))
        done = read_marks(connection, ledger, section, names) if ledger else set()
        for name, text in zip(names, texts, strict=True):
            if name in done:
                _execute(node, connection, section, settings_of(text))
            else:
                _execute(node, connection, section, f"{text}\n{mark(ledger, name)}" if ledger else text)


def run_whole(node: Node, section: str, script: str, watch: Watch) -> None:
    """Run SQL (raw text) in one transaction; raise as run_script does."""
    with _session(node, watch) as connection:
        _execute(node, connection, section, for_version(script, connection.info.server_version))


@contextmanager
def _session(node: Node, watch: Watch) -> Iterator[psycopg.Connection[Any]]:
    # The server converts a whole message before it runs the SET client_encoding in it: so the session is raw already.
    with raising_unreachable(node), connect(node, client_encoding=RAW) as connection, ending(watch, connection):
        for name, value in BUILD_SETTINGS.items():
            connection.execute(f"SET {name} = '{value}'")
        yield connection


def _execute(node: Node, connection: psycopg.Connection[Any], section: str, statements: str) -> None:
    result = connection.pgconn.exec_(raw_bytes(statements))
    if result.error_message:
        message = result.error_message.decode(errors="replace")
        if connection.broken:
            raise unreachable_error(node, psycopg.OperationalError(message))
        raise refused_error(node, section, message, show_name(_find_refused(connection, statements)))


def for_version(script: str, version: int) -> str:
    """The script without a setting that servers of this version do not have."""
    if version >= TRANSACTION_TIMEOUT_VERSION:
        return script
    return "".join(one.text for one in statements_of(script) if one.bare != TRANSACTION_TIMEOUT)


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


def remove_foreign_keys(script: str, keeps: Callable[[str], bool] = lambda _: False) -> tuple[str, list[str]]:
    """The post-data script without foreign keys that `keeps` denies and the comments on them, and their names.

    Some of the tables alone may violate them.
    """
    kept: list[str] = []
    removed: list[tuple[str, str]] = []
    for one in statements_of(script):
        if (match := FOREIGN_KEY.fullmatch(one.bare)) and not keeps(one.bare):
            removed.append((match["name"], match["table"]))
        elif not ((match := COMMENT.fullmatch(one.bare)) and (match["name"], match["table"]) in removed):
            kept.append(one.text)
    return "".join(kept), [show_name(f"{name} of {table}") for name, table in removed]


def find_views(script: str) -> list[str]:
    """The quoted names of the materialized views that were populated, in the order of their dependencies."""
    return [match["view"] for one in statements_of(script) if (match := REFRESH_VIEW.fullmatch(one.bare))]
