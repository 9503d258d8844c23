"""The rows that were written after a cut: those in the archive, and those in the WAL that is not archived yet.

A row of a running database that nobody has written since the cut must be the row at the cut. Changes since the cut are
in the archive, which reaches beyond the cut, and in the WAL from the position of the chain's slot on. That WAL is
decoded from a temporary copy of the slot, so that the slot neither moves nor is busy. Only hashes of the changed keys
are kept.

Two kinds of transactions belong to the cut although no session sees them yet: those that the cut includes early,
because another shard has committed its part, and those that have committed but still wait for a synchronous standby.
The rows that they changed count as written, too. They may be as old as the standby has been down, so the whole archive
is searched for them; but only if rows differ that nobody else has written.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.live.ordered_snapshots import SnapshotBounds
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, from_arrow, xxhash64
from cutline.fleet.config import Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.encodings import Texts
from cutline.nodes.groups import Group, Table
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.fold.sources import SegmentSource, read_at_cut, segment_sources
from cutline.snapshots.listing.listing import read_shown
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.drain.peek import SlotCopy, copied_slot
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.archive import Definition
from cutline.wal.segments.segments import CHANGES, COMMIT, DELETE, PREPARE, SEGMENT_SCHEMA, TRUNCATE, read_events

# The newest segments in which transactions are looked up that sessions do not see yet, and how many are read at a time.
SEGMENTS_READ_MAX, SEGMENTS_AT_ONCE = 2048, 16
# The messages that the server decodes at a time, at least, and the most WAL that it decodes.
MESSAGES_AT_ONCE = 500_000
WAL_BYTES_MAX = 16 << 30
# The most hashes of rows that are held; each takes 8 bytes, and twice as much while they are sorted.
HASHES_MAX = 50_000_000
XID_MASK = 0xFFFFFFFF
# While an increment is being committed, the slot may be ahead of the newest commit.
TRIES, WAIT_SECONDS = 5, 3.0
REMEDY = "take an increment, then repeat the check"


class ChangesUnknownError(RefusedError):
    """It is not known which rows were written since a cut."""


class Touched(Struct):
    """The hashes of the keys (without a key: of the lines) that were written since a cut, by group number.

    `truncated` are the groups that were truncated since.
    """

    truncated: set[int] = field(default_factory=set)
    _parts: dict[int, list[Hashes]] = field(default_factory=dict)
    _count: int = 0

    def add(self, changes: pa.Table) -> None:
        """Add changes, as in a segment; raise ChangesUnknownError if they are too many."""
        if not len(changes):
            return
        group, op = to_numpy(changes["group"]), to_numpy(changes["op"])
        self.truncated |= set(group[op == TRUNCATE].tolist())
        # In a group without a key, the line identifies the row. The `row` of a DELETE may be a new key.
        keys, lines = column_of(changes["key"]), column_of(changes["row"])
        has_line = (op == DELETE) | (keys.lengths == 0)
        of_keys, of_lines = xxhash64(keys), xxhash64(lines)
        for number in np.unique(group).tolist():
            is_own = group == number
            found = np.unique(np.concatenate([of_keys[is_own], of_lines[is_own & has_line]]))
            self._parts.setdefault(number, []).append(found)
            self._count += len(found)
        if self._count > HASHES_MAX:
            self._parts = {number: [np.unique(np.concatenate(parts))] for number, parts in self._parts.items()}
            self._count = sum(len(part) for (part,) in self._parts.values())
            # Close to the limit, every addition would join them again.
            if self._count > HASHES_MAX * 3 // 4:
                raise ChangesUnknownError(f"more than {self._count:,} rows were written since the cut: {REMEDY}")

    def covers(self, number: int, identities: Hashes) -> Flags:
        """Flag the rows of a group that were written since."""
        if number in self.truncated:
            return np.ones(len(identities), np.bool_)
        if number not in self._parts:
            return np.zeros(len(identities), np.bool_)
        hashes = np.unique(np.concatenate(self._parts[number]))
        self._parts[number] = [hashes]
        return np.isin(identities, hashes)


class ChangesSince(Struct, frozen=True):
    """Finds rows that were written on a primary after the last cut of `chain`, or that the cut has before sessions do.

    `groups` and `tables` are those whose changes matter, by number. `running` are the transactions that ran before any
    row was read.
    """

    node: Node
    chain: Chain
    groups: Mapping[int, Group]
    tables: Mapping[int, Table]
    running: frozenset[int]
    publications: tuple[str, ...]
    global_id_form: str
    convert: Texts | None

    def find(self, store: ObjectStore, finish: Lsn) -> Touched:
        """Return all rows written between the cut and `finish`; call this after the rows were read. See `add_unseen`.

        Raises ChangesUnknownError, ObjectDamagedError, and the errors of reading the slot.
        """
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(WAIT_SECONDS)
            # A later merge may lack segments that reach beyond the cut.
            newest = read_from_merge(store, self.chain.name, merge_max=self.chain.last.increment)
            if newest.full.chain != self.chain.full.chain:
                raise ChangesUnknownError(f"snapshot {self.chain.name} was replaced during the check")
            with copied_slot(self.node, slot_name(self.chain.full.chain)) as copy:
                if copy.confirmed > newest.archived_to(self.node.id):
                    problem = f"WAL up to {copy.confirmed} has left the node, but no increment contains it yet"
                    continue
                if (size := finish - copy.confirmed) > WAL_BYTES_MAX:
                    raise ChangesUnknownError(
                        f"{size >> 30} GiB of WAL were written since the newest increment: {REMEDY}"
                    )
                touched = Touched()
                self._decode(copy, finish, touched)
            self._read_archive(store, newest, touched)
            return touched
        raise ChangesUnknownError(f"{problem}: {REMEDY}")

    def _decode(self, copy: SlotCopy, finish: Lsn, touched: Touched) -> None:
        definitions = tuple(Definition(self.tables[number].oid, group) for number, group in self.groups.items())
        while True:
            decoder = Decoder(self.node.id, definitions, self.global_id_form, convert=self.convert)
            count = 0
            for messages in copy.read(self.publications, finish, MESSAGES_AT_ONCE):
                count += len(messages)
                touched.add(decoder.feed(from_arrow(messages)).changes)
            if count < MESSAGES_AT_ONCE:
                return

    def _read_archive(self, store: ObjectStore, newest: Chain, touched: Touched) -> None:
        position, excluded = self.chain.position(self.node.id), self.chain.excluded(self.node.id)
        at_cut = newest.numbers_at_cut(self.node.id)
        # The groups of a table that an increment has redefined meanwhile end with that increment.
        touched.truncated |= {number for number in self.groups if at_cut.get(number) != number}
        for source in segment_sources(newest, 0, self.node.id):
            segment = source.segment
            reaches = segment.through > position or any(segment.after <= lsn < segment.through for lsn in excluded)
            if not segment.changes or not reaches:
                continue
            for table in read_at_cut(store, source, SEGMENT_SCHEMA):
                op, lsn = (to_numpy(table[name]).astype(np.int64) for name in ("op", "lsn"))
                is_outside = (lsn >= position) | _are_in(lsn, excluded)
                touched.add(table.filter(to_mask(is_outside & np.isin(op, CHANGES))))

    def add_unseen(self, store: ObjectStore, touched: Touched) -> bool:
        """Add the changes of transactions that the cut includes and that no session may have seen.

        Returns False if a transaction that ran was not found in the newest SEGMENTS_READ_MAX segments, or in those that
        a merge has left: then it is not known whether an older segment has it.
        """
        if not self.running:
            return True
        # A merged chain lacks the segments whose changes its base has. Those before it are there until they are given
        # up.
        chain = self.chain
        if chain.beginning is not None:
            chain = read_shown(store, chain.name, chain.last.increment)
        position, excluded = chain.position(self.node.id), chain.excluded(self.node.id)
        segments = [
            _with_all_changes(source)
            for source in segment_sources(chain, 0, self.node.id)
            if source.segment.after < position
        ]
        searched = segments[-SEGMENTS_READ_MAX:]
        missing, found = set(self.running), dict[int, set[int]]()
        for end in range(len(searched), 0, -SEGMENTS_AT_ONCE):
            begin = max(end - SEGMENTS_AT_ONCE, 0)
            some = searched[begin:end]
            events = in_parallel(lambda source: read_events(store, source.segment), some)
            for number, table in zip(range(begin, end), events, strict=True):
                op, lsn, xid = (to_numpy(table[name]).astype(np.int64) for name in ("op", "lsn", "xid"))
                is_ended = np.isin(op, (COMMIT, PREPARE)) & _are_in(xid, self.running)
                missing -= set(xid[is_ended].tolist())
                is_included = is_ended & (lsn < position) & ~_are_in(lsn, excluded)
                if is_included.any():
                    found[number] = set(lsn[is_included].tolist())
            if not missing:
                break
        for number, positions in found.items():
            for source in _with_beginnings(searched, number, positions):
                for table in read_at_cut(store, source, SEGMENT_SCHEMA):
                    is_theirs = _are_in(to_numpy(table["lsn"]).astype(np.int64), positions)
                    touched.add(table.filter(to_mask(is_theirs & np.isin(to_numpy(table["op"]), CHANGES))))
        return not missing or (len(searched) == len(segments) and chain.beginning is None)


def _with_all_changes(source: SegmentSource) -> SegmentSource:
    """Return the source with the changes that precede the base with which the copy begins, which has their rows."""
    if source.mapping is None:
        return source
    return replace(source, mapping=replace(source.mapping, counted_from=ORIGIN, pending=frozenset()))


def _with_beginnings(
    segments: Sequence[SegmentSource], number: int, positions: Collection[int]
) -> Iterator[SegmentSource]:
    """Yield the segment, and those before it that end inside one of the transactions at `positions`."""
    yield segments[number]
    while number > 0 and (begun := segments[number - 1].segment.open) is not None and begun.lsn in positions:
        number -= 1
        yield segments[number]


def _are_in(values: Ints, listed: Iterable[int]) -> Flags:
    return np.isin(values, np.fromiter(listed, np.int64))


def running_transactions(connection: psycopg.Connection[Any]) -> frozenset[int]:
    """Return the xids, in 32 bits as in segments, of all transactions that run on the server, prepared ones included.

    `connection` must be in autocommit mode.
    """
    # The snapshot lists only transactions older than the newest that has ended. This transaction is newer than all that
    # have begun, and has ended when the snapshot is taken.
    connection.execute("SELECT pg_current_xact_id()")
    (text,) = connection.execute("SELECT pg_current_snapshot()::text").fetchone() or ("0:0:",)
    return frozenset(xid & XID_MASK for xid in SnapshotBounds.parse(str(text)).running)
