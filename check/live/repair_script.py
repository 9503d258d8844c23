"""The script that `check --live --repair-script` writes, for an operator to review, edit and run with psql.

The script changes nothing until it is edited, and each section does nothing except in the database that it is for: psql
compares the server's system identifier and timeline and the database's oid, and skips the section otherwise. A row that
differs from the cut may be wrong in the database or in the snapshot, so a section for rows ends with ROLLBACK. REINDEX
CONCURRENTLY, CHECKPOINT and a full page in the WAL can't be rolled back. So the sections for indexes and for the pages
of standbys are skipped until the operator changes a psql variable in them.

A statement about a row names the row version that was read, and so changes nothing if the row has been written since:
by its place (ctid), which later versions can get, by its xmin, which they can't have, and by the table's file, which a
rewrite replaces. A row is deleted only if the comparison has proven that the cut has no such row; where the cut's line
is not known, there is only a comment.

A physical standby can't be written to. Its page is replaced if its primary writes the whole page into its WAL, which it
does with the first change of a page after a checkpoint (PostgreSQL manual, "full_page_writes"). Locking a row of the
page is such a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from cutline.check.live.report import INDEX, STANDBY_ROWS, UNREADABLE, LiveConflict, LiveReport, LiveVersion, RowRepair
from cutline.fleet.table_names import quote_identifier, unquote_identifier
from cutline.nodes.encodings import raw_text
from cutline.nodes.groups import Group
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from cutline.nodes.problems import comment

NULL = b"\\N"
FIELD_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
# COPY's escapes (PostgreSQL manual, COPY, "Text Format").
ESCAPED = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
# Names of psql variables.
HERE, APPLY = "cutline_here", "cutline_apply"
HEADER = (
    "This script was written by: snapshot check --live. Run it with psql, for example: psql -f FILE DSN. It changes"
    " nothing until you edit it.",
    "Each section names a node and its database, and does nothing anywhere else: it compares the system identifier and"
    " the timeline of the server, and the oid of the database. After a failover, repeat the check.",
    "Sections about rows run their statements and end with ROLLBACK. Decide for each row which side is right, delete"
    " the other statements, and replace ROLLBACK with COMMIT.",
    "Sections about an index or the pages of a standby can't be rolled back, so they do nothing until you replace"
    rf" \set {APPLY} no with \set {APPLY} yes in them.",
    "Take a snapshot before you run an edited script.",
    "Triggers of the tables run, and foreign keys apply: a DELETE can delete rows of other tables (ON DELETE CASCADE),"
    " and an INSERT can be refused because the row that it refers to comes later. To write only the rows themselves,"
    " let a superuser run it, with the line about session_replication_role: foreign keys are not checked then.",
)
# A user's psqlrc may have other values. psql must find the ends of strings also in sections that it skips, so the
# session's settings are those under which the strings were written; SQL_ASCII makes psql read bytes.
SETUP = (
    r"\set AUTOCOMMIT on",
    r"\set ON_ERROR_STOP on",
    r"\set ON_ERROR_ROLLBACK off",
    r"\encoding SQL_ASCII",
    "SET standard_conforming_strings = 'on';",
)
# A copy of the server that was promoted has the same system identifier, but another timeline. A function that a standby
# refuses is not called there.
GUARD = """SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN false ELSE
    (SELECT system_identifier = {system} FROM pg_catalog.pg_control_system())
    AND (SELECT oid = {oid} FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) = '{timeline:08X}'
    END AS {here} \\gset"""
# The settings under which values were read, as far as they decide how a value is parsed, and row_security: with off, a
# statement fails if policies would hide rows from it.
PARSING = (
    "standard_conforming_strings", "datestyle", "intervalstyle", "timezone", "lc_monetary", "xmloption", "array_nulls",
    "transform_null_equals", "row_security",
)  # fmt: skip
# Oids below this are PostgreSQL's own types: the search_path of the session always has their operators.
OWN_TYPES_END = 16384
QUOTED_NAME = re.compile(r'"(?:[^"]|"")*"')


def repair_script(report: LiveReport) -> str:
    """Return the script, as raw text (nodes/encodings.py)."""
    sections = [_row_section(report, node) for node in dict.fromkeys(repair.node for repair in report.repairs)]
    of_index: dict[tuple[str, str], list[LiveConflict]] = {}
    for conflict in report.conflicts:
        if conflict.kind in (STANDBY_ROWS, UNREADABLE):
            sections.append(_page_section(report, conflict))
        elif conflict.kind == INDEX:
            place = report.primary_of(conflict.node), conflict.index or ""
            of_index.setdefault(place, []).append(conflict)
    sections += [_index_section(primary, index, some) for (primary, index), some in of_index.items()]
    lines = [*map(comment, HEADER), *SETUP]
    for number, section in enumerate(sections, 1):
        lines += _section_lines(report, number, section)
    if not sections:
        lines.append(comment("Nothing to repair was found."))
    return "\n".join(lines) + "\n"


class _Section(Struct, frozen=True):
    """Statements for the database of the primary `node`, and comments before and after them.

    `can_roll_back`: the statements end with ROLLBACK; otherwise, the operator must allow them by a variable.
    """

    node: str
    about: list[str]
    statements: list[str]
    can_roll_back: bool = False
    after: str = ""


def _section_lines(report: LiveReport, number: int, section: _Section) -> Iterator[str]:
    identity = report.identities[section.node]
    name = f"section {number}, for node {section.node}"
    yield ""
    yield comment(f"{name}, database {identity.database}: {section.about[0]}")
    yield from map(comment, section.about[1:])
    if section.statements:
        # If the query fails, an earlier section's result must not count.
        yield rf"\set {HERE} false"
        yield GUARD.format(
            system=int(identity.system_identifier),
            oid=identity.database_oid,
            timeline=identity.timeline,
            here=HERE,
        )
        if not section.can_roll_back:
            yield rf"\set {APPLY} no"
        yield rf"\if :{HERE}"
        if section.can_roll_back:
            yield from section.statements
        else:
            yield rf"\if :{APPLY}"
            yield from section.statements
            yield r"\else"
            yield rf"\echo '{name}: {APPLY} is no, so nothing was done'"
            yield r"\endif"
        yield r"\else"
        yield rf"\echo '{name}: this is another server or database, so nothing was done'"
        yield r"\endif"
    if section.after:
        yield comment(section.after)


def _row_section(report: LiveReport, node: str) -> _Section:
    encoding = report.encodings.get(node, "UTF8")
    settings = "".join(f" SET {name} = {literal(PINNED_SETTINGS[name].encode())};" for name in PARSING)
    lines = [
        f"SET client_encoding = '{encoding}';{settings} BEGIN;",
        "-- SET LOCAL session_replication_role = replica;",
    ]
    noted = ""
    for repair in report.repairs:
        if repair.node != node:
            continue
        if repair.unproven and repair.group.name != noted:
            noted = repair.group.name
            lines.append(
                comment(
                    f"{noted}: the application may have written the following rows since the snapshot:"
                    f" {repair.unproven}"
                )
            )
        lines += _statements(repair)
    lines.append("ROLLBACK;")
    about = f"makes its rows those of snapshot {report.snapshot}, increment {report.increment}"
    return _Section(node, [about], lines, can_roll_back=True)


def _statements(repair: RowRepair) -> Iterator[str]:
    """Yield the statements that turn rows of the database into those of the cut, with comments that show the rows."""
    group, table = repair.group, qualified(repair.group)
    versions = list(repair.versions)
    if repair.why:
        held = f"; the database has {_shown_line(versions[0].line)}" if versions else ""
        yield comment(f"{group.name}{_key_text(repair)}: the snapshot's row is not known: {repair.why}{held}")
        return
    if repair.more and not versions:
        yield comment(
            f"{group.name}{_key_text(repair)}: the database has {_amount(repair.more)} that the snapshot lacks, but"
            " their places are not known, because the table is copied whole: compare them yourself"
        )
        if not group.is_multiset and repair.stored is not None:
            yield comment(f"the snapshot has {_shown_line(repair.stored)}")
            return
    # Lines without a key that differ are not versions of the same row.
    updates = 0 if group.is_multiset else min(repair.left, len(versions))
    for version in versions[updates:]:
        yield comment(
            f"{group.name}: the snapshot lacks this row, or has it less often; the snapshot may be wrong:"
            f" {_shown_line(version.line)}"
        )
        yield f"DELETE FROM ONLY {table} WHERE {_condition(group, version)};"
    if (unknown := repair.more - len(versions)) > 0 and versions:
        yield comment(
            f"{group.name}: {_amount(unknown)} more that the snapshot lacks: repeat the check after this script"
        )
    if repair.stored is None:
        return
    for version in versions[:updates]:
        yield from _update(repair, version, repair.stored)
    if count := repair.left - updates:
        lacks = "this row, or has it less often" if count == 1 else f"{_amount(count)} with these values"
        yield comment(f"{group.name}: the database lacks {lacks}")
        yield _insert(group, repair.stored, count)


def _amount(count: int) -> str:
    return f"{count:,} {'row' if count == 1 else 'rows'}"


def _key_text(repair: RowRepair) -> str:
    """Return the key for a comment, if there is one."""
    line = next((version.line for version in repair.versions), repair.stored)
    if line is None or repair.group.is_multiset:
        return ""
    return " " + ", ".join(map(_shown, fields_of(line, repair.group)[: repair.group.key_width]))


def _update(repair: RowRepair, version: LiveVersion, stored: bytes) -> Iterator[str]:
    group, table = repair.group, qualified(repair.group)
    fields = zip(group.columns, fields_of(stored, group), fields_of(version.line, group), strict=True)
    changed = [(column, new, old) for column, new, old in fields if new != old]
    if not changed:
        yield comment(f"{group.name} {version.place}: this row is equal by now")
        return
    for column, _, old in changed:
        yield comment(f"{group.name}: {column.name} is now {_shown(old)}")
    fixed = [column.name for column, *_ in changed if column.name in repair.fixed]
    for name in fixed:
        yield comment(f"{group.name}: {name} is GENERATED ALWAYS, and refuses an UPDATE unless that is changed")
        yield f"ALTER TABLE {table} ALTER COLUMN {identifier(name)} SET GENERATED BY DEFAULT;"
    values = ", ".join(f"{identifier(column.name)} = {literal(new)}" for column, new, _ in changed)
    yield f"UPDATE ONLY {table} SET {values} WHERE {_condition(group, version)};"
    for name in fixed:
        yield f"ALTER TABLE {table} ALTER COLUMN {identifier(name)} SET GENERATED ALWAYS;"


def _insert(group: Group, stored: bytes, count: int) -> str:
    """Return the statement that inserts a line `count` times: a table may lack millions of equal lines."""
    names = ", ".join(identifier(column.name) for column in group.columns)
    values = ", ".join(map(literal, fields_of(stored, group)))
    table = f"{qualified(group)} ({names}) OVERRIDING SYSTEM VALUE" if group.columns else qualified(group)
    if count > 1:
        selected = f"SELECT {values} FROM" if values else "SELECT FROM"
        return f"INSERT INTO {table} {selected} pg_catalog.generate_series(1, {count});"
    return f"INSERT INTO {table} {f'VALUES ({values})' if group.columns else 'DEFAULT VALUES'};"


def fields_of(line: bytes, group: Group) -> list[bytes | None]:
    """Split a line in COPY's text format into the values of the group's columns; a group without columns has none."""
    if not group.columns:
        return []
    fields = line.removesuffix(b"\n").split(b"\t")
    return [None if field == NULL else FIELD_ESCAPE.sub(_unescape, field) for field in fields]


def _unescape(match: re.Match[bytes]) -> bytes:
    return ESCAPED.get(match[1], match[1])


def identifier(name: str) -> str:
    """Quote an identifier; other than ASCII characters are escaped, because values are in the server's encoding."""
    if name.isascii():
        return quote_identifier(name)
    points = (character if character.isascii() else f"\\+{ord(character):06X}" for character in name)
    return 'U&"' + "".join("\\\\" if point == "\\" else point.replace('"', '""') for point in points) + '"'


def qualified(group: Group) -> str:
    """Return the table's quoted name for the script."""
    return f"{identifier(group.schema)}.{identifier(group.table)}"


def literal(value: bytes | None) -> str:
    """Return a value as a string constant with standard_conforming_strings, as raw text."""
    return "NULL" if value is None else "'" + raw_text(value).replace("'", "''") + "'"


def _shown(value: bytes | None) -> str:
    return "NULL" if value is None else value[:200].decode(errors="backslashreplace")


def _shown_line(line: bytes) -> str:
    text = line.removesuffix(b"\n")
    return text[:200].decode(errors="backslashreplace") + ("…" if len(text) > 200 else "")


def _condition(group: Group, version: LiveVersion) -> str:
    """Return the condition that only this row version meets."""
    keys = zip(group.columns[: group.key_width], fields_of(version.line, group), strict=False)
    parts = [
        f"{identifier(column.name)} = {literal(value)}"
        for column, value in keys
        if value is not None and column.type_oid < OWN_TYPES_END
    ]
    parts += [f"ctid = '{version.place}'", f"xmin = '{version.xmin}'"]
    parts += [f"pg_catalog.pg_relation_filenode(tableoid) = {version.file}"] if version.file is not None else []
    return " AND ".join(parts)


def escaped(name: str) -> str:
    """Return a quoted, qualified name as `identifier` quotes its parts."""
    return QUOTED_NAME.sub(lambda part: identifier(unquote_identifier(part[0])), name)


def _page_section(report: LiveReport, conflict: LiveConflict) -> _Section:
    standby = conflict.other_node or conflict.node
    primary = report.primary_of(standby)
    if standby == primary:
        return _Section(
            primary,
            [
                f"{conflict.group}, {conflict.detail}",
                "A page of a primary can't be repaired by SQL: fail over to a standby that can read it; or empty the"
                " table, and load its rows as of the newest restore point:"
                f" snapshot restore NAME --node {primary} --group SCHEMA.TABLE --data-only",
            ],
            [],
        )
    about = [
        f"sends pages to its standby {standby} again: {conflict.group}, {conflict.detail}",
        "If the standby is right, fail over to it. If its primary is right, rebuild the standby, or let this section"
        " make the primary send these pages again.",
    ]
    table = report.quoted.get(conflict.group or "", "")
    if not table or not conflict.pages:
        return _Section(primary, [about[0], "No pages are known that could be sent: rebuild the standby."], [])
    lines = ["CHECKPOINT;"]
    for page in conflict.pages:
        lines.append(
            f"SELECT count(*) FROM (SELECT FROM ONLY {table} WHERE ctid >= '({page},0)' AND ctid < '({page + 1},0)'"
            " LIMIT 1 FOR KEY SHARE) AS locked;"
        )
    after = (
        "Then repeat: snapshot check --live. A page on which the primary has no rows, or whose long values are damaged,"
        " is not sent: then rebuild the standby."
    )
    return _Section(primary, about, lines, after=after)


def _index_section(primary: str, index: str, conflicts: Sequence[LiveConflict]) -> _Section:
    return _Section(
        primary,
        [
            "rebuilds an index, also on the standbys",
            *(f"on {conflict.node}: {conflict.detail}" for conflict in conflicts),
        ],
        [f"REINDEX INDEX CONCURRENTLY {escaped(index)};"],
        after="If a collation has changed, see also: ALTER COLLATION … REFRESH VERSION",
    )
