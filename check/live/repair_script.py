"""The script that `check --live --repair-script` writes, for an operator to review, edit and run with psql.

A row that differs from the cut may be wrong in the database or in the snapshot, so each section ends with ROLLBACK. A
statement names the row version that was read (its ctid), and so changes nothing if the row has been written since.

A physical standby can't be written to. Its page is replaced if its primary writes the whole page into its WAL, which it
does with the first change of a page after a checkpoint (PostgreSQL manual, "full_page_writes"). Locking a row of the
page is such a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from cutline.check.live.report import INDEX, STANDBY_ROWS, UNREADABLE, LiveConflict, LiveReport, RowRepair
from cutline.fleet.table_names import quote_identifier
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
)


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
    yield f"SET client_encoding = '{encoding}'; SET standard_conforming_strings = on; BEGIN;"
    for repair in report.repairs:
        if repair.node == node:
            yield from _statements(repair)
    yield "ROLLBACK;"


def _statements(repair: RowRepair) -> Iterator[str]:
    """Yield the statement that makes the row of the database that of the cut, after comments with both lines."""
    group, table = repair.group, qualified(repair.group)
    if repair.is_too_long:
        yield comment(f"{group.name} {repair.place}: the row is too long for this script")
        return
    stored, live = _fields(repair.stored), _fields(repair.live)
    if stored is None and live is not None:
        yield comment(f"{group.name}: the snapshot lacks this row; it may be the snapshot that is wrong")
        yield f"DELETE FROM ONLY {table} WHERE {_condition(group, live, repair.place)};"
    elif stored is not None and live is None:
        names = ", ".join(identifier(column.name) for column in group.columns)
        yield comment(f"{group.name}: the database lacks this row")
        yield (f"INSERT INTO {table} ({names}) OVERRIDING SYSTEM VALUE VALUES ({', '.join(map(literal, stored))});")
    elif stored is not None and live is not None:
        changed = [
            (column, new, old) for column, new, old in zip(group.columns, stored, live, strict=True) if new != old
        ]
        for column, _, old in changed:
            yield comment(f"{group.name}: {column.name} is now {_shown(old)}")
        values = ", ".join(f"{identifier(column.name)} = {literal(new)}" for column, new, _ in changed)
        yield f"UPDATE ONLY {table} SET {values} WHERE {_condition(group, live, repair.place)};"


def _fields(line: bytes | None) -> list[bytes | None] | None:
    """Split a line in COPY's text format into values."""
    if line is None:
        return None
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


def _condition(group: Group, live: list[bytes | None], place: str) -> str:
    keys = zip(group.columns[: group.key_width], live, strict=False)
    parts = [f"{identifier(column.name)} = {literal(value)}" for column, value in keys]
    return " AND ".join([*parts, f"ctid = '{place}'"])


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
    yield f"REINDEX INDEX CONCURRENTLY {conflict.index};"
    yield comment("if a collation has changed, see also: ALTER COLLATION … REFRESH VERSION")
