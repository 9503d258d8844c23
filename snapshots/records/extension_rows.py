"""The header of the object with the rows of extensions' configuration tables: its first line.

The object is a script for psql, compressed. Its first line is a comment with this document; the statements of the
tables follow, one after the other, in the encoding of the shard's database. They are written for a
server with standard_conforming_strings on.
"""

from __future__ import annotations

from cutline.fleet.record import Count, Record

EXTENSION_ROWS_FORMAT = "cutline/extension-rows/1"


class ExtensionTable(Record, frozen=True, kw_only=True):
    """A table that `extension` has marked as its configuration; `size` is that of its statements in bytes."""

    extension: str
    schema: str
    name: str
    rows: Count
    size: Count


class ExtensionSequence(Record, frozen=True, kw_only=True):
    """A sequence that `extension` has marked, too. Its value at the cut is among those of all sequences."""

    extension: str
    schema: str
    name: str


class ExtensionRows(Record, frozen=True, kw_only=True, tag_field="schema", tag=EXTENSION_ROWS_FORMAT):
    """The document: the tables that have rows, referenced tables first, and the marked sequences."""

    tables: tuple[ExtensionTable, ...]
    sequences: tuple[ExtensionSequence, ...] = ()
