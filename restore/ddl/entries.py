"""Choose the entries in a shard's archive that a restore runs, and adapt them to each target.

Entries are chosen by their types and dependencies. Statements about owners, grants and extensions must have one of a
few known forms; otherwise they are refused. The text of other statements does not influence the choice.

When a table moves to a different schema, its indexes, constraints and column sequences move with it, so their names
must also be unused there.

The rows of extension configuration tables are entries too. These entries run after the tables are created, because some
rows refer to tables (regclass). A row from the snapshot replaces the extension's own row with the same key. The server
may refuse such an entry like any other. Extension sequences are set with all others at the end; they are entries only
so that they are reported as refused statements if their extension is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier, table_name
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.encodings import raw_text
from cutline.nodes.programs import archive_reader
from cutline.nodes.publications import OWN_PUBLICATION
from cutline.restore.ddl.ddl import EVENT_TRIGGERS, POST_DATA, PRE_DATA, ROWS, Ddl, DdlEntry, Refusal, show_name
from cutline.restore.ddl.role_statements import (
    DEFAULT_PRIVILEGES,
    REMARKS,
    ChangedRoles,
    RoleStatements,
    is_of_event_trigger,
    write_statements,
)
from cutline.restore.ddl.role_statements import KINDS as ROLE_KINDS
from cutline.restore.ddl.side_by_side import find_side_by_side, table_of
from cutline.restore.scope.scope import RoleChanges, TableMove
from cutline.snapshots.ddl.ddl_archive import (
    AFTER_ROWS,
    BEFORE_ROWS,
    CONSTRAINT,
    EXTENSION,
    FOREIGN_KEY,
    PRIVILEGES,
    TABLE,
    ArchiveEntry,
    Contents,
    DdlArchive,
    rewrite,
    statements_of_entry,
    with_dependents,
)
from cutline.snapshots.ddl.dump import PATH_ENTRY
from cutline.snapshots.ddl.extension_tables import ExtensionsOfShard
from cutline.snapshots.records.commit import Sequence
from cutline.storage.errors import RefusedError

# Types of entries that move with their table, and types whose names share the namespace of relations or types.
FOLLOWING = ("SEQUENCE", "INDEX", CONSTRAINT)
NAMED = (*FOLLOWING, TABLE, "VIEW", "MATERIALIZED VIEW", "FOREIGN TABLE", "TYPE", "SHELL TYPE", "DOMAIN")
NAMES_QUERY = """
SELECT convert_to(name, getdatabaseencoding()) FROM unnest(%s::text[]) WITH ORDINALITY AS given (name, n) ORDER BY n
"""
# Only the database's owner can act as pg_database_owner, and a new schema belongs to that owner anyway.
OWNER_QUERY = """
SELECT convert_to(pg_get_userbyid(n.nspowner)::text, getdatabaseencoding()),
       n.nspowner <> 'pg_database_owner'::regrole OR u.rolsuper
  FROM pg_namespace n, pg_roles u WHERE n.nspname = %s AND u.rolname = current_user
"""


class TableInTheWayError(RefusedError):
    """The new name of a table is already taken in the snapshot."""


def check_moves(entries: Iterable[ArchiveEntry], moves: Iterable[TableMove]) -> None:
    """Raise TableInTheWayError if the new name of a moved table, or of an object that moves with it, is taken.

    All names are raw text.
    """
    entries, moves = list(entries), list(moves)
    tables = {(entry.schema, entry.name): entry.number for entry in entries if entry.kind == TABLE}
    by_number = {entry.number: entry for entry in entries}
    names = {entry.number: _own_name(entry, by_number) for entry in entries if entry.kind in NAMED}
    taken = {(by_number[number].schema, name): by_number[number].kind.lower() for number, name in names.items()}
    for move in moves:
        number = tables.get((move.schema, move.table), -1)
        following = [
            archive_entry
            for archive_entry in entries
            if archive_entry.kind in FOLLOWING and number in archive_entry.dependencies
        ]
        moved = [move.to_table]
        if move.schema != move.to_schema:
            moved += [names[entry.number] for entry in following]
        for name in moved:
            kind = taken.get((move.to_schema, name))
            if kind is not None:
                raise TableInTheWayError(
                    f"--group {show_name(move.label)}: the name {show_name(table_name(move.to_schema, name))} is"
                    f" already taken by {kind}",
                    hint="choose a different name or schema",
                    details={"table": show_name(move.label)},
                )
            taken[move.to_schema, name] = "an object that another --group moves there"


def _own_name(entry: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    """Return the name of the entry's object; in a constraint's entry, the name follows the table's name."""
    tables = [entries[number].name for number in entry.dependencies if number in entries]
    prefixes = [f"{name} " for name in tables if entry.kind == CONSTRAINT and entry.name.startswith(f"{name} ")]
    return entry.name.removeprefix(max(prefixes, key=len, default=""))


def move_statements(node: Node, moves: Iterable[TableMove]) -> str:
    """Return the statements (raw text) that rename the database's tables; "" if there are none.

    A missing schema is created and given the owner of the table's original schema.
    """
    moves = list(moves)
    if not moves:
        return ""
    with raising_unreachable(node), connect(node) as connection:
        return "".join(f"{statement};\n" for move in moves for statement in _statements_of(connection, move))


def _statements_of(connection: psycopg.Connection[Any], move: TableMove) -> Iterator[str]:
    names = connection.execute(NAMES_QUERY, (list(structs.astuple(move)),)).fetchall()
    schema, table, to_schema, to_table = (quote_identifier(raw_text(bytes(name))) for (name,) in names)
    # Use a temporary name during the move, because either schema may contain a table with the old or new name.
    between = quote_identifier(f"cutline_{secrets.token_hex(8)}")
    yield f"ALTER TABLE {schema}.{table} RENAME TO {between}"
    if to_schema != schema:
        owner, is_named = connection.execute(OWNER_QUERY, (move.schema,)).fetchone() or (b"", False)
        authorization = f" AUTHORIZATION {quote_identifier(raw_text(bytes(owner)))}" if is_named else ""
        yield f"CREATE SCHEMA IF NOT EXISTS {to_schema}{authorization}"
        yield f"ALTER TABLE {schema}.{between} SET SCHEMA {to_schema}"
    yield f"ALTER TABLE {to_schema}.{between} RENAME TO {to_table}"


VIEW_ROWS = "MATERIALIZED VIEW DATA"
# Begins a line about a materialized view whose rows are left out.
ROWS_OF_VIEW = "rows of materialized view"
# Rows can't be loaded without these. Where pg_dump breaks loops, a table may lack a dependency on its domains.
WITH_ROWS = ("TABLE", "FOREIGN TABLE", "SEQUENCE", "TYPE", "DOMAIN")
SYSTEM_SCHEMAS = ("pg_catalog", "information_schema")
SYSTEM_SCHEMA = 'SCHEMA "pg_catalog"'
# The comment on Cutline's own publication records a node's settings from before the node was made read-only. A restored
# database is not read-only.
OMITTED_COMMENT = re.compile(rf'PUBLICATION "?{OWN_PUBLICATION}"?')
# pg_dump dumps casts and transforms that another session created with temporary types or functions, and nothing else of
# a session (pg_dump.c, selectDumpableCast).
OF_TYPES, OF_SESSION = frozenset({"CAST", "TRANSFORM"}), re.compile(r'"pg_temp_[0-9]+"\.')
# Publications and their tables; pg_dump names the latter by publication and table.
PUBLICATION_KINDS = ("PUBLICATION", "PUBLICATION TABLE")
OWN_ENTRY = re.compile(rf"{OWN_PUBLICATION}( .*)?", re.DOTALL)


class ArchiveDdl(Struct, frozen=True):
    """A shard's archive, its contents, and the entries to restore.

    `side_by_side` are the entries that several sessions may run concurrently. The first entries drop objects that every
    new database has but the source did not have.
    """

    body: bytes
    contents: Contents
    entries: tuple[ArchiveEntry, ...]
    side_by_side: frozenset[int]
    search_path: str | None

    @property
    def views(self) -> list[str]:
        """The materialized views that were populated, in the order of their dependencies."""
        return [_qualify(entry) for entry in self.entries if entry.kind == VIEW_ROWS]

    def without_dependents(self) -> tuple[ArchiveDdl, list[str]]:
        """Return the DDL for a restore of some tables, and the omissions."""
        by_number = {entry.number: entry for entry in self.entries}
        keys = [entry for entry in self.entries if entry.kind == FOREIGN_KEY]
        ddl, views = self.without(keys).without_view_rows()
        return ddl, [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys] + views

    def without_view_rows(self) -> tuple[ArchiveDdl, list[str]]:
        """Leave out the rows of materialized views; also return the omissions."""
        views = [entry for entry in self.entries if entry.kind == VIEW_ROWS]
        return self.without(views), [f"{ROWS_OF_VIEW} {show_name(_qualify(view))}" for view in views]

    def without(self, entries: Iterable[ArchiveEntry]) -> ArchiveDdl:
        """Leave out these entries and all that depend on them, such as comments."""
        left = with_dependents(self.entries, [entry.number for entry in entries])
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left))

    def with_roles(self, changes: RoleChanges) -> tuple[ArchiveDdl, ChangedRoles]:
        """Replace roles in the archive itself; also return the omissions, and the roles that the archive named."""
        body, contents = self.body, self.contents
        work = RoleStatements(changes)
        statements = {
            entry.number: work.change(entry, statements_of_entry(body, entry))
            for entry in contents.entries
            if entry.kind in ROLE_KINDS
        }
        owners = {
            entry.number: "" if changes.no_owner else changes.of(entry.owner)
            for entry in contents.entries
            if entry.owner
        }
        work.met.update(entry.owner for entry in contents.entries if entry.owner)
        changed = read_archive(DdlArchive.of(rewrite(body, contents, statements, owners=owners)))
        empty = [entry for entry in changed.entries if statements.get(entry.number) == ""]
        # Keep dependents of empty privileges: a column's privileges depend on the table's. Leave out other dependents,
        # such as the comment on a policy.
        kept = changed.without(entry for entry in empty if entry.kind not in (PRIVILEGES, DEFAULT_PRIVILEGES))
        entries = tuple(entry for entry in kept.entries if statements.get(entry.number) != "")
        return replace(kept, entries=entries), ChangedRoles(work.left_out, frozenset(work.met))

    def check_moves(self, moves: Iterable[TableMove]) -> None:
        """Raise TableInTheWayError if a table can't be renamed."""
        check_moves(self.entries, moves)

    def without_foreign_keys(self, keeps: Callable[[str], bool]) -> tuple[ArchiveDdl, list[str]]:
        """Leave out the foreign keys whose statements `keeps` rejects; also return their names."""
        by_number = {entry.number: entry for entry in self.entries}
        keys = [
            entry
            for entry in self.entries
            if entry.kind == FOREIGN_KEY and not keeps(statements_of_entry(self.body, entry).strip())
        ]
        left = with_dependents(self.entries, [entry.number for entry in keys])
        names = [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def without_system_grants(self) -> tuple[ArchiveDdl, list[str]]:
        """Leave out privileges on PostgreSQL's own objects, which only superusers grant; also return the omissions."""
        grants = [
            entry
            for entry in self.entries
            if entry.kind == PRIVILEGES and (entry.schema in SYSTEM_SCHEMAS or entry.name == SYSTEM_SCHEMA)
        ]
        left = {entry.number for entry in grants}
        names = [f"privileges of {show_name(entry.name)}" for entry in grants]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def for_target(self, node: Node, folder: Path) -> Ddl:
        """Return the DDL as a superuser runs it on the target `node`; `folder` is a private folder.

        Raises ProgramsUnfitError if no pg_restore can read the archive.
        """
        entries = [entry for entry in self.entries if entry.kind != VIEW_ROWS]
        programs = archive_reader(node, self.contents.writer)
        written = write_statements(self.body, self.contents, entries, folder, programs)
        sections: dict[str, list[DdlEntry]] = {PRE_DATA: [], POST_DATA: [], EVENT_TRIGGERS: []}
        # Grant privileges after all objects in their section exist: an owner may have revoked its own privileges.
        for entry in sorted(entries, key=lambda entry: entry.kind in (PRIVILEGES, DEFAULT_PRIVILEGES)):
            sections[_section_of(entry)].append(
                DdlEntry(
                    entry.number,
                    entry.kind,
                    entry.schema,
                    entry.name,
                    written.statements[entry.number],
                    entry.dependencies,
                    entry.tablespace,
                    entry.access,
                )
            )
        return Ddl(
            written.settings,
            tuple(sections[PRE_DATA]),
            tuple(sections[POST_DATA]),
            tuple(sections[EVENT_TRIGGERS]),
            side_by_side=self.side_by_side,
            views=tuple(self.views),
            search_path=self.search_path,
        )


def read_archive(archive: DdlArchive) -> ArchiveDdl:
    """Choose the entries to restore."""
    body, contents = archive.body, archive.contents
    search_path = next((entry.name for entry in contents.entries if entry.kind == PATH_ENTRY), None)
    omitted = {entry.number for entry in contents.entries if _is_omitted(body, entry)}
    remarks = [entry for entry in contents.entries if entry.kind in REMARKS]
    omitted |= {remark.number for remark in remarks if omitted.intersection(remark.dependencies)}
    entries = tuple(entry for entry in _with_sections(contents.entries) if entry.number not in omitted)
    return ArchiveDdl(body, contents, entries, find_side_by_side(body, entries), search_path)


def is_own_publication(entry: ArchiveEntry) -> bool:
    """Whether an entry belongs to one of Cutline's publications, which differ from node to node."""
    return entry.kind in PUBLICATION_KINDS and OWN_ENTRY.fullmatch(entry.name) is not None


def _is_omitted(body: bytes, entry: ArchiveEntry) -> bool:
    return (
        entry.kind == PATH_ENTRY
        or (entry.kind in REMARKS and OMITTED_COMMENT.fullmatch(entry.name) is not None)
        or (entry.kind in OF_TYPES and OF_SESSION.search(statements_of_entry(body, entry)) is not None)
    )


def _with_sections(entries: Collection[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    """Yield the entries. As in pg_restore, comments, labels and privileges get the section of the preceding entry.

    pg_dump moves a function whose body depends on a primary key after the key, but not the function's callers, because
    it assigns sections by kind. So objects that tables may need, such as domains, are put before the rows together with
    the key, and other callers, such as column defaults, after them.
    """
    needed = _needed_by_tables(entries)
    section = BEFORE_ROWS
    late: set[int] = set()
    for entry in entries:
        section = entry.section if entry.section in (BEFORE_ROWS, AFTER_ROWS) else section
        own = AFTER_ROWS if section == AFTER_ROWS or not late.isdisjoint(entry.dependencies) else BEFORE_ROWS
        if entry.number in needed:
            own = BEFORE_ROWS
        if own == AFTER_ROWS:
            late.add(entry.number)
        yield entry if entry.section == own else structs.replace(entry, section=own)


def _needed_by_tables(entries: Collection[ArchiveEntry]) -> set[int]:
    """Return the numbers of the tables' entries and of all entries that they need."""
    by_number = {entry.number: entry for entry in entries}
    needed: set[int] = set()
    left = [entry.number for entry in entries if entry.kind in WITH_ROWS]
    while left:
        number = left.pop()
        if number not in needed and number in by_number:
            needed.add(number)
            left += by_number[number].dependencies
    return needed


def _section_of(entry: ArchiveEntry) -> str:
    if is_of_event_trigger(entry):
        return EVENT_TRIGGERS
    return POST_DATA if entry.section == AFTER_ROWS else PRE_DATA


def _qualify(entry: ArchiveEntry) -> str:
    return f"{quote_identifier(entry.schema)}.{quote_identifier(entry.name)}"


def _name_key(key: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    table = table_of(key, entries)
    if table is None:
        return f"{quote_identifier(key.schema)}.{key.name}"
    name = key.name.removeprefix(f"{table.name} ")
    return f"{quote_identifier(name)} of {quote_identifier(key.schema)}.{quote_identifier(table.name)}"


# pg_dump's kind for such entries.
SEQUENCE_SET = "SEQUENCE SET"
# Archive entries have lower numbers; the entries for the database's own properties have higher numbers
# (restore/ddl/running.py).
FIRST_NUMBER = 1 << 39


def with_extension_rows(ddl: Ddl, found: ExtensionsOfShard, sequences: Iterable[Sequence]) -> Ddl:
    """Add statements that fill the found tables, and set the found sequences to their values in `sequences`."""
    extensions = {entry.name: entry.number for entry in ddl.pre_data if entry.kind == EXTENSION}
    values = {(sequence.schema, sequence.name): sequence for sequence in sequences}
    entries = [
        (table.table.extension, ROWS, table.table.schema, table.table.name, raw_text(table.statements))
        for table in found.tables
    ]
    entries += [
        (
            extension_sequence.extension,
            SEQUENCE_SET,
            extension_sequence.schema,
            extension_sequence.name,
            set_statement(values[extension_sequence.schema, extension_sequence.name]),
        )
        for extension_sequence in found.sequences
        if (extension_sequence.schema, extension_sequence.name) in values
    ]
    numbered = [
        DdlEntry(number, kind, schema, name, text, (extensions[extension],) if extension in extensions else ())
        for number, (extension, kind, schema, name, text) in enumerate(entries, FIRST_NUMBER)
    ]
    return replace(ddl, pre_data=(*ddl.pre_data, *numbered))


def lost_rows(reason: str) -> Refusal:
    """Return the refusal that reports that a shard's extension rows can't be read from the store."""
    return Refusal(DdlEntry(FIRST_NUMBER, ROWS, "", "of extensions", ""), PRE_DATA, reason, "")


def set_statement(sequence: Sequence) -> str:
    """Return SQL that sets the sequence to its value if the role may do so."""
    name = f"{quote_identifier(sequence.schema)}.{quote_identifier(sequence.name)}".replace("'", "''")
    return (
        f"SELECT pg_catalog.setval(c.oid, {sequence.last_value}, {str(sequence.is_called).lower()})"
        f" FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass('{name}')"
        " AND pg_catalog.has_sequence_privilege(c.oid, 'UPDATE');\n"
    )
