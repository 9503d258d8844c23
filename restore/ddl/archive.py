"""Restore the entries of a shard's archive by pg_restore, which builds indexes side by side.

Which entries are run is decided by their types and dependencies; no statement's text is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleet.config import Node
from fleet.nodes.connections import connect, raising_unreachable
from fleet.nodes.encodings import RAW, raw_bytes
from fleet.nodes.watch import Watch
from fleet.programs.clients import restoring_programs
from fleet.tables.names import quote_identifier
from restore.ddl.ddl import ChangedRoles, show_name
from restore.ddl.marks import BuiltObject, drop_statement, mark, name_marks, read_existing, read_marks, read_table_sizes
from restore.ddl.moved_tables import check_moves
from restore.ddl.pg_restore import OBJECTS_AT_ONCE, ArchivePart, Manner, run_part, write_script
from restore.ddl.role_statements import DEFAULT_PRIVILEGES, PRIVILEGES, RoleStatements
from restore.ddl.role_statements import KINDS as ROLE_KINDS
from restore.ddl.side_by_side import find_side_by_side, is_of_table
from restore.parts.role_changes import RoleChanges
from restore.parts.scope import TableMove
from snapshots.ddl.archive import (
    AFTER_ROWS,
    BEFORE_ROWS,
    FOREIGN_KEY,
    ArchiveEntry,
    Contents,
    NewEntry,
    extract,
    read_contents,
    renumber,
    rewrite,
    statements_of_entry,
    with_dependents,
)
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH, SEARCH_PATH
from snapshots.ddl.fingerprint import OWN_PUBLICATION

VIEW_ROWS, EVENT_TRIGGER = "MATERIALIZED VIEW DATA", "EVENT TRIGGER"
SYSTEM_SCHEMAS = ("pg_catalog", "information_schema")
# Entries that say something about another one, which they name by its type.
REMARKS = ("COMMENT", "SECURITY LABEL")
# The comment on Cutline's own publication records a node's settings before it was made read-only, and a restored
# database is not read-only.
OMITTED_COMMENT = re.compile(rf'PUBLICATION "?{OWN_PUBLICATION}"?')
# Publications and what they publish; pg_dump names the latter by both.
PUBLICATION_KINDS = ("PUBLICATION", "PUBLICATION TABLE")
OWN_ENTRY = re.compile(rf"{OWN_PUBLICATION}( .*)?", re.DOTALL)
# The kind of entries that a restore adds, for its ledger.
MARK = "CUTLINE MARK"


@dataclass(frozen=True, slots=True)
class ArchiveDdl:
    """A shard's archive, a file in a private folder, its contents, and the entries that are restored.

    `side_by_side` are those that pg_restore may run at once. The first entries drop what every new database has and the
    source had not.
    """

    path: Path
    contents: Contents
    entries: tuple[ArchiveEntry, ...]
    side_by_side: frozenset[int]
    search_path: str | None

    @property
    def views(self) -> list[str]:
        """The materialized views that were populated, in the order of their dependencies."""
        return [_qualify(entry) for entry in self.entries if _section_of(entry) == REFRESH]

    def without_dependents(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL for a restore of some tables, and what it leaves out."""
        by_number = {entry.number: entry for entry in self.entries}
        keys = [entry for entry in self.entries if entry.kind == FOREIGN_KEY]
        ddl, views = self._without(keys).without_view_rows()
        return ddl, [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys] + views

    def without_view_rows(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without the rows of materialized views, and what is left out."""
        views = [entry for entry in self.entries if _section_of(entry) == REFRESH]
        return self._without(views), [f"rows of materialized view {show_name(_qualify(view))}" for view in views]

    def _without(self, entries: Iterable[ArchiveEntry]) -> ArchiveDdl:
        """The DDL without these entries and what depends on them, such as a comment."""
        left = with_dependents(self.entries, [entry.number for entry in entries])
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left))

    def with_roles(self, changes: RoleChanges) -> tuple[ArchiveDdl, ChangedRoles]:
        """The DDL with other roles, in the archive itself; and what is left out, and which roles it named."""
        body, contents = self.path.read_bytes(), self.contents
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
        changed = read_archive(rewrite(body, contents, statements, owners=owners), self.path)
        empty = [entry for entry in changed.entries if statements.get(entry.number) == ""]
        # Of the privileges of a table, those of its columns depend; a comment on a policy goes with it.
        kept = changed._without(entry for entry in empty if entry.kind not in (PRIVILEGES, DEFAULT_PRIVILEGES))
        entries = tuple(entry for entry in kept.entries if statements.get(entry.number) != "")
        return replace(kept, entries=entries), ChangedRoles(work.left_out, frozenset(work.met))

    def check_moves(self, moves: Iterable[TableMove]) -> None:
        """Raise TableInTheWayError if a table can't have another name."""
        check_moves(self.entries, moves)

    def without_foreign_keys(self, keeps: Callable[[str], bool]) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without the foreign keys whose statements `keeps` denies, and their names."""
        body, by_number = self.path.read_bytes(), {entry.number: entry for entry in self.entries}
        keys = [
            entry
            for entry in self.entries
            if entry.kind == FOREIGN_KEY and not keeps(statements_of_entry(body, entry).strip())
        ]
        left = with_dependents(self.entries, [entry.number for entry in keys])
        names = [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def without_system_grants(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without privileges of PostgreSQL's own objects, which only a superuser grants; and what is left."""
        grants = [entry for entry in self.entries if entry.kind == PRIVILEGES and entry.schema in SYSTEM_SCHEMAS]
        left = {entry.number for entry in grants}
        names = [f"privileges of {show_name(entry.name)}" for entry in grants]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def run_before_rows(self, node: Node, watch: Watch) -> None:
        """Run what precedes the rows."""
        run_part(ArchivePart(self.path, PRE_DATA, _numbers(self._of(PRE_DATA))), self.contents.writer, node, watch)

    def run_after_rows(self, node: Node, ledger: str, watch: Watch) -> None:
        """Run what follows the rows: side by side what does not exist yet, then what the ledger has no marks of.

        Each entry that is run side by side is one statement.
        """
        entries = self._of(POST_DATA)
        rest = [entry for entry in entries if entry.number not in self.side_by_side]
        chunks = [rest[start : start + OBJECTS_AT_ONCE] for start in range(0, len(rest), OBJECTS_AT_ONCE)]
        body = self.path.read_bytes()
        texts = ("".join(statements_of_entry(body, entry) for entry in chunk) for chunk in chunks)
        names = name_marks(POST_DATA, map(raw_bytes, texts))
        with raising_unreachable(node), connect(node, client_encoding=RAW) as connection:
            done = read_marks(connection, ledger, POST_DATA, names)
            existing, sizes = read_existing(connection), read_table_sizes(connection)
        tables = {entry.number: entry for entry in self.entries if entry.kind == "TABLE"}
        due = [one for one in entries if one.number in self.side_by_side and _find_object(one, tables) not in existing]
        if due:
            run_part(self._largest_first(body, due, sizes), self.contents.writer, node, watch)
        for name, chunk in zip(names, chunks, strict=True):
            if name not in done:
                part = self._write_batch(body, POST_DATA, NewEntry(MARK, name, mark(ledger, name)), chunk)
                run_part(part, self.contents.writer, node, watch)

    def _largest_first(
        self, body: bytes, due: Sequence[ArchiveEntry], sizes: Mapping[tuple[str, str], int]
    ) -> ArchivePart:
        """The entries to run side by side, numbered so that those of the largest tables are begun first."""
        of_tables = {one.number: sizes.get((one.schema, one.name), 0) for one in self.entries if one.kind == "TABLE"}

        def size(one: ArchiveEntry) -> int:
            return max((of_tables.get(number, 0) for number in one.dependencies), default=0)

        numbers = [one.number for one in sorted(due, key=lambda one: (-size(one), one.number))]
        path = self.path.with_name(f"{self.path.name}-largest-first")
        path.write_bytes(renumber(body, self.contents, numbers))
        # A pg_restore with one job, and one that writes a script, run the list as it stands: it keeps the archive's
        # order, in which no entry precedes what it depends on.
        new = dict(zip(numbers, sorted(numbers), strict=True))
        return ArchivePart(path, POST_DATA, [new[one.number] for one in due], Manner.SIDE_BY_SIDE)

    def run_last(self, node: Node, ledger: str, watch: Watch, first: str = "") -> None:
        """Run the statements `first`, drop the ledger and create event triggers, in one transaction."""
        drop = NewEntry(MARK, EVENT_TRIGGERS, first + drop_statement(ledger))
        part = self._write_batch(self.path.read_bytes(), EVENT_TRIGGERS, drop, self._of(EVENT_TRIGGERS))
        run_part(part, self.contents.writer, node, watch)

    def _write_batch(self, body: bytes, section: str, first: NewEntry, entries: Iterable[ArchiveEntry]) -> ArchivePart:
        """Write an archive of a new entry and these, which are run in one transaction."""
        path = self.path.with_name(f"{self.path.name}-{section}-batch")
        alone, numbers = extract(body, self.contents, entries, [first])
        path.write_bytes(alone)
        return ArchivePart(path, section, numbers, Manner.ONE_TRANSACTION)

    def write_scripts(self, node: Node) -> dict[str, str]:
        """The statements of all sections as scripts (raw text), as pg_restore writes them, by section."""
        with raising_unreachable(node), connect(node) as connection:
            programs, _ = restoring_programs(node, connection, self.contents.writer)
        scripts = {
            section: write_script(ArchivePart(self.path, section, _numbers(self._of(section))), programs)
            for section in (PRE_DATA, POST_DATA, EVENT_TRIGGERS)
        }
        return scripts | {REFRESH: "".join(f"REFRESH MATERIALIZED VIEW {view};\n" for view in self.views)}

    def _of(self, section: str) -> list[ArchiveEntry]:
        return [entry for entry in self.entries if _section_of(entry) == section]


def read_archive(body: bytes, path: Path) -> ArchiveDdl:
    """Write the archive to the file `path`, which pg_restore reads, and choose what is restored of it."""
    path.write_bytes(body)
    contents = read_contents(body)
    search_path = next((entry.name for entry in contents.entries if entry.kind == SEARCH_PATH), None)
    entries = tuple(entry for entry in _with_sections(contents.entries) if not _is_omitted(entry))
    return ArchiveDdl(path, contents, entries, find_side_by_side(body, entries), search_path)


def is_own_publication(entry: ArchiveEntry) -> bool:
    """Whether an entry is a publication of Cutline, or one of its tables; each node has them for tables of its own."""
    return entry.kind in PUBLICATION_KINDS and OWN_ENTRY.fullmatch(entry.name) is not None


def _is_omitted(entry: ArchiveEntry) -> bool:
    return entry.kind == SEARCH_PATH or (entry.kind in REMARKS and OMITTED_COMMENT.fullmatch(entry.name) is not None)


def _with_sections(entries: Iterable[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    """Yield the entries; a remark or a privilege has no section and gets that of the entry before, as in pg_restore."""
    section = BEFORE_ROWS
    for entry in entries:
        section = entry.section if entry.section in (BEFORE_ROWS, AFTER_ROWS) else section
        yield entry if entry.section == section else replace(entry, section=section)


def _numbers(entries: Iterable[ArchiveEntry]) -> list[int]:
    return [entry.number for entry in entries]


def _section_of(entry: ArchiveEntry) -> str:
    """The section in which the entry is run."""
    if entry.kind == VIEW_ROWS:
        return REFRESH
    if entry.kind == EVENT_TRIGGER or (
        entry.kind in REMARKS and not entry.schema and entry.name.startswith(f"{EVENT_TRIGGER} ")
    ):
        return EVENT_TRIGGERS
    return POST_DATA if entry.section == AFTER_ROWS else PRE_DATA


def _qualify(entry: ArchiveEntry) -> str:
    return f"{quote_identifier(entry.schema)}.{quote_identifier(entry.name)}"


def _name_key(key: ArchiveEntry, entries: Mapping[int, ArchiveEntry]) -> str:
    """A foreign key's name and table."""
    _, table, name = _find_object(key, {number: one for number, one in entries.items() if one.kind == "TABLE"})
    if not table:
        return f"{quote_identifier(key.schema)}.{key.name}"
    return f"{quote_identifier(name)} of {quote_identifier(key.schema)}.{quote_identifier(table)}"


def _find_object(entry: ArchiveEntry, tables: Mapping[int, ArchiveEntry]) -> BuiltObject:
    """What the entry creates. A constraint's entry is named by its table and itself, and depends on the table."""
    for table in (tables[number] for number in entry.dependencies if number in tables):
        if is_of_table(entry, table):
            return BuiltObject(entry.schema, table.name, entry.name.removeprefix(f"{table.name} "))
    return BuiltObject(entry.schema, "", entry.name)
