"""Build one database of a restore: the tables before the rows, and the rest of the DDL after them.

The snapshot's indexes, constraints, triggers, rules and policies are created after the rows are loaded and counted, so
none of them affect the load. Event triggers come last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import psycopg
from msgspec import Struct, field
from psycopg.errors import Diagnostic

from cutline.fleet.config import GroupRules, Node
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.encodings import RAW, raw_text
from cutline.nodes.groups import Group, qualify, read_tables
from cutline.nodes.server_errors import shorten_message
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import (
    Ddl,
    DdlEntry,
    Refusal,
    ending,
    find_settable,
    refresh_views,
    set_sequences,
    show_name,
)
from cutline.restore.ddl.entries import move_statements
from cutline.restore.ddl.running import DdlRun, RecordFinished
from cutline.restore.ddl.session_settings import set_settings, settings_for_rows
from cutline.restore.ddl.statements import NeededPath, run_with_paths
from cutline.restore.plan.roles import name_bytes
from cutline.restore.rows.jobs import find_roots
from cutline.restore.rows.load import LoadTarget, check_counts, create_ledger, find_load_paths, has_ledger
from cutline.restore.scope.scope import TableMove
from cutline.snapshots.ddl.contradictions import DdlContradictedError, compare_lists, compare_tables
from cutline.snapshots.ddl.described_ddl import DescribedColumn, DescribedSequence, DescribedTable, Description
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Sequence

# ANALYZE of a partitioned table's root includes its partitions.
ANALYZED_QUERY = """
SELECT textsend(format('%%I.%%I', n.nspname, c.relname)) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind IN ('r', 'm', 'p') AND NOT c.relispartition
   AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname !~ '^pg_toast'
   AND (%s::text[] IS NULL
        OR c.oid IN (SELECT coalesce(pg_partition_root(t::regclass), t::regclass) FROM unnest(%s::text[]) AS t))
 ORDER BY c.oid
"""


# Exclude extension sequences, which keep the state in which the target's extension creates them.
SEQUENCES_QUERY = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'S' AND c.relpersistence = 'p' AND n.nspname !~ '^pg_'
   AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                      AND e.objid = c.oid AND e.deptype = 'e')
"""


def check_against_ddl(chain: Chain, shard: str, connection: psycopg.Connection[Any], groups: Iterable[Group]) -> None:
    """Raise DdlContradictedError unless the database has all of `groups`, and no others that the commit does not list.

    Otherwise such a table would silently be restored empty, and such a sequence would silently start over. The plan has
    compared the commit with the text of the DDL; this compares it with the relations that the server has created,
    except for the order of columns: a server puts inherited columns first, whenever they were added on the source.
    """
    groups = tuple(groups)
    positions = {(group.name, column.name): column.position for group in groups for column in group.columns}
    # Read the tables as they are read on the source, so that names in any encoding have the same form.
    present = [table.group for table in read_tables(connection, GroupRules())]
    tables = {
        (group.schema, group.table): DescribedTable(
            tuple(
                DescribedColumn(column.name, column.type)
                for column in sorted(group.columns, key=lambda one: positions.get((group.name, one.name), 0))
            ),
            is_ordered=False,
        )
        for group in present
    }
    # The definitions of sequences are not compared again.
    unknown = DescribedSequence(1, cycles=False, smallest=None, largest=None)
    sequences = {(schema, name): unknown for schema, name in connection.execute(SEQUENCES_QUERY)}
    created = Description(tables, sequences=sequences)
    found = compare_tables(created, groups, only_ascii=False)
    found += compare_lists(chain, shard, created, only_ascii=False)
    if found:
        raise DdlContradictedError(shard, found)


class FinishedDatabase(Struct):
    """The results of finishing a database after its rows are loaded.

    `problems` are lines about tables that are not analyzed and columns that were computed again; `warnings` are about
    columns that may have wrong values, views that are not populated and sequences that are not set. `refusals` are the
    server's. `helped` lists each entry that could be created only with a temporary search_path for its functions,
    paired with those functions. If `is_finished`, the database needs only its real name. If `is_earlier`, an earlier
    process finished it: its record names the statements that were refused.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    helped: list[tuple[DdlEntry, tuple[NeededPath, ...]]] = field(default_factory=list)
    is_finished: bool = True
    is_earlier: bool = False


def create_tables(
    database: Node, ddl: Ddl, chain: Chain, shard: str, groups: Iterable[Group], watch: Watch
) -> tuple[LoadTarget, DdlRun]:
    """Create everything that the rows need in the empty database, and the ledger of the load.

    Omits groups whose tables are refused. Raises DdlContradictedError if the DDL does not belong to the chain's
    `shard`.
    """
    run = DdlRun(database, ddl, watch, is_strict=ddl.is_adapted)
    run.before_rows()
    with raising_unreachable(database), connect(database) as connection:
        chosen = _without_refused(connection, groups, run)
        check_against_ddl(chain, shard, connection, chosen.values())
        ledger = create_ledger(connection)
        run.mark_refused(connection, ledger)
        return _load_target(database, connection, ddl, chosen, ledger), run


def find_load_target(
    database: Node, ddl: Ddl, groups: Iterable[Group], ledger: str, watch: Watch
) -> tuple[LoadTarget, DdlRun]:
    """Return the load target for a database whose tables and ledger were created by an earlier process."""
    run = DdlRun(database, ddl, watch, is_strict=ddl.is_adapted)
    with raising_unreachable(database), connect(database) as connection:
        if has_ledger(connection, ledger):
            run.note_refused(connection, ledger)
        return _load_target(database, connection, ddl, _without_refused(connection, groups, run), ledger), run


def _load_target(
    database: Node, connection: psycopg.Connection[Any], ddl: Ddl, groups: Mapping[int, Group], ledger: str
) -> LoadTarget:
    paths = find_load_paths(connection, groups.values(), ddl.search_path)
    roots, settings = find_roots(connection, groups.values()), settings_for_rows(ddl.session_settings)
    return LoadTarget(database, groups, ledger, roots, *paths, settings)


def _without_refused(connection: psycopg.Connection[Any], groups: Iterable[Group], run: DdlRun) -> dict[int, Group]:
    groups, tables = list(groups), [one.entry for one in run.refusals.values() if one.entry.kind == "TABLE"]
    refused = _find_named(connection, tables, [(group.schema, group.table) for group in groups])
    return {group.number: group for group in groups if (group.schema, group.table) not in refused}


def _find_named(
    connection: psycopg.Connection[Any], entries: Iterable[DdlEntry], names: Collection[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return those of the `names` (schema and name) that entries have, whose names are in the database's encoding."""
    raw = {(entry.schema, entry.name) for entry in entries}
    if not raw or not names:
        return set()
    encoding = connection.info.parameter_status("server_encoding") or ""
    schemas, own = (map(raw_text, name_bytes(connection, parts, encoding)) for parts in zip(*names, strict=True))
    return {name for name, *stored in zip(names, schemas, own, strict=True) if tuple(stored) in raw}


def count_rows(target: LoadTarget, watch: Watch) -> int:
    """Compare the row counts with the ledger, and return the number of rows; raise LoadError if they differ."""
    with raising_unreachable(target.node), connect(target.node) as connection, ending(watch, connection):
        return check_counts(connection, target)


def finish_database(
    target: LoadTarget,
    run: DdlRun,
    sequences: Iterable[Sequence],
    moves: Iterable[TableMove],
    *,
    analyzes: bool,
    allows_refused: bool,
    record: RecordFinished,
) -> FinishedDatabase:
    """Restore the objects that follow the rows: indexes, keys, triggers, sequences, materialized views, event triggers.

    Skips what an earlier process completed. The last transaction renames tables and drops the ledger. With `analyzes`,
    collects planner statistics. If a statement is refused, the others are still run; the database then counts as
    finished only with `allows_refused`. `record` is called in the last transaction.
    """
    done, ddl, watch = FinishedDatabase(), run.ddl, run.watch
    with raising_unreachable(target.node), connect(target.node) as connection:
        if not has_ledger(connection, target.ledger):
            done.is_earlier = True
            return done
        # Set sequences before the grants: an owner may have revoked its own privileges on a sequence.
        sequences, entries = list(sequences), [refusal.entry for refusal in run.refusals.values()]
        refused = _find_named(connection, entries, [(sequence.schema, sequence.name) for sequence in sequences])
        wanted = [sequence for sequence in sequences if (sequence.schema, sequence.name) not in refused]
        some_lack = bool(run.refusals) or ddl.has_extensions
        settable, left = find_settable(connection, wanted, some_lack=some_lack)
        set_sequences(connection, settable)
        unknown = set_settings(connection, ddl.session_settings)
    run.after_rows(target.ledger)
    refreshed = refresh_views(target.node, ddl, watch)
    unset = [
        f"node {target.node.id}: sequence {name} was not set to its stored value: {why}" for name, why in left.items()
    ]
    without = [
        f"node {target.node.id}: what depends on setting {name} was computed without the source's value"
        f" {ddl.session_settings[name]!r}: {why}"
        for name, why in unknown.items()
    ]
    done.warnings = [*unset, *without, *refreshed.problems]
    if analyzes:
        # Analyze before event triggers exist: a login trigger would run in the session.
        with (
            raising_unreachable(target.node),
            connect(target.node, client_encoding=RAW) as connection,
            ending(watch, connection),
        ):

            def run_one(statement: bytes) -> object:
                return run_with_paths(connection, statement, ddl.search_path)

            done.problems = analyze(target.node, connection, run_one)
    if run.all_refused and not allows_refused:
        done.is_finished = False
    else:
        moving = move_statements(target.node, moves)
        done.is_finished = run.last(target.ledger, moving, allows_refused=allows_refused, record=record)
    done.refusals = run.all_refused
    done.helped = [*run.helped, *refreshed.helped]
    return done


def analyze(
    node: Node,
    connection: psycopg.Connection[Any],
    run_one: Callable[[bytes], object],
    groups: Iterable[Group] | None = None,
) -> list[str]:
    """Collect planner statistics in the session's database, or only for the tables of `groups`.

    `run_one` runs a statement in the session, in a separate transaction. For each table or materialized view that could
    not be analyzed, returns a line with the reason.
    """
    problems: list[str] = []

    def note(said: Diagnostic) -> None:
        if said.severity_nonlocalized == "WARNING":
            problems.append(f"node {node.id}: {said.message_primary}")

    given = None if groups is None else [qualify(group) for group in groups]
    connection.add_notice_handler(note)
    for (table,) in connection.execute(ANALYZED_QUERY, (given, given)).fetchall():
        try:
            run_one(b"ANALYZE " + bytes(table))
        except psycopg.Error as error:
            if connection.broken:
                raise
            # The cause may be, for example, a function in an index expression.
            problems.append(f"node {node.id}: {show_name(raw_text(bytes(table)))}: {shorten_message(error)}")
    connection.remove_notice_handler(note)
    return problems
