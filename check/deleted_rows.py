"""Find changes that delete a row that was never there: neither in the base copy nor written by an earlier change.

Only a row that exists can be deleted, so such a change shows that a row, or the change that wrote it, is missing. A
task that reads a segment reports the keys whose first change in it is a delete, and hashes of the keys that it writes.
A key that no earlier segment writes must be in the base copy; the tasks that read base rows look for it.

This covers tables with a key that were copied once, at the full snapshot, and the first change of each key in its
table. Of a table that was copied again, the copies of a shard may begin at different positions. Lines of tables without
a key are counted by the fold.

The same tasks collect the TRUNCATEs, which check/truncates.py compares with the files of the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct, field

from cutline.check.copies import Copies
from cutline.check.report import Conflict, Findings
from cutline.check.stored_rows import salted
from cutline.check.table_forms import TableForms
from cutline.columns.arrow_numbers import to_flags, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.sources import SegmentSource
from cutline.wal.segments.segments import CHANGES, DELETE, TRUNCATE, are_of

# The driver holds four bytes for each key that a segment writes. With more changes than this, nothing is looked for.
CHANGES_MAX = 16 << 20
HALF_BITS = np.uint64(32)
# As in the sets of changed keys (snapshots/fold/changed_keys.py).
SLOTS_PER_KEY_BITS, SLOT_BITS_MAX = 4, 22


class KeyDeletes(Struct, frozen=True):
    """The keys of a segment whose first change is a delete: their salted hashes, groups at the cut, and positions.

    `written` are the upper halves of the salted hashes of the keys that the segment writes, each once. `truncated` has
    the position of the last TRUNCATE of each group. `truncates` are the groups and positions of all TRUNCATEs that no
    two-phase transaction made; `last_changes` has the group and the position of the last change of each group, in each
    segment that was read.
    """

    hashes: Hashes
    groups: Ints
    lsn: Ints
    written: npt.NDArray[np.uint32]
    truncated: Mapping[int, int] = field(default_factory=dict)
    truncates: tuple[tuple[int, int], ...] = ()
    last_changes: tuple[tuple[int, int], ...] = ()


class _KeyChanges(NamedTuple):
    """Changes of keys: the salted hash of the key, the position, the number in the transaction, and the group."""

    hashes: Hashes
    lsn: Ints
    seq: Ints
    groups: Ints


class DeletedKeys(Struct):
    """Collects the KeyDeletes of segments that are being read; `forms` are those of the node's tables.

    With `ends`, these are several, of which each but the last ends at one of these positions.
    """

    segment: SegmentSource
    forms: TableForms
    ends: tuple[Lsn, ...] = ()
    _deletes: list[_KeyChanges] = field(default_factory=list)
    _writes: list[_KeyChanges] = field(default_factory=list)
    _truncated: dict[int, int] = field(default_factory=dict)
    _truncates: list[tuple[int, int]] = field(default_factory=list)
    _last_changes: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, table: pa.Table) -> None:
        """Add rows of the segment in the schema at the cut."""
        op, lsn, group = (to_numpy(table[name]) for name in ("op", "lsn", "group"))
        counts = are_of(op, CHANGES) & (lsn < self.segment.position)
        if self.segment.excluded:
            counts &= ~np.isin(lsn, np.fromiter(self.segment.excluded, np.int64))
        if not counts.any():
            return
        place = np.searchsorted(self.ends, lsn[counts], side="right")
        last = _last_by_group(group[counts], place, lsn[counts])
        # Bounded by the number of tables and segments.
        for number, of, at in zip(*(column.tolist() for column in last), strict=True):
            self._last_changes[number, of] = max(at, self._last_changes.get((number, of), 0))
        is_truncate = counts & (op == TRUNCATE)
        if is_truncate.any():
            is_local = is_truncate & to_flags(table["global_id"].is_null().combine_chunks())
            self._truncates += zip(group[is_local].tolist(), lsn[is_local].tolist(), strict=True)
        for row in np.flatnonzero(is_truncate).tolist():  # bounded by the number of TRUNCATE commands
            number = int(group[row])
            self._truncated[number] = max(int(lsn[row]), self._truncated.get(number, 0))
        counts &= ~is_truncate & self._have_key(group)
        if not counts.any():
            return
        chosen = table.select(["op", "lsn", "seq", "group", "key"])
        chosen = chosen if counts.all() else chosen.filter(to_mask(counts))
        op, lsn, seq, group = (to_numpy(chosen[name]) for name in ("op", "lsn", "seq", "group"))
        hashes = salted(xxhash64(column_of(chosen["key"])), group)
        is_delete = op == DELETE
        columns = hashes, lsn, seq, group
        if is_delete.any():
            self._deletes.append(_KeyChanges(*(column[is_delete] for column in columns)))
        self._writes.append(_KeyChanges(*(column[~is_delete] for column in columns)))

    def _have_key(self, group: Ints) -> Flags:
        """Flag the rows of tables that have a key and were not copied again."""
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])) if len(group) else np.zeros(0, int)
        numbers = group[starts].astype(np.int64)
        known = self.forms.has(numbers)
        known[known] = self.forms.key_widths[self.forms.find(numbers[known])] > 0
        if (mapping := self.segment.mapping) is not None and mapping.since:
            known &= ~np.isin(numbers, [mapping.number_of(number) or number for number in mapping.since])
        return np.repeat(known, np.diff(np.append(starts, len(group))))

    def report(self) -> KeyDeletes:
        """Return what was collected."""
        none = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64)
        writes = [np.concatenate([empty, *(one[at] for one in self._writes)]) for at, empty in enumerate(none)]
        # Sorting is several times as fast as np.unique, which hashes.
        written = np.sort((writes[0] >> HALF_BITS).astype(np.uint32))
        written = written[np.concatenate([[True], written[1:] != written[:-1]])[: len(written)]]
        if not self._deletes:
            return self._report(*none, written)
        hashes, lsn, seq, group = (np.concatenate(parts) for parts in zip(*self._deletes, strict=True))
        # `expected_rows` drops those before a TRUNCATE, which must not hide the key's first delete after it.
        is_after = np.ones(len(lsn), bool)
        for number, at_lsn in self._truncated.items():
            is_after &= (group != number) | (lsn > at_lsn)
        hashes, lsn, seq, group = hashes[is_after], lsn[is_after], seq[is_after], group[is_after]
        first = _first(hashes, lsn, seq)
        hashes, lsn, seq, group = hashes[first], lsn[first], seq[first], group[first]
        is_first = ~_follow(hashes, (lsn, seq), writes)
        return self._report(hashes[is_first], group[is_first].astype(np.int64), lsn[is_first], written)

    def _report(self, hashes: Hashes, groups: Ints, lsn: Ints, written: npt.NDArray[np.uint32]) -> KeyDeletes:
        truncates = tuple(self._truncates)
        last = tuple((number, at) for (number, _), at in self._last_changes.items())
        return KeyDeletes(hashes, groups, lsn, written, self._truncated, truncates, last)


class _LastPositions(NamedTuple):
    """For each run of rows of one group in one place: the group, the place, and the highest position."""

    group: Ints
    place: Ints
    lsn: Ints


def _last_by_group(group: Ints, place: Ints, lsn: Ints) -> _LastPositions:
    is_new = (group[1:] != group[:-1]) | (place[1:] != place[:-1])
    starts = np.flatnonzero(np.concatenate([[True], is_new]))
    return _LastPositions(group[starts], place[starts], np.maximum.reduceat(lsn, starts))


def _first(hashes: Hashes, lsn: Ints, seq: Ints) -> Ints:
    """Return the indexes of the first of the changes with each hash, in the order of the hashes."""
    order = np.lexsort((seq, lsn, hashes))
    ordered = hashes[order]
    first: Ints = order[np.concatenate([[True], ordered[1:] != ordered[:-1]])]
    return first


def _follow(hashes: Hashes, places: tuple[Ints, Ints], writes: list[npt.NDArray[np.uint64]]) -> Flags:
    """Flag the deletes (with different hashes, ascending) of keys that an earlier change writes."""
    # Most writes have other keys, which need no search: their highest bits differ.
    bits = min(len(hashes).bit_length() + SLOTS_PER_KEY_BITS, SLOT_BITS_MAX)
    slots, shift = np.zeros(1 << bits, np.bool_), np.uint64(64 - bits)
    slots[hashes >> shift] = True
    some = np.flatnonzero(slots[writes[0] >> shift])
    at = np.minimum(np.searchsorted(hashes, writes[0][some]), len(hashes) - 1)
    is_same = hashes[at] == writes[0][some]
    at, lsn, seq = at[is_same], writes[1][some[is_same]], writes[2][some[is_same]]
    is_earlier = (lsn < places[0][at]) | ((lsn == places[0][at]) & (seq < places[1][at]))
    follows = np.zeros(len(hashes), np.bool_)
    follows[at[is_earlier]] = True
    return follows


class ExpectedRows(Struct, frozen=True):
    """The base rows that a node's changes delete: the salted hashes of their keys, ascending, each once.

    `groups` are their tables at the cut, and `lsn` the positions of the transactions that delete them.
    """

    hashes: Hashes
    groups: Ints
    lsn: Ints

    def find(self, hashes: Hashes) -> Ints:
        """Return which of the expected rows are among rows with these hashes."""
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return at[self.hashes[at] == hashes] if len(self.hashes) else at[:0]


def expected_rows(reports: Sequence[KeyDeletes]) -> ExpectedRows:
    """Return the base rows that a node's changes delete; `reports` are those of its segments, in order."""
    hashes = np.concatenate([np.empty(0, np.uint64), *(report.hashes for report in reports)])
    groups, lsn = (
        np.concatenate([np.empty(0, np.int64), *(getattr(report, name) for report in reports)])
        for name in ("groups", "lsn")
    )
    segment = np.repeat(np.arange(len(reports)), [len(report.hashes) for report in reports])
    # An upper half that two keys share hides a delete at worst.
    halves = (hashes >> HALF_BITS).astype(np.uint32)
    wanted = np.unique(halves)
    written_in = np.full(len(wanted), len(reports), np.int64)
    for number, report in enumerate(reports if len(wanted) else ()):
        at = np.minimum(np.searchsorted(wanted, report.written), len(wanted) - 1)
        at = at[wanted[at] == report.written]
        written_in[at] = np.minimum(written_in[at], number)
    counts = written_in[np.searchsorted(wanted, halves)] >= segment
    # A base copy that read a table after a later TRUNCATE lacks the rows before it.
    truncated: dict[int, int] = {}
    for report in reports:
        truncated |= {number: max(at, truncated.get(number, 0)) for number, at in report.truncated.items()}
    for number, at_lsn in truncated.items():
        counts &= (groups != number) | (lsn > at_lsn)
    found, first = np.unique(hashes[counts], return_index=True)
    return ExpectedRows(found, groups[counts][first], lsn[counts][first])


def note_missing(expected: Mapping[int, ExpectedRows], seen: Mapping[int, Flags], copies: Copies,
                 findings: Findings) -> None:  # fmt: skip
    """Report the tables of which rows are deleted that were never there; `seen` flags the expected rows by node."""
    for number, rows in expected.items():
        node = copies.nodes[number]
        if node in findings.damaged:
            continue
        missing = ~seen[number]
        for group in np.unique(rows.groups[missing]).tolist():
            of_group = missing & (rows.groups == group)
            first = Lsn(int(rows.lsn[of_group].min()))
            detail = f"changes delete {int(of_group.sum())} rows that were never there, the first of them at {first}"
            findings.conflict(Conflict("history", detail, node=node, group=copies.group_name(node, group)))
