"""The rows of extensions' configuration tables, as entries of a restore's DDL.

They run after the tables are created, because some rows name tables (regclass). A row of the snapshot replaces the
extension's own row with the same key. The server may refuse an entry like any other. The extensions' sequences are set
with all others at the end; as entries they are also among the refused statements if their extension is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.tables.names import quote_identifier
from cutline.restore.ddl.ddl import PRE_DATA, ROWS, Ddl, DdlEntry, Refusal
from cutline.snapshots.ddl.archive import EXTENSION
from cutline.snapshots.globals.extension_rows import ExtensionsOfShard
from cutline.snapshots.records.commit import Sequence

# As pg_dump calls such entries.
SEQUENCE_SET = "SEQUENCE SET"
# Entries of archives have lower numbers, those of the database itself higher ones (restore/ddl/running.py).
FIRST_NUMBER = 1 << 39


def with_extension_rows(ddl: Ddl, found: ExtensionsOfShard, sequences: Iterable[Sequence]) -> Ddl:
    """The DDL, with statements that fill these tables and set these of the `sequences`."""
    extensions = {entry.name: entry.number for entry in ddl.pre_data if entry.kind == EXTENSION}
    values = {(sequence.schema, sequence.name): sequence for sequence in sequences}
    entries = [
        (one.table.extension, ROWS, one.table.schema, one.table.name, raw_text(one.statements)) for one in found.tables
    ]
    entries += [
        (one.extension, SEQUENCE_SET, one.schema, one.name, set_statement(values[one.schema, one.name]))
        for one in found.sequences
        if (one.schema, one.name) in values
    ]
    numbered = [
        DdlEntry(number, kind, schema, name, text, (extensions[extension],) if extension in extensions else ())
        for number, (extension, kind, schema, name, text) in enumerate(entries, FIRST_NUMBER)
    ]
    return replace(ddl, pre_data=(*ddl.pre_data, *numbered))


def lost_rows(reason: str) -> Refusal:
    """What a restore reports of a shard's rows that can't be read from the store."""
    return Refusal(DdlEntry(FIRST_NUMBER, ROWS, "", "of extensions", ""), PRE_DATA, reason, "")


def set_statement(sequence: Sequence) -> str:
    """SQL that gives the sequence its value, if the role may do that."""
    name = f"{quote_identifier(sequence.schema)}.{quote_identifier(sequence.name)}".replace("'", "''")
    return (
        f"SELECT pg_catalog.setval(c.oid, {sequence.last_value}, {str(sequence.is_called).lower()})"
        f" FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass('{name}')"
        " AND pg_catalog.has_sequence_privilege(c.oid, 'UPDATE');\n"
    )
