"""The fields of many lines of one table, and the comparisons that their text decides.

A field is as COPY prints it with Cutline's settings (nodes/pinned_settings.py): dates in ISO order, times in UTC. A
comparison is decided only where both values have the usual form.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_flags
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, gather
from cutline.columns.fields import read_integers
from cutline.columns.lines import NEWLINE, NULL_MARK, TAB, find_byte

# How the text of a type's values is compared.
Family: TypeAlias = Literal["integer", "number", "text", "date", "timestamp"]
Signs = npt.NDArray[np.int8]
DATE_LENGTH, YEAR_LENGTH, DASH = 10, 4, ord("-")
USUAL: dict[Family, re.Pattern[str]] = {
    "integer": re.compile(r"-?[0-9]{1,18}"),
    # A double holds every number of up to 15 digits without loss, and rounding keeps the order of others.
    "number": re.compile(r"-?[0-9]+(\.[0-9]+)?"),
    "text": re.compile(r"[ -\[\]-~]*"),
    "date": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "timestamp": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?"),
}
EXACT_LENGTH = 15


class FieldsMissingError(ValueError):
    """So many of the `lines` have another number of fields than their table has columns."""

    def __init__(self, lines: int) -> None:
        super().__init__(lines)
        self.lines = lines


class RowFields:
    """The fields of lines of a table of `width` columns; raises FieldsMissingError."""

    def __init__(self, lines: BytesColumn, width: int) -> None:
        first, last = int(lines.offsets[0]), int(lines.offsets[-1])
        self._data, offsets = lines.data[first:last], lines.offsets - first
        ends = offsets[1:].copy()
        filled = np.flatnonzero(ends > offsets[:-1])
        ends[filled] -= self._data[ends[filled] - 1] == NEWLINE
        tabs = find_byte(self._data, TAB)
        if not _are_in_lines(tabs, offsets, width):
            counts = np.diff(np.searchsorted(tabs, offsets))
            raise FieldsMissingError(int(np.count_nonzero(counts != width - 1)))
        self._starts, self._ends = offsets[:-1], ends
        self._tabs = tabs.reshape(len(lines), width - 1)
        self._nulls: dict[int, Flags] = {}

    def __len__(self) -> int:
        return len(self._starts)

    def values(self, place: int) -> BytesColumn:
        """Return the fields of a column."""
        return self._between(place, place)

    def nulls(self, place: int) -> Flags:
        """Return which fields of a column are NULL."""
        if place not in self._nulls:
            starts = self._start(place)
            found = np.zeros(len(self), np.bool_)
            short = np.flatnonzero(self._end(place) - starts == len(NULL_MARK))
            at = starts[short]
            found[short] = (self._data[at] == NULL_MARK[0]) & (self._data[at + 1] == NULL_MARK[1])
            self._nulls[place] = found
        return self._nulls[place]

    def joined(self, places: tuple[int, ...]) -> BytesColumn:
        """Return the fields of several columns, in this order, with a TAB between them."""
        if places == tuple(range(places[0], places[0] + len(places))):
            return self._between(places[0], places[-1])
        # Lines with several fields contain a TAB.
        tab = self._tabs[:, 0]
        starts, lengths = list[Ints](), list[Ints]()
        for number, place in enumerate(places):
            if number:
                starts.append(tab)
                lengths.append(np.ones(len(self), np.int64))
            starts.append(self._start(place))
            lengths.append(self._end(place) - starts[-1])
        pieces = gather(self._data, np.stack(starts, 1).reshape(-1), np.stack(lengths, 1).reshape(-1))
        return BytesColumn(pieces.data, np.ascontiguousarray(pieces.offsets[:: len(starts)]))

    def _between(self, first: int, last: int) -> BytesColumn:
        starts = self._start(first)
        return gather(self._data, starts, self._end(last) - starts)

    def _start(self, place: int) -> Ints:
        return self._starts if place == 0 else self._tabs[:, place - 1] + 1

    def _end(self, place: int) -> Ints:
        return self._ends if place == self._tabs.shape[1] else self._tabs[:, place]


def _are_in_lines(tabs: Ints, offsets: Ints, width: int) -> bool:
    """Whether each line has `width` fields: the TABs are as many, and the first and last of each line are in it."""
    if len(tabs) != (len(offsets) - 1) * (width - 1):
        return False
    if width == 1:
        return True
    first, last = tabs[:: width - 1], tabs[width - 2 :: width - 1]
    return bool((first >= offsets[:-1]).all() and (last < offsets[1:]).all())


def compare(fields: BytesColumn, other: str | BytesColumn, family: Family) -> tuple[Signs, Flags]:
    """Compare fields with a constant of the usual form, or with as many other fields; none is NULL.

    Returns -1, 0 or 1 for each field, and which of these comparisons are decided.
    """
    if family in ("integer", "number"):
        try:
            return _compare_integers(fields, other) if family == "integer" else _compare_numbers(fields, other)
        except ValueError:
            # A value has another form.
            return np.zeros(len(fields), np.int8), np.zeros(len(fields), np.bool_)
    left = fields.to_large_arrow()
    right = pa.scalar(other.encode(), pa.large_binary()) if isinstance(other, str) else other.to_large_arrow()
    sign = to_flags(pc.greater(left, right)).astype(np.int8) - to_flags(pc.less(left, right)).astype(np.int8)
    is_decided = np.ones(len(fields), np.bool_)
    if family != "text":
        is_decided &= _are_usual_times(fields, family)
        if not isinstance(other, str):
            is_decided &= _are_usual_times(other, family)
    return sign, is_decided


def _compare_integers(fields: BytesColumn, other: str | BytesColumn) -> tuple[Signs, Flags]:
    right = int(other) if isinstance(other, str) else read_integers(other)
    return _signs(read_integers(fields), right), np.ones(len(fields), np.bool_)


def _compare_numbers(fields: BytesColumn, other: str | BytesColumn) -> tuple[Signs, Flags]:
    if not isinstance(other, str):
        return np.zeros(len(fields), np.int8), np.zeros(len(fields), np.bool_)
    values = pc.cast(pc.cast(fields.to_large_arrow(), pa.large_string()), pa.float64()).to_numpy()
    sign = _signs(values, float(other))
    is_exact = (fields.lengths <= EXACT_LENGTH) & (len(other) <= EXACT_LENGTH)
    return sign, ~np.isnan(values) & ((sign != 0) | is_exact)


def _signs(values: npt.NDArray[np.generic], other: object) -> Signs:
    above: Flags = values > other  # type: ignore[operator]  # both are numbers
    below: Flags = values < other  # type: ignore[operator]  # both are numbers
    return above.astype(np.int8) - below.astype(np.int8)


def _are_usual_times(fields: BytesColumn, family: Family) -> Flags:
    """Whether the order of the texts is that of the times: years of four digits, AD, and not infinity."""
    lengths, starts = fields.lengths, fields.offsets[:-1]
    is_usual = lengths == DATE_LENGTH if family == "date" else lengths > DATE_LENGTH
    at = np.flatnonzero(is_usual)
    is_usual[at] = (fields.data[starts[at] + YEAR_LENGTH] == DASH) & (
        fields.data[starts[at] + lengths[at] - 1] != ord("C")
    )
    return is_usual
