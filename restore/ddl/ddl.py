"""A shard's DDL as a restore runs it on one target: its archive's entries with their statements, in sections.

Statements and names are raw text (nodes.encodings). A statement that the server refuses becomes a `Refusal`, which does
not end the restore: the other entries are still run, and the restore decides at the end what to do about the refusals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.fleet.config import Node
from cutline.fleet.messages import CHECK_NAMED, IN_STEPS
from cutline.fleet.table_names import quote_identifier, quote_if_needed, table_name
from cutline.nodes.connections import connect, disrupted_error, node_of, raising_unreachable, unreachable_error
from cutline.nodes.encodings import RAW, raw_bytes
from cutline.nodes.open_sessions import shut_down
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.watch import Watch
from cutline.restore.ddl.database_ddl import DatabaseDdl
from cutline.restore.ddl.session_settings import set_settings
from cutline.restore.ddl.statements import RESTRICTED_VERSION, NeededPath, run_with_paths
from cutline.snapshots.ddl.database_facts import search_path_of
from cutline.snapshots.ddl.ddl_archive import EXTENSION
from cutline.snapshots.records.commit import Sequence as StoredSequence
from cutline.storage.errors import RefusedError

# The sections, in execution order: before the rows, after them, and at the end.
PRE_DATA, POST_DATA, EVENT_TRIGGERS = "pre-data", "post-data", "event-triggers"
# The database's own properties, which are set together with the last section.
DATABASE = "database"
MATERIALIZED_VIEW = "MATERIALIZED VIEW"
SET_QUERY = """
SELECT setval(format('%%I.%%I', s.space, s.name)::regclass, s.value, s.is_called)
  FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::boolean[]) AS s (space, name, value, is_called)
"""
# By index for each sequence, however few rows the statistics of a new database expect.
FIND_QUERY = """
SELECT c.oid IS NOT NULL,
       EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass AND e.objid = c.oid AND e.deptype = 'e'),
       has_sequence_privilege(c.oid, 'UPDATE') AND has_schema_privilege(n.oid, 'USAGE')
  FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS s (space, name, number)
  LEFT JOIN pg_namespace n ON n.nspname = s.space::name
  LEFT JOIN LATERAL (
    SELECT oid FROM pg_class WHERE relname = s.name::name AND relnamespace = n.oid AND relkind = 'S' OFFSET 0
  ) AS c ON true
 ORDER BY s.number
"""
SEQUENCES_AT_ONCE = 500
STATEMENT_SHOWN_MAX = 200
# Kinds of entries whose options may contain passwords, which servers don't mark as such.
WITH_SECRETS = frozenset(("USER MAPPING", "SERVER", "FOREIGN DATA WRAPPER"))
OPTIONS = " OPTIONS ("
# pg_dump's kind for the rows of extension tables, which may also contain passwords, for example in jobs.
ROWS, VALUES = "TABLE DATA", " VALUES\n"
# Kinds of entries whose names are those of objects alone, without arguments or the name of a table.
OF_ONE_PART = frozenset(
    ("TABLE", "INDEX", "VIEW", MATERIALIZED_VIEW, "SEQUENCE", "FOREIGN TABLE", "STATISTICS", "TYPE", "DOMAIN", ROWS)
)
# A restore's sessions fail where policies would hide rows; others see what the policies leave.
SEEN_BY_OWNER = "to fill it with the rows that its owner may see, run in the database"
CAUSE_REMOVED = "once the cause is removed, run in the database"


class SchemaLoadError(RefusedError):
    """A target node refused the snapshot's DDL."""


class DdlEntry(Struct, frozen=True):
    """An entry in a shard's archive, with the statements that create its object.

    `number` identifies the entry; `dependencies` are the numbers of the entries that it needs. `tablespace` and
    `access` (table access method) are settings for its statements; "" is the default.
    """

    number: int
    kind: str
    schema: str
    name: str
    statements: str
    dependencies: tuple[int, ...] = ()
    tablespace: str = ""
    access: str = ""

    @property
    def label(self) -> str:
        """The object's kind and name, for display; parts with a dot or a quote are quoted, as in all output.

        Other kinds' names, such as those of functions and constraints, consist of several parts.
        """
        schema = f"{quote_if_needed(self.schema)}." if self.schema else ""
        name = quote_if_needed(self.name) if self.schema and self.kind in OF_ONE_PART else self.name
        return show_name(f"{self.kind} {schema}{name}")


class Ddl(Struct, frozen=True):
    """A shard's DDL for one target.

    `settings` are statements that every session runs first. `side_by_side` are the entries after the rows that several
    sessions may run concurrently. `views` are the materialized views that were populated, in the order of their
    dependencies. `search_path` is the source database's setting, or None. `session_settings` are those of its sessions
    on which computed values may depend. If `is_adapted`, the DDL is for a role that
    is not a superuser, and `roles` maps its owners and grantors to the objects that they own or granted privileges on.
    `omitted` are Cutline's publications, which are left out. `beforehand` are the statements that a superuser first
    runs for that role in the empty database. `database` contains the statements that set the database's own properties,
    if any. `lost` are entries whose statements are missing from the store; they are treated like refused statements.
    `early_grants` are statements that the indexes may need; entries after the rows contain them as well.
    """

    settings: str
    pre_data: tuple[DdlEntry, ...]
    post_data: tuple[DdlEntry, ...]
    event_triggers: tuple[DdlEntry, ...]
    side_by_side: frozenset[int] = frozenset()
    views: tuple[str, ...] = ()
    search_path: str | None = None
    session_settings: Mapping[str, str] = field(default_factory=dict)
    is_adapted: bool = False
    roles: Mapping[str, list[str]] = field(default_factory=dict)
    omitted: tuple[str, ...] = ()
    beforehand: tuple[str, ...] = ()
    database: DatabaseDdl | None = None
    lost: tuple[Refusal, ...] = ()
    early_grants: tuple[str, ...] = ()

    @property
    def has_extensions(self) -> bool:
        """Whether extensions are created, by the DDL or by a superuser beforehand."""
        return bool(self.beforehand) or any(entry.kind == EXTENSION for entry in self.pre_data)

    @property
    def tablespace(self) -> str:
        """The tablespace of the database; "" is the server's default."""
        return self.database.properties.tablespace if self.database else ""

    @property
    def sections(self) -> dict[str, tuple[DdlEntry, ...]]:
        """The entries by section, in execution order."""
        return {PRE_DATA: self.pre_data, POST_DATA: self.post_data, EVENT_TRIGGERS: self.event_triggers}


class Refusal(Struct, frozen=True):
    """An entry that a server refused, with the server's reason and the refused statement.

    If the entry was not run because another entry that it depends on was refused, `needs` names that entry.
    """

    entry: DdlEntry
    section: str
    reason: str
    statement: str
    sqlstate: str = ""
    needs: str = ""

    @property
    def label(self) -> str:
        """The object's kind and name, for display."""
        return self.entry.label

    def text(self) -> str:
        """Return the refusal on one line."""
        shown = without_options(self.entry.kind, self.statement)
        return f"{self.label}: {self.reason}" + (f" ({shorten_statement(shown)})" if shown else "")


def without_options(kind: str, statement: str) -> str:
    """Remove a statement's options or rows if entries of this kind may contain passwords."""
    if kind == ROWS:
        return f"{statement.partition(VALUES)[0]} VALUES …;" if statement else ""
    before, keyword, _ = statement.partition(OPTIONS)
    return f"{before}{OPTIONS}…);" if kind in WITH_SECRETS and keyword else statement


def shorten_statement(statement: str) -> str:
    """Return the statement on one line, truncated after STATEMENT_SHOWN_MAX characters."""
    text = " ".join(show_name(statement).split())
    return text if len(text) <= STATEMENT_SHOWN_MAX else f"{text[:STATEMENT_SHOWN_MAX]}…"


def ending(watch: Watch, connection: psycopg.Connection[Any]) -> AbstractContextManager[None]:
    """Shut the session down if a node stops answering or the command is interrupted while the block runs."""
    return watch.on_silence(partial(shut_down, connection))


class Refreshed(Struct):
    """The result of refreshing materialized views.

    `problems` has one line for each view that could not be refreshed, with the reason and the statement to run later.
    `helped` contains each view that could be refreshed only after its functions were given a temporary search_path,
    paired with those functions.
    """

    problems: list[str] = field(default_factory=list)
    helped: list[tuple[DdlEntry, tuple[NeededPath, ...]]] = field(default_factory=list)


def refresh_views(node: Node, ddl: Ddl, watch: Watch) -> Refreshed:
    """Refresh the materialized views that were populated in the snapshot."""
    refreshed = Refreshed()
    if not ddl.views:
        return refreshed
    views = {entry.number: entry for entry in ddl.pre_data if entry.kind in ("VIEW", MATERIALIZED_VIEW)}
    by_name = {
        f"{quote_identifier(ddl_entry.schema)}.{quote_identifier(ddl_entry.name)}": ddl_entry
        for ddl_entry in views.values()
    }

    def definition_of(entry: DdlEntry) -> str:
        """Return the statements of the entry and of the views that it reads, visiting each view once."""
        reached, waiting = {entry.number: entry}, [entry]
        while waiting:
            needed = (
                views[dependency]
                for dependency in waiting.pop().dependencies
                if dependency in views and dependency not in reached
            )
            new = {ddl_entry.number: ddl_entry for ddl_entry in needed}
            reached |= new
            waiting += new.values()
        return "".join(ddl_entry.statements for ddl_entry in reached.values())

    with raising_unreachable(node), connect(node, client_encoding=RAW) as connection, ending(watch, connection):
        set_settings(connection, ddl.session_settings)
        if connection.info.server_version < RESTRICTED_VERSION:
            query = "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), false)"
            connection.execute(query, (search_path_of(ddl.search_path).encode(),))
        for view in ddl.views:
            statement = raw_bytes(f"REFRESH MATERIALIZED VIEW {view}")
            entry = by_name.get(view, DdlEntry(0, MATERIALIZED_VIEW, "", view, ""))
            try:
                needed = run_with_paths(connection, statement, ddl.search_path, raw_bytes(definition_of(entry)))
                if needed is not None:
                    refreshed.helped.append((entry, needed))
            except psycopg.Error as error:
                if connection.broken:
                    raise unreachable_error(node, error) from error
                what = f"materialized view {show_name(view)}"
                if remedy_of(error):
                    raise disrupted_error(node.id, error, what) from error
                is_of_policies = isinstance(error, psycopg.errors.InsufficientPrivilege)
                then = SEEN_BY_OWNER if is_of_policies else CAUSE_REMOVED
                refreshed.problems.append(
                    f"node {node.id}: {what} is not populated: {shorten_message(error)}; {then}: REFRESH MATERIALIZED"
                    f" VIEW {show_name(view)};"
                )
    return refreshed


def show_name(name: str) -> str:
    """Convert raw text to a printable form."""
    return raw_bytes(name).decode(errors="backslashreplace")


def find_settable(
    connection: psycopg.Connection[Any], sequences: Iterable[StoredSequence], *, some_lack: bool
) -> tuple[list[StoredSequence], dict[str, str]]:
    """Return the sequences to set to their stored values, and the reasons why others are not set, keyed by name.

    An extension's sequences may belong to another role (if a superuser created the extension), or may not exist (if the
    extension has a different version or was not created). `some_lack`: some sequences may be missing, because there are
    extensions or refused statements.
    """
    chosen = list(sequences)
    names = ([sequence.schema for sequence in chosen], [sequence.name for sequence in chosen])
    settable, left = list[StoredSequence](), dict[str, str]()
    for sequence, (exists, is_extensions, may_set) in zip(chosen, connection.execute(FIND_QUERY, names), strict=True):
        name = table_name(sequence.schema, sequence.name)
        if not exists and (some_lack or sequence.is_of_extension):
            left[name] = "its extension is missing, or has a different version"
        elif is_extensions and not may_set:
            left[name] = "it keeps the value that its extension gave it, because the role may not set it"
        else:
            settable.append(sequence)
    return settable, left


def set_sequences(connection: psycopg.Connection[Any], sequences: Iterable[StoredSequence]) -> None:
    """Set every sequence to its stored value, SEQUENCES_AT_ONCE at a time.

    Each sequence is locked until the commit, and each commit flushes the WAL. Raises SchemaLoadError if the server
    refuses a sequence's value, and NodeDisruptedError if the cause lies elsewhere.
    """
    values = [(sequence.schema, sequence.name, sequence.last_value, sequence.is_called) for sequence in sequences]
    for start in range(0, len(values), SEQUENCES_AT_ONCE):
        some = values[start : start + SEQUENCES_AT_ONCE]
        try:
            connection.execute(SET_QUERY, tuple(map(list, zip(*some, strict=True))))
        except psycopg.Error as error:
            if connection.broken:
                raise
            # The caller handles lock timeouts.
            if remedy_of(error) and not isinstance(error, psycopg.errors.LockNotAvailable):
                raise disrupted_error(node_of(connection), error) from error
            raise SchemaLoadError(
                f"a sequence can't be set to the value in the commit: {shorten_message(error)}",
                hint=[
                    "the stored DDL may have other bounds for the sequence; to find out whether the store was changed:"
                    f" {CHECK_NAMED}",
                    "if that finds no conflict, alter the sequence before it gets its value:",
                    IN_STEPS,
                ],
            ) from error
