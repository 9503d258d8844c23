"""The rows of extensions' configuration tables, as entries of a restore's DDL.

They follow the tables: some name them (regclass). A row of the snapshot replaces one that its extension has made with
the same key. What the server refuses is a refusal as of any other entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fleet.nodes.encodings import raw_text
from restore.ddl.ddl import Ddl, DdlEntry
from snapshots.ddl.archive import EXTENSION
from snapshots.globals.extension_rows import FilledTable

# As pg_dump calls such entries.
ROWS = "TABLE DATA"
# Entries of archives have lower numbers, those of the database itself higher ones (restore/ddl/running.py).
FIRST_NUMBER = 1 << 39


def with_extension_rows(ddl: Ddl, filled: Iterable[FilledTable]) -> Ddl:
    """The DDL which fills these tables, too."""
    extensions = {entry.name: entry.number for entry in ddl.pre_data if entry.kind == EXTENSION}
    entries = [
        DdlEntry(
            number,
            ROWS,
            one.table.schema,
            one.table.name,
            raw_text(one.statements),
            (extensions[one.table.extension],) if one.table.extension in extensions else (),
        )
        for number, one in enumerate(filled, FIRST_NUMBER)
    ]
    return replace(ddl, pre_data=(*ddl.pre_data, *entries))
