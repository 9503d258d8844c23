"""When the objects of a chain were last read, in a record that stays small however long the chain becomes.

Two facts bound the time at which an object was last read. The entry of its increment says when the increments up to
this increment were first read. The part of its *place*, a number that only its key determines, says when all objects in
that part were last reread. The later of both counts. To keep the record small, neighbours are merged, and the older of
their times counts: a merged time is never later than the truth. Times are in milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise, takewhile

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from cutline.columns.bytes_column import Ints, from_list, xxhash64
from cutline.fleet.record import Time
from cutline.snapshots.records.operation_records import (
    PLACES,
    READ_ENTRIES_MAX,
    ReadIncrement,
    ReadPart,
    ReadTimes,
)

EPOCH, MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)
# A rotation finishes in this part of the time that rereading may take, so that a check that comes late harms nothing.
ROTATION_PART = 0.8


def milliseconds_of(moment: datetime) -> int:
    """Return the time in milliseconds since 1970, rounded down."""
    return (moment - EPOCH) // MILLISECOND


def moment_of(milliseconds: int) -> datetime:
    """Return the time of so many milliseconds since 1970, in UTC."""
    return EPOCH + milliseconds * MILLISECOND


def hashes_of(keys: Sequence[str]) -> Ints:
    """Return the XXH64 of each key, as signed numbers."""
    return xxhash64(from_list([key.encode() for key in keys])).view(np.int64)


def places_of(hashes: Ints) -> Ints:
    """Return the place of each object, from 0 to PLACES - 1; `hashes` are those of the keys."""
    return (hashes.view(np.uint64) >> np.uint64(32)).astype(np.int64)


class PlaceRange(Struct, frozen=True, order=True):
    """The places from `low` up to, but not including, `high`."""

    low: int
    high: int


def subset_range(number: int, count: int) -> PlaceRange:
    """Return the places of subset `number` of `count` (from 1): the same objects each time, however long the chain."""
    return PlaceRange((number - 1) * PLACES // count, number * PLACES // count)


class _Entry(Struct, frozen=True):
    """Everything up to `bound`, after the entry before, has been read since `at`."""

    bound: int
    at: int


class LastReads(Struct, frozen=True):
    """The times in a ReadTimes. The bound of a part is exclusive, that of an increment inclusive."""

    parts: tuple[_Entry, ...]
    increments: tuple[_Entry, ...]

    @classmethod
    def of(cls, record: ReadTimes) -> LastReads:
        """Return the times in a record; raise ValueError unless its entries are in order and cover every place."""
        parts = tuple(_Entry(part.below, _parsed(part.at)) for part in record.parts)
        increments = tuple(_Entry(entry.increment, _parsed(entry.at)) for entry in record.increments)
        for entries in (parts, increments):
            if any(after.bound <= before.bound for before, after in pairwise(entries)):
                raise ValueError("its entries are not in order")
        if parts[-1].bound != PLACES:
            raise ValueError("its parts do not cover every place")
        return cls(parts, increments)

    @classmethod
    def of_full(cls, increment: int, at: int) -> LastReads:
        """Return the times after a check has read all objects up to the increment."""
        return cls((_Entry(PLACES, at),), (_Entry(increment, at),))

    @property
    def increment(self) -> int:
        """The last increment of which objects were read."""
        return self.increments[-1].bound

    @property
    def newest(self) -> int:
        """The newest time."""
        return max(entry.at for entry in (*self.parts, *self.increments))

    def with_increments(self, increment: int, at: int) -> LastReads:
        """Return the times after the objects of increments after the last known, up to this increment, were read."""
        return replace(self, increments=(*self.increments, _Entry(increment, at)))

    def with_part(self, read: PlaceRange, at: int) -> LastReads:
        """Return the times after all objects in these places, up to the last known increment, were reread."""
        if read.low >= read.high:
            return self
        parts: list[_Entry] = []
        low = 0
        for part in self.parts:
            if low < read.low:
                parts.append(_Entry(min(part.bound, read.low), part.at))
            if low < read.high <= part.bound:
                parts.append(_Entry(read.high, at))
            if part.bound > read.high:
                parts.append(part)
            low = part.bound
        return replace(self, parts=tuple(parts))

    def last_read(self, places: Ints, increments: Ints) -> Ints:
        """Return the time since which each object has been read; no increment may be later than the last known."""
        part = np.searchsorted(_bounds(self.parts), places, side="right")
        entry = np.searchsorted(_bounds(self.increments), increments, side="left")
        return np.maximum(_times(self.parts)[part], _times(self.increments)[entry])

    def compacted(self) -> LastReads:
        """Return the times in at most READ_ENTRIES_MAX parts and as many entries of increments."""
        rotated = min(part.at for part in self.parts)
        # An entry with an older time than every part has no effect, but the last of them has the bound of all of them.
        idle = sum(1 for _ in takewhile(lambda entry: entry.at <= rotated, self.increments))
        increments = self.increments[max(idle - 1, 0) :]
        return LastReads(_merged(self.parts), _merged(increments))

    def record(self) -> tuple[tuple[ReadPart, ...], tuple[ReadIncrement, ...]]:
        """Return the times as a ReadTimes has them."""
        return (
            tuple(ReadPart(part.bound, Time.of(moment_of(part.at))) for part in self.parts),
            tuple(ReadIncrement(entry.bound, Time.of(moment_of(entry.at))) for entry in self.increments),
        )


def _parsed(time: Time) -> int:
    return milliseconds_of(datetime.fromisoformat(time))


def _bounds(entries: Iterable[_Entry]) -> Ints:
    return np.array([entry.bound for entry in entries], np.int64)


def _times(entries: Iterable[_Entry]) -> Ints:
    return np.array([entry.at for entry in entries], np.int64)


def _merged(entries: Sequence[_Entry]) -> tuple[_Entry, ...]:
    """Merge neighbours until READ_ENTRIES_MAX are left, always those that lose the least.

    The loss is the difference of their times, multiplied by the width of the neighbour whose time gets older.
    """
    merged = list(entries)
    while len(merged) > 1:
        widths = [after - before for before, after in pairwise([0, *(entry.bound for entry in merged)])]
        losses = [
            (abs(after.at - before.at) * widths[number if before.at > after.at else number + 1], number)
            for number, (before, after) in enumerate(pairwise(merged))
        ]
        loss, number = min(losses)
        if loss and len(merged) <= READ_ENTRIES_MAX:
            break
        before, after = merged[number : number + 2]
        merged[number : number + 2] = [_Entry(after.bound, min(before.at, after.at))]
    return tuple(merged)


def due_share(elapsed_seconds: float, bound_seconds: float) -> float:
    """Return the part of all places to reread, so long after the last check, to finish before the bound."""
    return min(max(elapsed_seconds, 0.0) / (bound_seconds * ROTATION_PART), 1.0)


def due_ranges(times: LastReads, share: float, is_overdue: Callable[[PlaceRange], bool]) -> list[PlaceRange]:
    """Return the places to reread, those read longest ago first: all that are overdue, and `share` of all places."""
    ranges = [
        (part.at, PlaceRange(low, part.bound))
        for part, low in zip(times.parts, (0, *(part.bound for part in times.parts)), strict=False)
    ]
    chosen: list[PlaceRange] = []
    left = round(share * PLACES)
    for _, one in sorted(ranges, key=lambda entry: (entry[0], entry[1])):
        if is_overdue(one):
            chosen.append(one)
        elif left > 0:
            chosen.append(PlaceRange(one.low, min(one.high, one.low + left)))
        left -= one.high - one.low
    return chosen
