"""Convert lines from one definition of a table to the layout of a later one, by whole columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cutline.columns.bytes_column import BytesColumn, Ints, gather
from cutline.columns.lines import NULL_MARK, TAB, find_byte
from cutline.fleet.tables.groups import Group, copy_line


@dataclass(frozen=True, slots=True)
class Conversion:
    """How to convert a line of `width` columns to the definition `number`.

    `fields` gives for each column of that definition the index of its field in the stored line; or, for a column that
    is newer than the row, its text, which is the same in all such rows. The partition of a multiset's row, one of
    `partitions`, is computed from the converted line.
    """

    number: int
    width: int
    fields: tuple[int | bytes, ...]
    is_multiset: bool = False
    partitions: int = 1

    @property
    def keeps_lines(self) -> bool:
        """Whether lines need no conversion."""
        return self.fields == tuple(range(self.width))

    @property
    def pieces(self) -> list[tuple[int, int] | bytes]:
        """The pieces of a converted line: ranges of adjacent fields (first, last), and texts."""
        pieces: list[tuple[int, int] | bytes] = []
        text = b""
        for place, field in enumerate(self.fields):
            if isinstance(field, int) and not text and pieces and pieces[-1][1] == field - 1:
                pieces[-1] = (int(pieces[-1][0]), field)
                continue
            text += b"\t" if place else b""
            if isinstance(field, bytes):
                text += field
                continue
            pieces += [text] if text else []
            pieces.append((field, field))
            text = b""
        return [*pieces, text + b"\n"]

    def after(self, earlier: Conversion) -> Conversion:
        """Compose: convert by `earlier`, then by this conversion."""
        fields = tuple(field if isinstance(field, bytes) else earlier.fields[field] for field in self.fields)
        return Conversion(self.number, earlier.width, fields, self.is_multiset, self.partitions)


def conversion(before: Group, after: Group) -> Conversion:
    """The conversion from a definition to the one that continues it.

    A row that is older than a column has the value that PostgreSQL stored for such rows.
    """
    places = {column.number: place for place, column in enumerate(before.columns)}
    fields: list[int | bytes] = []
    for column in after.columns:
        missing = NULL_MARK if column.missing is None else copy_line(column.missing)
        fields.append(places.get(column.number, missing))
    return Conversion(after.number, len(before.columns), tuple(fields), after.is_multiset, after.partitions)


def convert_lines(lines: BytesColumn, conversion: Conversion) -> BytesColumn:
    """Convert the lines to their new layout; raise ValueError if they don't have the old one."""
    count, pieces = len(lines), conversion.pieces
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    texts = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    source = np.concatenate([lines.data[first:last], np.frombuffer(texts, np.uint8)])
    bounds = _bounds(lines, conversion)
    starts = np.empty((count, len(pieces)), np.int64)
    lengths = np.empty((count, len(pieces)), np.int64)
    text_at = last - first
    for number, piece in enumerate(pieces):
        if isinstance(piece, bytes):
            starts[:, number], lengths[:, number] = text_at, len(piece)
            text_at += len(piece)
            continue
        begin, end = piece
        starts[:, number] = bounds[:, begin]
        lengths[:, number] = bounds[:, end + 1] - 1 - bounds[:, begin]
    joined = gather(source, starts.reshape(-1), lengths.reshape(-1))
    return BytesColumn(joined.data, np.ascontiguousarray(joined.offsets[:: len(pieces)]))


def _bounds(lines: BytesColumn, conversion: Conversion) -> Ints:
    """The offset in the lines' bytes at which each field begins; the last column is where the next line begins."""
    offsets = lines.offsets - lines.offsets[0]
    bounds = np.empty((len(lines), conversion.width + 1), np.int64)
    bounds[:, 0], bounds[:, -1] = offsets[:-1], offsets[1:]
    if conversion.width > 1:
        data = lines.data[int(lines.offsets[0]) : int(lines.offsets[-1])]
        tabs = find_byte(data, TAB)
        if len(tabs) != len(lines) * (conversion.width - 1):
            raise ValueError(f"rows of a table with {conversion.width} columns have another number of columns")
        bounds[:, 1:-1] = tabs.reshape(len(lines), conversion.width - 1) + 1
    return bounds
