"""The entries of a shard's archive that a restore runs: which they are, and as what each target runs them.

Entries are chosen by their types and dependencies. Statements of owners, grants and extensions have one of few known
forms, any other is refused; the text of no other statement decides what runs.

A table moves to another schema with its indexes, its constraints and the sequences of its columns, so their names must
be free there, too.

The rows of extensions' configuration tables are entries, too. They run after the tables are created, because some rows
name tables (regclass). A row of the snapshot replaces the extension's own row with the same key. The server may refuse
an entry like any other. The extensions' sequences are set with all others at the end; as entries they are also among
the refused statements if their extension is refused.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
from msgspec import structs

from cutline.fleet.config import Node
from cutline.fleet.table_names import quote_identifier, table_name
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.encodings import raw_text
from cutline.nodes.programs import archive_reader
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
from cutline.restore.ddl.running import find_side_by_side, table_of
from cutline.restore.scope.scope import RoleChanges, TableMove
from cutline.snapshots.ddl.database_facts import OWN_PUBLICATION
from cutline.snapshots.ddl.ddl_archive import (
    AFTER_ROWS,
    BEFORE_ROWS,
    EXTENSION,
    FOREIGN_KEY,
    PRIVILEGES,
    ArchiveEntry,
    Contents,
    read_contents,
    rewrite,
    statements_of_entry,
    with_dependents,
)
from cutline.snapshots.ddl.dump import PATH_ENTRY
from cutline.snapshots.ddl.extension_tables import ExtensionsOfShard
from cutline.snapshots.records.commit import Sequence
from cutline.storage.errors import RefusedError

TABLE, CONSTRAINT = "TABLE", "CONSTRAINT"
# Types of entries that move with their table, and of all that have names among relations or types.
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
                    f"--group {show_name(move.label)}: the name {show_name(table_name(move.to_schema, name))} is taken"
                    f" by {kind}",
                    hint="choose another name, or another schema",
                    details={"table": show_name(move.label)},
                )
            taken[move.to_schema, name] = "what another --group moves there"


def _own_name(entry: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    """The name of the entry's object; a constraint's follows the name of its table, on which it depends."""
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
        return "".join(f"{statement};\n" for move in moves for statement in _statements_of(connection, move))


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


VIEW_ROWS = "MATERIALIZED VIEW DATA"
# Without these no rows can be loaded. A table does not always depend on its domains: pg_dump breaks loops there.
WITH_ROWS = ("TABLE", "FOREIGN TABLE", "SEQUENCE", "TYPE", "DOMAIN")
SYSTEM_SCHEMAS = ("pg_catalog", "information_schema")
SYSTEM_SCHEMA = 'SCHEMA "pg_catalog"'
# The comment on Cutline's own publication records a node's settings before it was made read-only, and a restored
# database is not read-only.
OMITTED_COMMENT = re.compile(rf'PUBLICATION "?{OWN_PUBLICATION}"?')
# Publications and their contents; pg_dump names the latter by both.
PUBLICATION_KINDS = ("PUBLICATION", "PUBLICATION TABLE")
OWN_ENTRY = re.compile(rf"{OWN_PUBLICATION}( .*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ArchiveDdl:
    """A shard's archive, its contents, and the entries that are restored.

    `side_by_side` are those that several sessions may run at once. The first entries drop what every new database has
    and the source had not.
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
        """The DDL for a restore of some tables, and its omissions."""
        by_number = {entry.number: entry for entry in self.entries}
        keys = [entry for entry in self.entries if entry.kind == FOREIGN_KEY]
        ddl, views = self.without(keys).without_view_rows()
        return ddl, [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys] + views

    def without_view_rows(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without the rows of materialized views, and the omissions."""
        views = [entry for entry in self.entries if entry.kind == VIEW_ROWS]
        return self.without(views), [f"rows of materialized view {show_name(_qualify(view))}" for view in views]

    def without(self, entries: Iterable[ArchiveEntry]) -> ArchiveDdl:
        """The DDL without these entries and what depends on them, such as a comment."""
        left = with_dependents(self.entries, [entry.number for entry in entries])
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left))

    def with_roles(self, changes: RoleChanges) -> tuple[ArchiveDdl, ChangedRoles]:
        """The DDL with other roles, in the archive itself; and the omissions, and the roles that it named."""
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
        changed = read_archive(rewrite(body, contents, statements, owners=owners))
        empty = [entry for entry in changed.entries if statements.get(entry.number) == ""]
        # Of the privileges of a table, those of its columns depend; a comment on a policy goes with it.
        kept = changed.without(entry for entry in empty if entry.kind not in (PRIVILEGES, DEFAULT_PRIVILEGES))
        entries = tuple(entry for entry in kept.entries if statements.get(entry.number) != "")
        return replace(kept, entries=entries), ChangedRoles(work.left_out, frozenset(work.met))

    def check_moves(self, moves: Iterable[TableMove]) -> None:
        """Raise TableInTheWayError if a table can't have another name."""
        check_moves(self.entries, moves)

    def without_foreign_keys(self, keeps: Callable[[str], bool]) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without the foreign keys whose statements `keeps` denies, and their names."""
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
        """The DDL without privileges of PostgreSQL's own objects, which only a superuser grants; and the omissions."""
        grants = [
            entry
            for entry in self.entries
            if entry.kind == PRIVILEGES and (entry.schema in SYSTEM_SCHEMAS or entry.name == SYSTEM_SCHEMA)
        ]
        left = {entry.number for entry in grants}
        names = [f"privileges of {show_name(entry.name)}" for entry in grants]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def for_target(self, node: Node, folder: Path) -> Ddl:
        """The DDL as a superuser runs it on the target `node`; `folder` is private.

        Raises ProgramsUnfitError if no pg_restore reads the archive.
        """
        entries = [entry for entry in self.entries if entry.kind != VIEW_ROWS]
        programs = archive_reader(node, self.contents.writer)
        written = write_statements(self.body, self.contents, entries, folder, programs)
        sections: dict[str, list[DdlEntry]] = {PRE_DATA: [], POST_DATA: [], EVENT_TRIGGERS: []}
        # Privileges follow all objects of their section: an owner may have revoked its own.
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


def read_archive(body: bytes) -> ArchiveDdl:
    """Read the archive, and choose the entries to restore."""
    contents = read_contents(body)
    search_path = next((entry.name for entry in contents.entries if entry.kind == PATH_ENTRY), None)
    entries = tuple(entry for entry in _with_sections(contents.entries) if not _is_omitted(entry))
    return ArchiveDdl(body, contents, entries, find_side_by_side(body, entries), search_path)


def is_own_publication(entry: ArchiveEntry) -> bool:
    """Whether an entry is a publication of Cutline, or one of its tables; each node has them for tables of its own."""
    return entry.kind in PUBLICATION_KINDS and OWN_ENTRY.fullmatch(entry.name) is not None


def _is_omitted(entry: ArchiveEntry) -> bool:
    return entry.kind == PATH_ENTRY or (entry.kind in REMARKS and OMITTED_COMMENT.fullmatch(entry.name) is not None)


def _with_sections(entries: Collection[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    """Yield the entries; a remark or a privilege has no section and gets that of the entry before, as in pg_restore.

    pg_dump postpones a function whose body depends on a primary key until after that, but not what calls the function:
    it names the section by the kind. So what tables may need, such as a domain, comes before the rows, with the key;
    other callers, such as a column's default, come after them.
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
        yield entry if entry.section == own else replace(entry, section=own)


def _needed_by_tables(entries: Collection[ArchiveEntry]) -> set[int]:
    """The entries without which tables can't be created, these included."""
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
    """The section to which the entry belongs."""
    if is_of_event_trigger(entry):
        return EVENT_TRIGGERS
    return POST_DATA if entry.section == AFTER_ROWS else PRE_DATA


def _qualify(entry: ArchiveEntry) -> str:
    return f"{quote_identifier(entry.schema)}.{quote_identifier(entry.name)}"


def _name_key(key: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    """A foreign key's name and table."""
    table = table_of(key, entries)
    if table is None:
        return f"{quote_identifier(key.schema)}.{key.name}"
    name = key.name.removeprefix(f"{table.name} ")
    return f"{quote_identifier(name)} of {quote_identifier(key.schema)}.{quote_identifier(table.name)}"


# As pg_dump calls such entries.
SEQUENCE_SET = "SEQUENCE SET"
# Numbers of archive entries are lower, those of the database's own entries higher (restore/ddl/running.py).
FIRST_NUMBER = 1 << 39


def with_extension_rows(ddl: Ddl, found: ExtensionsOfShard, sequences: Iterable[Sequence]) -> Ddl:
    """The DDL, with statements that fill these tables and set these of the `sequences`."""
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
    """The refusal that a restore reports for a shard's rows that can't be read from the store."""
    return Refusal(DdlEntry(FIRST_NUMBER, ROWS, "", "of extensions", ""), PRE_DATA, reason, "")


def set_statement(sequence: Sequence) -> str:
    """SQL that gives the sequence its value, if the role may do that."""
    name = f"{quote_identifier(sequence.schema)}.{quote_identifier(sequence.name)}".replace("'", "''")
    return (
        f"SELECT pg_catalog.setval(c.oid, {sequence.last_value}, {str(sequence.is_called).lower()})"
        f" FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass('{name}')"
        " AND pg_catalog.has_sequence_privilege(c.oid, 'UPDATE');\n"
    )
