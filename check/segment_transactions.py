"""Check the transactions of a segment: each change against the event that ends its transaction, and the range of WAL.

A change repeats the position, the xid and the global id of its transaction, and a segment holds the events that end in
its range of WAL. So a change that was moved into another transaction, an event that occurs twice, and a transaction in
the wrong segment contradict something in the segment itself. So does half of an UPDATE that was written as two changes:
both come from one message, so no segment has only one of them. The event that ends a transaction says how many changes
it has, so as long as that event is there, no change can be missing from the archives of all copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, xxhash64
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.wal.segments.archive import OpenTransaction, Segment, SegmentRange
from cutline.wal.segments.segments import (
    CHANGES,
    COMMIT,
    COMMIT_PREPARED,
    DELETE,
    ENDS,
    PARTIAL,
    PREPARE,
    ROLLBACK_PREPARED,
    are_of,
)

# In place of the hash of a global id, and of a number of changes.
NO_GLOBAL_ID, NOT_COUNTED = 0, -1
# Ids of transactions have 32 bits; PostgreSQL uses each again only after all others.
XIDS = 1 << 32
# Odd numbers, so that no two positions, or numbers of changes, or groups have the same product modulo 2**64.
MULTIPLIERS = tuple(np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))


class SegmentTransactions(Struct):
    """The transactions of a segment that is read table by table; `held` says which WAL it holds.

    With `others`, these are several segments, in order, each of which ends where a transaction ends; `held` is the
    first. If they contradict their transactions together, so does one of them.

    Its last transaction may be open: then the segment has only the beginning. `continued` is the transaction that
    the segment before it has begun. `base` is where the node's slot was created. `forms` are those of the node's
    tables; without them, the halves of UPDATEs are not checked. `is_open_prepared` says whether the open transaction is
    a two-phase transaction; None if the segment has none of its changes. Every method raises RowsInvalidError.
    """

    held: Segment | SegmentRange
    base: Lsn = ORIGIN
    continued: OpenTransaction | None = None
    forms: TableForms | None = None
    others: tuple[Segment, ...] = ()
    is_open_prepared: bool | None = None
    # n by 5: the position, the xid, the hash of the global id, the number of changes and the place of the segment, of
    # runs of changes and of the events that end transactions.
    _changes: list[Ints] = field(default_factory=list)
    _ends: list[Ints] = field(default_factory=list)
    # n by 2: where the records of events begin and end. The xids of transactions that end, and that are decided.
    _records: list[Ints] = field(default_factory=list)
    _ended: list[Ints] = field(default_factory=list)
    _decided: list[Ints] = field(default_factory=list)
    _halves: _Halves = field(default_factory=lambda: _Halves())

    def add(self, table: pa.Table, place: Ints | None = None) -> None:
        """Check rows of the segments (SEGMENT_SCHEMA); `place` is the index of the segment that has each row."""
        op = to_numpy(table["op"])
        is_change = are_of(op, CHANGES)
        places = np.zeros(len(op), np.int64) if place is None else place
        # Changes and events are in separate row groups: copy no rows without need.
        for chosen, check in ((~is_change, self._add_events), (is_change, self._add_changes)):
            if chosen.any():
                check(table if chosen.all() else table.filter(to_mask(chosen)), places[chosen])

    def _add_events(self, events: pa.Table, place: Ints) -> None:
        op, lsn, end = (to_numpy(events[name]) for name in ("op", "lsn", "end_lsn"))
        held, segments = self.held, (self.held, *self.others)
        after = np.array([segment.after for segment in segments], np.int64)[place]
        through = np.array([segment.through for segment in segments], np.int64)[place]
        # A transaction that was prepared before the slot was created is decoded at its COMMIT PREPARED.
        is_early = (op == PREPARE) & (end <= self.base)
        is_outside = ((end <= after) | (end > through)) & ~is_early
        if is_outside.any():
            at = Lsn(int(end[is_outside].min()))
            what = f"an event that ends at {at}, but it holds the WAL from {held.after} to {held.through}"
            raise RowsInvalidError(f"it contains {what}")
        # The `lsn` of a ROLLBACK PREPARED is the end of the PREPARE. A marker's is its end.
        has_begin = are_of(op, (COMMIT, PREPARE, COMMIT_PREPARED))
        is_outside = (end < lsn) | (has_begin & (lsn < after) & ~is_early)
        if is_outside.any():
            begin, finish = (Lsn(int(column[is_outside.argmax()])) for column in (lsn, end))
            what = f"an event that begins at {begin} and ends at {finish}, but it holds the WAL from {held.after}"
            raise RowsInvalidError(f"it contains {what}")
        is_end = are_of(op, ENDS)
        if held.open is not None and (lsn[is_end] >= held.open.lsn).any():
            raise RowsInvalidError(f"it contains the end of the transaction at {held.open.lsn}, or of a later one")
        self._records.append(np.stack([lsn, end], axis=1)[is_end | (op == COMMIT_PREPARED)])
        xid = to_numpy(events["xid"])
        if (is_outside := (xid < 0) | (xid >= XIDS)).any():
            raise RowsInvalidError(f"it contains an event whose transaction ID {int(xid[is_outside][0])} is invalid")
        self._ended.append(xid[is_end])
        self._decided.append(xid[are_of(op, (COMMIT_PREPARED, ROLLBACK_PREPARED))])
        names = np.where(op == PREPARE, _hashes_of_names(events["global_id"]), NO_GLOBAL_ID)
        changes = to_numpy(events["changes"].fill_null(NOT_COUNTED))
        self._ends.append(np.stack([lsn, xid, names, changes, place], axis=1)[is_end])

    def _add_changes(self, changes: pa.Table, place: Ints) -> None:
        lsn, end, xid = (to_numpy(changes[name]) for name in ("lsn", "end_lsn", "xid"))
        if (lsn != end).any():
            at = int((lsn != end).argmax())
            detail = f"a change of the transaction at {Lsn(int(lsn[at]))} has another position as its end"
            raise RowsInvalidError(f"{detail}, {Lsn(int(end[at]))}")
        self._check_spanning(changes, lsn)
        if self.forms is not None:
            self._halves.add(changes, self.forms)
        columns = (lsn, xid, _hashes_of_names(changes["global_id"]), place)
        # A transaction's changes are next to each other.
        is_new = np.ones(len(lsn), np.bool_)
        is_new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
        starts = np.flatnonzero(is_new)
        counts = np.diff(starts, append=len(lsn))
        *which, places = (column[starts] for column in columns)
        self._changes.append(np.stack([*which, counts, places], axis=1))

    def _check_spanning(self, changes: pa.Table, lsn: Ints) -> None:
        """Check the changes of transactions that span segments: each segment has those after the segment before it."""
        if self.continued is None and self.held.open is None:
            return
        seq = to_numpy(changes["seq"])
        if self.continued is not None and ((lsn == self.continued.lsn) & (seq <= self.continued.seq)).any():
            known = f"up to change {self.continued.seq}"
            raise RowsInvalidError(f"it repeats changes of the transaction at {self.continued.lsn}, {known}")
        if (opened := self.held.open) is None:
            return
        is_open = lsn == opened.lsn
        if (seq[is_open] > opened.seq).any():
            detail = f"it contains changes of the transaction at {opened.lsn} after change {opened.seq}"
            raise RowsInvalidError(f"{detail}, up to which it should contain them")
        if self.is_open_prepared is None and is_open.any():
            self.is_open_prepared = changes["global_id"].filter(to_mask(is_open)).null_count == 0

    @property
    def lacks_end(self) -> bool:
        """Whether the segment neither ends the transaction that it continues, nor leaves it open, once it was read."""
        if self.continued is None or (self.held.open is not None and self.held.open.lsn == self.continued.lsn):
            return False
        return not any((ends[:, 0] == self.continued.lsn).any() for ends in self._ends)

    def end(self) -> None:
        """Check what only the whole segment shows: that each transaction ends once, as its changes say."""
        self._halves.end()
        self._check_records()
        changes = np.concatenate([np.empty((0, 5), np.int64), *self._changes])
        # No change has the position -1.
        ends = np.concatenate([[[-1, -1, -1, 0, 0]], *self._ends]).astype(np.int64)
        ends = ends[np.argsort(ends[:, 0], kind="stable")]
        ended = changes
        if self.held.open is not None:
            is_open = changes[:, 0] == self.held.open.lsn
            _check_same(changes[is_open], changes[is_open][:1])
            ended = changes[~is_open]
        found = ends[np.minimum(np.searchsorted(ends[:, 0], ended[:, 0]), len(ends) - 1)]
        if (without := ended[:, 0][(found[:, (0, 4)] != ended[:, (0, 4)]).any(axis=1)]).size:
            raise RowsInvalidError(f"it contains changes at {Lsn(int(without.min()))}, where no transaction ends")
        _check_same(ended, found)
        self._check_numbers(changes, ends)

    def _check_records(self) -> None:
        """Check that no record occurs twice or begins in another, and that no transaction ends or is decided twice."""
        records = np.concatenate([np.empty((0, 2), np.int64), *self._records])
        records = records[np.lexsort(records.T[::-1])]
        if (is_repeated := records[1:, 0] == records[:-1, 0]).any():
            at = Lsn(int(records[1:, 0][is_repeated][0]))
            raise RowsInvalidError(f"it contains the end of the transaction at {at} twice")
        if (is_inside := records[1:, 0] < records[:-1, 1]).any():
            begin, through = Lsn(int(records[1:, 0][is_inside][0])), Lsn(int(records[:-1, 1][is_inside][0]))
            raise RowsInvalidError(f"it contains an event that begins at {begin}, before another one ends at {through}")
        for what, parts in (("ends", self._ended), ("is decided", self._decided)):
            xids = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
            if (is_repeated := xids[1:] == xids[:-1]).any():
                raise RowsInvalidError(f"transaction {int(xids[1:][is_repeated][0])} {what} twice in it")

    def _check_numbers(self, changes: Ints, ends: Ints) -> None:
        """Check that the ended transactions, and the one that is left open, have as many changes as they should."""
        held, continued = self.held.open, self.continued
        expected = ends[1:, (0, 3)]
        if (uncounted := expected[expected[:, 1] == NOT_COUNTED]).size:
            at = Lsn(int(uncounted[0, 0]))
            raise RowsInvalidError(f"the end of the transaction at {at} does not say how many changes it has")
        if held is not None:
            expected = np.append(expected, [[int(held.lsn), held.changes]], axis=0)
        positions, places = np.unique(changes[:, 0], return_inverse=True)
        # No transaction has the position -1.
        counts = np.append(np.bincount(places, changes[:, 3]).astype(np.int64), 0)
        positions = np.append(positions, -1)
        place = np.searchsorted(positions[:-1], expected[:, 0])
        found = np.where(positions[place] == expected[:, 0], counts[place], 0)
        if continued is not None:
            found[expected[:, 0] == int(continued.lsn)] += continued.changes
        is_wrong = found != expected[:, 1]
        if is_wrong.any():
            (at, count), known = expected[is_wrong][0].tolist(), int(found[is_wrong][0])
            is_open = held is not None and at == int(held.lsn)
            said = f"but {'the commit' if is_open else 'its end'} says {count}"
            raise RowsInvalidError(
                f"up to its end, the archive has {known} changes of the transaction at {Lsn(at)}, {said}"
            )


class _Halves(Struct):
    """The changes that are half of an UPDATE: hashes of their transaction, UPDATE and group.

    An UPDATE becomes the DELETE of the old row, with an even number, and the new row, with the next number. `seconds`
    are the new rows that always have a DELETE, and `firsts` the DELETEs in their tables. `renaming` are the DELETEs
    that repeat the new key, because the new row lacks values, and `partials` the new rows that lack values.
    """

    firsts: list[Hashes] = field(default_factory=list)
    seconds: list[Hashes] = field(default_factory=list)
    renaming: list[Hashes] = field(default_factory=list)
    partials: list[Hashes] = field(default_factory=list)

    def add(self, changes: pa.Table, forms: TableForms) -> None:
        """Add changes of a segment, whose groups `forms` has."""
        op, group, seq = (to_numpy(changes[name]) for name in ("op", "group", "seq"))
        is_second, is_delete = (seq & 1) == 1, op == DELETE
        chosen = is_second | is_delete
        if not chosen.any():
            return
        op, group, seq, is_second = op[chosen], group[chosen], seq[chosen], is_second[chosen]
        lsn, is_delete = to_numpy(changes["lsn"])[chosen], op == DELETE
        form = forms.find(group.astype(np.int64))
        parts = (lsn, seq >> 1, group)
        hashes = np.bitwise_xor.reduce(
            [part.astype(np.uint64) * by for part, by in zip(parts, MULTIPLIERS, strict=True)], axis=0
        )
        is_certain = forms.deletes_old_keys[form]
        self.seconds.append(hashes[is_certain & is_second])
        self.firsts.append(hashes[is_certain & is_delete & ~is_second])
        has_row = is_delete & (forms.key_widths[form] > 0)
        has_row &= to_numpy(pc.binary_length(changes["row"].filter(to_mask(chosen)))) > 0
        self.renaming.append(hashes[has_row & ~is_second])
        self.partials.append(hashes[(op == PARTIAL) & is_second])

    def end(self) -> None:
        """Raise RowsInvalidError unless each half has its other half."""
        firsts, seconds, renaming, partials = (
            np.concatenate([np.empty(0, np.uint64), *parts])
            for parts in (self.firsts, self.seconds, self.renaming, self.partials)
        )
        if not np.isin(seconds, firsts).all():
            raise RowsInvalidError("it contains the new row of an update of a key, but not the delete of the old row")
        if not np.isin(renaming, partials).all():
            raise RowsInvalidError("it contains the delete of the old row of an update of a key, but not the new row")


def _check_same(changes: Ints, transactions: Ints) -> None:
    """Check that changes have the xid and the global id of the transactions in the same place."""
    for column, name in ((1, "xid"), (2, "global id")):
        is_other: Flags = changes[:, column] != transactions[:, column]
        if is_other.any():
            at = Lsn(int(changes[is_other.argmax(), 0]))
            raise RowsInvalidError(f"the {name} of a change at {at} is not that of the transaction that ends there")


def _hashes_of_names(names: Any) -> Ints:
    """Return a hash of each global id; NO_GLOBAL_ID for null."""
    if names.null_count == len(names):
        return np.full(len(names), NO_GLOBAL_ID, np.int64)
    encoded = names.combine_chunks().dictionary_encode()
    of_names = xxhash64(column_of(encoded.dictionary.cast(pa.binary()))).view(np.int64)
    places = to_numpy(encoded.indices.fill_null(-1)).astype(np.int64)
    return np.where(places < 0, NO_GLOBAL_ID, of_names[places])
