"""The script that `check --live --repair-script` writes, for an operator to review, edit and run with psql.

A row that differs from the cut may be wrong in the database or in the snapshot, so each section ends with ROLLBACK. A
statement names the row version that was read, and so changes nothing if the row has been written since: by its place
(ctid), which later versions can get, by its xmin, which they can't have, and by the table's file, which a rewrite
replaces. A row is deleted only if the comparison has proven that the cut has no such row; where the cut's line is not
known, there is only a comment.

A physical standby can't be written to. Its page is replaced if its primary writes the whole page into its WAL, which it
does with the first change of a page after a checkpoint (PostgreSQL manual, "full_page_writes"). Locking a row of the
page is such a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cutline.check.live.report import INDEX, STANDBY_ROWS, UNREADABLE, LiveConflict, LiveReport, LiveVersion, RowRepair
from cutline.fleet.table_names import quote_identifier, unquote_identifier
from cutline.nodes.connections import PINNED_SETTINGS
from cutline.nodes.encodings import raw_text
from cutline.nodes.groups import Group
from cutline.nodes.problems import comment

NULL = b"\\N"
FIELD_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)
# COPY's escapes (PostgreSQL manual, COPY, "Text Format").
ESCAPED = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
HEADER = (
    "This script was written by: snapshot check --live. It changes nothing until you edit it.",
    "Decide for each row which side is right. Sections for a primary end with ROLLBACK: replace it with COMMIT.",
    "Take a snapshot before you run it.",
    "Triggers of the tables run, and foreign keys apply: a DELETE can delete rows of other tables (ON DELETE CASCADE),"
    " and an INSERT can be refused because the row that it refers to comes later. To write only the rows themselves,"
    " let a superuser run it, with the line about session_replication_role: foreign keys are not checked then.",
)
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
    lines = [comment(text) for text in HEADER]
    for node in dict.fromkeys(repair.node for repair in report.repairs):
        lines += _node_section(report, node)
    for conflict in report.conflicts:
        if conflict.kind in (STANDBY_ROWS, UNREADABLE):
            lines += _page_section(report, conflict)
        elif conflict.kind == INDEX:
            lines += _index_section(conflict)
    if len(lines) == len(HEADER):
        lines.append(comment("Nothing to repair was found."))
    return "\n".join(lines) + "\n"


def _place(report: LiveReport, node: str) -> str:
    return f"on node {node}, in database {report.databases.get(node, '')}"


def _node_section(report: LiveReport, node: str) -> Iterator[str]:
    encoding = report.encodings.get(node, "UTF8")
    yield ""
    yield comment(
        f"{_place(report, node)}, to make its rows those of snapshot {report.snapshot}, increment {report.increment}:"
    )
    settings = "".join(f" SET {name} = {literal(PINNED_SETTINGS[name].encode())};" for name in PARSING)
    yield f"SET client_encoding = '{encoding}';{settings} BEGIN;"
    yield "-- SET LOCAL session_replication_role = replica;"
    noted = ""
    for repair in report.repairs:
        if repair.node != node:
            continue
        if repair.unproven and repair.group.name != noted:
            noted = repair.group.name
            yield comment(
                f"{noted}: the application may have written the following rows since the snapshot: {repair.unproven}"
            )
        yield from _statements(repair)
    yield "ROLLBACK;"


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
    for _ in range(repair.left - updates):
        yield comment(f"{group.name}: the database lacks this row, or has it less often")
        yield _insert(group, repair.stored)


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


def _insert(group: Group, stored: bytes) -> str:
    if not group.columns:
        return f"INSERT INTO {qualified(group)} DEFAULT VALUES;"
    names = ", ".join(identifier(column.name) for column in group.columns)
    values = ", ".join(map(literal, fields_of(stored, group)))
    return f"INSERT INTO {qualified(group)} ({names}) OVERRIDING SYSTEM VALUE VALUES ({values});"


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


def _page_section(report: LiveReport, conflict: LiveConflict) -> Iterator[str]:
    shard = next(one for one in report.shards if conflict.node in (one.shard, *one.standbys))
    standby = conflict.other_node or conflict.node
    yield ""
    if standby == shard.shard:
        what = f"{_place(report, standby)}: {conflict.group}, {conflict.detail}"
        yield comment(
            f"{what}. A page of a primary can't be repaired by SQL: fail over to a standby that can read it; or restore"
            " the table: snapshot restore NAME --group SCHEMA.TABLE"
        )
        return
    yield comment(
        f"standby {standby}: {conflict.group}, {conflict.detail}. If the standby is right, fail over to it. If its"
        " primary is right, rebuild the standby, or let the primary send these pages again,"
        f" {_place(report, shard.shard)}:"
    )
    table = report.quoted.get(conflict.group or "", "")
    if table and conflict.pages:
        yield "CHECKPOINT;"
    for page in conflict.pages:
        yield (
            f"SELECT count(*) FROM (SELECT FROM ONLY {table} WHERE ctid >= '({page},0)' AND ctid < '({page + 1},0)'"
            " LIMIT 1 FOR KEY SHARE) AS locked;"
        )
    yield comment(
        "then repeat: snapshot check --live. A page on which the primary has no rows, or whose long values are damaged,"
        " is not sent: then rebuild the standby"
    )


def _index_section(conflict: LiveConflict) -> Iterator[str]:
    yield ""
    yield comment(f"on the primary of {conflict.node}, which rebuilds it on the standbys as well: {conflict.detail}")
    yield f"REINDEX INDEX CONCURRENTLY {escaped(conflict.index or '')};"
    yield comment("if a collation has changed, see also: ALTER COLLATION … REFRESH VERSION")
