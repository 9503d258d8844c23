"""Build one database of a restore: the tables before the rows, and the rest of the DDL after them.

No index, constraint, trigger, rule or policy of the snapshot acts on the rows while they are loaded and counted: all
of these are created afterwards, event triggers last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.errors import Diagnostic

from fleet.config import Node
from fleet.nodes.connections import connect, raising_unreachable
from fleet.nodes.encodings import RAW, raw_text
from fleet.nodes.server_messages import shorten_message
from fleet.nodes.watch import Watch
from fleet.tables.groups import Group, qualify
from restore.ddl.archive import read_archive
from restore.ddl.ddl import Ddl, StoredDdl, ending, refresh_views, set_sequences, show_name
from restore.ddl.moved_tables import move_statements
from restore.ddl.scripts import ScriptDdl
from restore.ddl.stored import read_stored_ddl
from restore.parts.scope import TableMove
from restore.rows.ledger import check_counts, create_ledger, has_ledger
from restore.rows.load_target import LoadTarget
from restore.rows.partition_roots import find_roots
from snapshots.ddl.search_path import search_path_of
from snapshots.records.chain import Chain
from snapshots.records.commit import Sequence
from snapshots.records.stored_object import DDL_ARCHIVE
from storage.store import ObjectStore

# The roots of partitioned tables: their partitions are analyzed with them.
ANALYZED_QUERY = """
SELECT textsend(format('%%I.%%I', n.nspname, c.relname)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'm', 'p') AND NOT c.relispartition
   AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_toast'
   AND (%s::text[] IS NULL
        OR c.oid IN (SELECT coalesce(pg_partition_root(t::regclass), t::regclass) FROM unnest(%s::text[]) AS t))
 ORDER BY c.oid
"""


def read_shard_ddl(store: ObjectStore, chain: Chain, shard: str, path: Path) -> StoredDdl:
    """Read a shard's DDL; an archive is written to the file `path` in a private folder, where pg_restore reads it."""
    found = read_stored_ddl(store, chain, shard)
    if DDL_ARCHIVE in found:
        return read_archive(found[DDL_ARCHIVE], path)
    return ScriptDdl({section: raw_text(script) for section, script in found.items()})


def create_tables(
    database: Node, ddl: Ddl, groups: Iterable[Group], check: Callable[[Any, Iterable[Group]], None], watch: Watch
) -> LoadTarget:
    """Create in the empty database everything that the rows need, and the ledger of the load.

    Raises what `check` raises, which is given a session in the database and the groups (restore/against_ddl.py).
    """
    ddl.run_before_rows(database, watch)
    with raising_unreachable(database), connect(database) as connection:
        chosen = {group.number: group for group in groups}
        check(connection, chosen.values())
        roots = find_roots(connection, chosen.values())
        ledger = create_ledger(connection)
        return LoadTarget(database, chosen, ledger, roots, search_path_of(ddl.search_path))


def find_load_target(database: Node, ddl: Ddl, groups: Iterable[Group], ledger: str) -> LoadTarget:
    """The database whose tables and ledger an earlier process created."""
    with raising_unreachable(database), connect(database) as connection:
        chosen = {group.number: group for group in groups}
        return LoadTarget(
            database, chosen, ledger, find_roots(connection, chosen.values()), search_path_of(ddl.search_path)
        )


def count_rows(target: LoadTarget, watch: Watch) -> int:
    """Compare the row counts with the ledger, and return the number of rows; raise LoadError."""
    with raising_unreachable(target.node), connect(target.node) as connection, ending(watch, connection):
        return check_counts(connection, target)


def finish_database(
    target: LoadTarget,
    ddl: Ddl,
    sequences: Iterable[Sequence],
    moves: Iterable[TableMove],
    watch: Watch,
    *,
    analyzes: bool,
) -> list[str]:
    """Restore what comes after the rows: indexes, keys and triggers, sequences, materialized views, event triggers.

    What an earlier process has done is left out; dropping the ledger ends it, in the transaction that gives tables
    their other names. If it `analyzes`, the planner's statistics are collected. Returns one line for each materialized
    view that could not be populated, and for each table that could not be analyzed, with the reason.
    """
    with raising_unreachable(target.node), connect(target.node) as connection:
        if not has_ledger(connection, target.ledger):
            return []
        # Before the grants: an owner may have revoked privileges on a sequence from itself.
        set_sequences(connection, sequences)
    ddl.run_after_rows(target.node, target.ledger, watch)
    problems = refresh_views(target.node, ddl.views, target.search_path, watch)
    if analyzes:
        # Before the event triggers exist: one on logins would run in the session.
        with connect(target.node, client_encoding=RAW) as connection, ending(watch, connection):
            problems += analyze(target.node, connection)
    ddl.run_last(target.node, target.ledger, watch, move_statements(target.node, moves))
    return problems


def analyze(node: Node, connection: psycopg.Connection[Any], groups: Iterable[Group] | None = None) -> list[str]:
    """Collect the planner's statistics of the session's database, or only of the tables of `groups`.

    Returns a line for each table or materialized view that could not be analyzed, with the reason.
    """
    problems: list[str] = []

    def note(said: Diagnostic) -> None:
        if said.severity_nonlocalized == "WARNING":
            problems.append(f"node {node.id}: {said.message_primary}")

    given = None if groups is None else [qualify(group) for group in groups]
    connection.add_notice_handler(note)
    for (table,) in connection.execute(ANALYZED_QUERY, (given, given)).fetchall():
        try:
            with connection.transaction():
                connection.execute(b"ANALYZE " + bytes(table))
        except psycopg.Error as error:
            if connection.broken:
                raise
            # Such as one of a function in an index expression.
            problems.append(f"node {node.id}: {show_name(raw_text(bytes(table)))}: {shorten_message(error)}")
    connection.remove_notice_handler(note)
    return problems
