"""Lines of one definition of a table, brought to the layout of a later one by whole columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from columns.bytes_column import BytesColumn, Ints, gather
from columns.lines import NULL_MARK, TAB
from fleet.tables.groups import Group, copy_line


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a line of `width` columns reads under the definition `number`.

    `fields` says of every column there is now which field of the stored line it is, or its text, the same for all
    rows that are older than the column. Of a multiset the partition, one of `partitions`, is that of the line.
    """

    number: int
    width: int
    fields: tuple[int | bytes, ...]
    is_multiset: bool = False
    partitions: int = 1

    @property
    def keeps_lines(self) -> bool:
        """Whether every line stays as it is."""
        return self.fields == tuple(range(self.width))

    @property
    def pieces(self) -> list[tuple[int, int] | bytes]:
        """What a line is put together from: fields that stay side by side, from the first to the last, and texts."""
        found: list[tuple[int, int] | bytes] = []
        text = b""
        for place, one in enumerate(self.fields):
            if isinstance(one, int) and not text and found and found[-1][1] == one - 1:
                found[-1] = (int(found[-1][0]), one)
                continue
            text += b"\t" if place else b""
            if isinstance(one, bytes):
                text += one
                continue
            found += [text] if text else []
            found.append((one, one))
            text = b""
        return [*found, text + b"\n"]

    def after(self, earlier: Conversion) -> Conversion:
        """The conversion that is `earlier`'s, and then this one."""
        fields = tuple(one if isinstance(one, bytes) else earlier.fields[one] for one in self.fields)
        return Conversion(self.number, earlier.width, fields, self.is_multiset, self.partitions)


def conversion(before: Group, after: Group) -> Conversion:
    """From a definition to the one that carried it on. A row older than a column has the value PostgreSQL gave it."""
    places = {column.number: place for place, column in enumerate(before.columns)}
    fields: list[int | bytes] = []
    for column in after.columns:
        missing = NULL_MARK if column.missing is None else copy_line(column.missing)
        fields.append(places.get(column.number, missing))
    return Conversion(after.number, len(before.columns), tuple(fields), after.is_multiset, after.partitions)


def convert_lines(lines: BytesColumn, conversion: Conversion) -> BytesColumn:
    """The lines in their new layout."""
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
    """Where in the lines' own bytes each field begins, and behind the last where the next line does."""
    offsets = lines.offsets - lines.offsets[0]
    bounds = np.empty((len(lines), conversion.width + 1), np.int64)
    bounds[:, 0], bounds[:, -1] = offsets[:-1], offsets[1:]
    if conversion.width > 1:
        data = lines.data[int(lines.offsets[0]) : int(lines.offsets[-1])]
        bounds[:, 1:-1] = np.flatnonzero(data == TAB).reshape(len(lines), conversion.width - 1) + 1
    return bounds
