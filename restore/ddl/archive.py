"""Restore the entries of a shard's archive by pg_restore, which builds indexes side by side.

Which entries are run is decided by their types and dependencies; no statement's text is looked at.
"""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fleet.config import Node
from fleet.nodes.connections import TRANSACTION_TIMEOUT_VERSION, connect, raising_unreachable
from fleet.nodes.encodings import raw_text
from fleet.nodes.watch import Watch
from fleet.programs.clients import ClientPrograms, restoring_programs
from fleet.programs.wheel import ProgramFailedError, run_group, run_tool
from fleet.tables.names import quote_identifier
from restore.ddl.ddl import refused_error, show_name
from restore.ddl.scripts import run_script
from restore.ddl.side_by_side import find_side_by_side
from snapshots.ddl.archive import (
    AFTER_ROWS,
    BEFORE_ROWS,
    FOREIGN_KEY,
    ArchiveEntry,
    read_contents,
    statements_of_entry,
    with_dependents,
)
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH, SEARCH_PATH
from snapshots.ddl.fingerprint import OWN_PUBLICATION
from storage.errors import SnapshotError

VIEW_ROWS, EVENT_TRIGGER = "MATERIALIZED VIEW DATA", "EVENT TRIGGER"
PRIVILEGES, SYSTEM_SCHEMAS = "ACL", ("pg_catalog", "information_schema")
# Entries that say something about another one, which they name by its type.
REMARKS = ("COMMENT", "SECURITY LABEL")
# The comment on Cutline's own publication records a node's settings before it was made read-only, and a restored
# database is not read-only.
OMITTED_COMMENT = re.compile(rf'PUBLICATION "?{OWN_PUBLICATION}"?')
# How many entries one pg_restore runs side by side, and how many objects it creates in one transaction otherwise: each
# holds a lock until the commit.
JOBS, OBJECTS_AT_ONCE = 4, 200
BUILD_OPTIONS = "-c maintenance_work_mem=128MB -c synchronous_commit=off"
# What pg_restore says of an error.
REFUSED, NOT_EXECUTED, COMMAND, CUT_OFF = "pg_restore: error: ", "could not execute query: ", "Command was: ", "..."
# libpq's own words about a lost session.
LOST = ("server closed the connection unexpectedly", "connection to server ", "no connection to the server")


@dataclass(frozen=True, slots=True)
class ArchiveDdl:
    """A shard's archive, a file in a private folder, and the entries that are restored; `writer` is pg_dump's version.

    `side_by_side` are those that pg_restore may run at once. The first entries drop what every new database has and the
    source had not.
    """

    path: Path
    writer: int
    entries: tuple[ArchiveEntry, ...]
    side_by_side: frozenset[int]
    search_path: str | None

    @property
    def views(self) -> list[str]:
        """The materialized views that were populated, in the order of their dependencies."""
        return [_qualify(entry) for entry in self.entries if _section_of(entry) == REFRESH]

    def without_dependents(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL for a restore of some tables, and what it leaves out."""
        keys = [entry for entry in self.entries if entry.kind == FOREIGN_KEY]
        views = [entry for entry in self.entries if _section_of(entry) == REFRESH]
        # A comment on a foreign key goes with it.
        left = with_dependents(self.entries, [entry.number for entry in (*keys, *views)])
        by_number = {entry.number: entry for entry in self.entries}
        names = [f"foreign key {show_name(_name_key(key, by_number))}" for key in keys]
        names += [f"rows of materialized view {show_name(_qualify(view))}" for view in views]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def without_system_grants(self) -> tuple[ArchiveDdl, list[str]]:
        """The DDL without privileges of PostgreSQL's own objects, which only a superuser grants; and what is left."""
        grants = [entry for entry in self.entries if entry.kind == PRIVILEGES and entry.schema in SYSTEM_SCHEMAS]
        left = {entry.number for entry in grants}
        names = [f"privileges of {show_name(entry.name)}" for entry in grants]
        return replace(self, entries=tuple(entry for entry in self.entries if entry.number not in left)), names

    def run(self, node: Node, section: str, watch: Watch) -> None:
        """Run a section's entries by pg_restore, or what it writes of them if it can't connect as the session does."""
        if not self._of(section):
            return
        with raising_unreachable(node), connect(node) as connection:
            building = replace(node, dsn=_with_options(node.dsn, connection.info.server_version))
            programs, access = restoring_programs(building, connection, self.writer)
            if access is not None:
                command = [str(programs.folder / "pg_restore"), "--dbname", access.conninfo, "--exit-on-error"]
                for part, options in self._parts(section, programs):
                    words = [*command, "--no-password", *options, *self._which(section, part)]
                    ended = run_group(words, access.environment, watch.on_silence)
                    if ended.returncode:
                        # A session that was lost with pg_restore's raises here.
                        connection.execute("SELECT")
                        raise self._failure(node, section, ended, part)
                return
        run_script(node, section, self._write_script(section, programs), watch)

    def write_scripts(self, node: Node) -> dict[str, str]:
        """The statements of all sections as scripts (raw text), as pg_restore writes them, by section."""
        with raising_unreachable(node), connect(node) as connection:
            programs, _ = restoring_programs(node, connection, self.writer)
        scripts = {section: self._write_script(section, programs) for section in (PRE_DATA, POST_DATA, EVENT_TRIGGERS)}
        return scripts | {REFRESH: "".join(f"REFRESH MATERIALIZED VIEW {view};\n" for view in self.views)}

    def _parts(self, section: str, programs: ClientPrograms) -> Iterator[tuple[list[ArchiveEntry], list[str]]]:
        """Yield the entries of one pg_restore after the other, with its options."""
        for is_first, options in (
            (True, [f"--jobs={JOBS}"]),
            (False, [f"--transaction-size={OBJECTS_AT_ONCE}"] if programs.has("--transaction-size") else []),
        ):
            if part := [
                entry
                for entry in self._of(section)
                if (section == POST_DATA and entry.number in self.side_by_side) == is_first
            ]:
                yield part, options

    def _of(self, section: str) -> list[ArchiveEntry]:
        return [entry for entry in self.entries if _section_of(entry) == section]

    def _which(self, section: str, entries: Iterable[ArchiveEntry]) -> list[str]:
        """The words that make pg_restore take these entries of the archive: a file lists them."""
        listed = self.path.with_name(f"{self.path.name}-{section}")
        listed.write_text("".join(f"{entry.number};\n" for entry in entries))
        return [f"--use-list={listed}", str(self.path)]

    def _failure(
        self, node: Node, section: str, ended: subprocess.CompletedProcess[str], part: Iterable[ArchiveEntry]
    ) -> SnapshotError:
        """The error for a pg_restore that did not end well."""
        said = ended.stderr.partition(REFUSED)[2].partition(f"\n{REFUSED}")[0]
        message, _, statement = said.partition(COMMAND)
        if ended.returncode < 0 or not message or any(text in message for text in LOST):
            return ProgramFailedError(
                f"node {node.id}: pg_restore did not end the {section} DDL: {' '.join(message.split()) or 'no output'}",
                hint="check that the server runs and that the machine has free memory, then repeat the command",
                details={"node": node.id, "section": section},
            )
        named, statement = _find_refused(self.path.read_bytes(), part, statement.strip())
        return refused_error(node, section, message.removeprefix(NOT_EXECUTED), statement, named)

    def _write_script(self, section: str, programs: ClientPrograms) -> str:
        """The script that pg_restore writes for a section, as raw text, without the lines of psql's restrict mode."""
        if not (chosen := self._of(section)):
            return ""
        guard, script = secrets.token_hex(16), self.path.with_name(f"{self.path.name}-{section}.sql")
        run_tool(
            "pg_restore", f"--file={script}", *self._which(section, chosen),
            # Older ones write no lines for psql's restrict mode.
            *([f"--restrict-key={guard}"] if programs.has("--restrict-key") else []), folder=programs.folder,
        )  # fmt: skip
        lines = raw_text(script.read_bytes()).split("\n")
        return "\n".join(line for line in lines if line not in (f"\\restrict {guard}", f"\\unrestrict {guard}"))


def read_archive(body: bytes, path: Path) -> ArchiveDdl:
    """Write the archive to the file `path`, which pg_restore reads, and choose what is restored of it."""
    path.write_bytes(body)
    contents = read_contents(body)
    search_path = next((entry.name for entry in contents.entries if entry.kind == SEARCH_PATH), None)
    entries = tuple(entry for entry in _with_sections(contents.entries) if not _is_omitted(entry))
    return ArchiveDdl(path, contents.writer, entries, find_side_by_side(body, entries), search_path)


def _is_omitted(entry: ArchiveEntry) -> bool:
    return entry.kind == SEARCH_PATH or (entry.kind in REMARKS and OMITTED_COMMENT.fullmatch(entry.name) is not None)


def _with_sections(entries: Iterable[ArchiveEntry]) -> Iterator[ArchiveEntry]:
    """Yield the entries; a remark or a privilege has no section and gets that of the entry before, as in pg_restore."""
    section = BEFORE_ROWS
    for entry in entries:
        section = entry.section if entry.section in (BEFORE_ROWS, AFTER_ROWS) else section
        yield replace(entry, section=section)


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


def _name_key(key: ArchiveEntry, entries: dict[int, ArchiveEntry]) -> str:
    """A foreign key's name and table: an entry's name is both, and it depends on the table."""
    tables = (entries[number] for number in key.dependencies if number in entries)
    for table in tables:
        if table.schema == key.schema and table.kind == "TABLE" and key.name.startswith(f"{table.name} "):
            return f"{quote_identifier(key.name.removeprefix(f'{table.name} '))} of {_qualify(table)}"
    return f"{quote_identifier(key.schema)}.{key.name}"


def _with_options(dsn: str, version: int) -> str:
    options = [conninfo_to_dict(dsn).get("options") or "", BUILD_OPTIONS]
    # pg_restore sets it from 17 on.
    options += ["-c transaction_timeout=0"] if version >= TRANSACTION_TIMEOUT_VERSION else []
    return make_conninfo(dsn, options=" ".join(map(str, options)).strip())


def _find_refused(body: bytes, entries: Iterable[ArchiveEntry], begin: str) -> tuple[str, str]:
    """The object and the whole text of the statement of which pg_restore shows the beginning."""
    shown = begin.removesuffix(CUT_OFF)
    for entry in entries if shown else ():
        statements = show_name(statements_of_entry(body, entry)).strip()
        if statements.startswith(shown):
            return show_name(f"{entry.kind} {f'{entry.schema}.' if entry.schema else ''}{entry.name}"), statements
    return "", begin
