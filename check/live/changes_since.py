"""The rows that were written after a cut: those in the archive, and those in the WAL that is not archived yet.

A row of a running database that nobody has written since the cut must be the row at the cut. Changes since the cut are
in the archive, which reaches beyond the cut, and in the WAL from the position of the chain's slot on. That WAL is
decoded from a temporary copy of the slot, so that the slot neither moves nor is busy. Only hashes of the changed keys
are kept.

Two kinds of transactions belong to the cut although no session sees them yet: those that the cut includes early,
because another shard has committed its part, and those that have committed but still wait for a synchronous standby.
The rows that they changed count as written, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from cutline.check.live.ordered_snapshots import SnapshotBounds
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, from_arrow, xxhash64
from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.encodings import Texts
from cutline.nodes.groups import Group, Table
from cutline.snapshots.fold.sources import SegmentSource, read_at_cut, segment_sources
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import read_chain
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.drain.peek import SlotCopy, copied_slot
from cutline.wal.drain.slots import slot_name
from cutline.wal.segments.segments import (
    CHANGES,
    COMMIT,
    PREPARE,
    SEGMENT_SCHEMA,
    TRUNCATE,
    Definition,
    read_events,
)

# The newest segments in which transactions are looked up that sessions do not see yet.
SEGMENTS_READ_MAX = 64
# The messages that the server decodes at a time, at least, and the most WAL that it decodes.
MESSAGES_AT_ONCE = 500_000
WAL_BYTES_MAX = 16 << 30
XID_MASK = 0xFFFFFFFF
# While an increment is being committed, the slot may be ahead of the newest commit.
TRIES, WAIT_SECONDS = 5, 3.0
REMEDY = "take an increment, then repeat the check"


class ChangesUnknownError(RefusedError):
    """Nobody knows which rows were written since a cut."""


@dataclass(slots=True)
class Touched:
    """The hashes of the keys (without a key: of the lines) that were written since a cut, by group number.

    `truncated` are the groups that were truncated since.
    """

    truncated: set[int] = field(default_factory=set)
    _parts: dict[int, list[Hashes]] = field(default_factory=dict)

    def add(self, changes: pa.Table) -> None:
        """Add changes, as in a segment."""
        if not len(changes):
            return
        group, op = to_numpy(changes["group"]), to_numpy(changes["op"])
        self.truncated |= set(group[op == TRUNCATE].tolist())
        for name in ("key", "row"):
            hashes = xxhash64(column_of(changes[name]))
            for number in np.unique(group).tolist():
                # In a group without a key, the line identifies the row. Both are kept: `row` may be a new key.
                self._parts.setdefault(number, []).append(np.unique(hashes[group == number]))

    def covers(self, number: int, identities: Hashes) -> Flags:
        """Flag the rows of a group that were written since."""
        if number in self.truncated:
            return np.ones(len(identities), np.bool_)
        if number not in self._parts:
            return np.zeros(len(identities), np.bool_)
        hashes = np.unique(np.concatenate(self._parts[number]))
        self._parts[number] = [hashes]
        return np.isin(identities, hashes)


@dataclass(frozen=True, slots=True)
class ChangesSince:
    """Finds out what was written on a primary after the last cut of `chain`.

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
        """Return all rows written between the cut and `finish`; call this after the rows were read.

        Raises ChangesUnknownError, ObjectDamagedError, and the errors of reading the slot.
        """
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(WAIT_SECONDS)
            newest = read_chain(store, self.chain.name)
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
        segments = segment_sources(newest, 0, self.node.id)
        unseen = self._unseen(store, segments, position, excluded)
        at_cut = newest.numbers_at_cut(self.node.id)
        # The groups of a table that an increment has redefined meanwhile end with that increment.
        touched.truncated |= {number for number in self.groups if at_cut.get(number) != number}
        for number, source in enumerate(segments):
            segment = source.segment
            is_recent = bool(unseen) and number >= len(segments) - SEGMENTS_READ_MAX
            reaches = segment.through > position or any(segment.after <= lsn < segment.through for lsn in excluded)
            if not segment.changes or not (reaches or is_recent):
                continue
            for table in read_at_cut(store, source, SEGMENT_SCHEMA):
                op, lsn, xid = (to_numpy(table[name]).astype(np.int64) for name in ("op", "lsn", "xid"))
                is_outside = (lsn >= position) | _are_in(lsn, excluded) | _are_in(xid, unseen)
                touched.add(table.filter(to_mask(is_outside & np.isin(op, CHANGES))))

    def _unseen(
        self, store: ObjectStore, segments: Sequence[SegmentSource], position: Lsn, excluded: Collection[Lsn]
    ) -> set[int]:
        """Return the transactions that the cut includes and that no session may have seen."""
        committed, prepared, decided = set[int](), set[int](), set[int]()
        for source in segments[-SEGMENTS_READ_MAX:]:
            events = read_events(store, source.segment)
            op, lsn, xid = (to_numpy(events[name]).astype(np.int64) for name in ("op", "lsn", "xid"))
            is_included = (lsn < position) & ~_are_in(lsn, excluded)
            committed |= set(xid[is_included & np.isin(op, (COMMIT, PREPARE))].tolist())
            prepared |= set(xid[is_included & (op == PREPARE)].tolist())
            decided |= set(xid[(op != PREPARE) & (op != COMMIT)].tolist())
        return (prepared - decided) | (committed & self.running)


def _are_in(values: Ints, listed: Iterable[int]) -> Flags:
    return np.isin(values, np.fromiter(listed, np.int64))


def running_transactions(connection: psycopg.Connection[Any]) -> frozenset[int]:
    """Return the xids, in 32 bits as in segments, of the transactions that run on the server."""
    (text,) = connection.execute("SELECT pg_current_snapshot()::text").fetchone() or ("0:0:",)
    return frozenset(xid & XID_MASK for xid in SnapshotBounds.parse(str(text)).running)
