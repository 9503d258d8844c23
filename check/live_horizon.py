"""Which row versions of a running database a cut includes.

The WAL since a cut is not in the store. So a version counts only if it is *settled*: it was written before the cut, and
nobody has replaced it since. That is known from three facts:

- All transactions before the catalog_xmin of the chain's slot had ended where the slot stands, and the archive reaches
  at least that far. Transactions that the archive shows as committed before the cut are known by their xids as well.
- The archive has all changes between the cut and its own end; rows with the keys of these changes don't count.
- A version whose xmax is not older than the session's snapshot may be replaced by a transaction that the cut already
  includes: it was prepared before the cut, or it waits for a synchronous standby. It does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import (
    Flags,
    Hashes,
    Ints,
    column_of,
    xxhash64,
)
from cutline.fleet.lsn import Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Group
from cutline.snapshots.fold.sources import (
    SegmentSource,
    read_at_cut,
    segment_sources,
)
from cutline.snapshots.records.chain import Chain
from cutline.storage.store import ObjectStore
from cutline.wal.segments.segments import (
    CHANGES,
    COMMIT,
    PREPARE,
    SEGMENT_SCHEMA,
    TRUNCATE,
    read_events,
)

if TYPE_CHECKING:
    pass

# The newest segments in which transactions are looked up that are too young for the slot's catalog_xmin.
SEGMENTS_READ_MAX = 64
FIRST_NORMAL_XID = 3
XID_HALF, XID_MASK = 0x7FFFFFFF, 0xFFFFFFFF
SLOT_QUERY = """
SELECT catalog_xmin::text::bigint, confirmed_flush_lsn::text FROM pg_replication_slots
 WHERE slot_name = %s AND database = current_database() AND coalesce(wal_status, '') <> 'lost'
   AND catalog_xmin IS NOT NULL
"""
# Types whose text changes if another object is renamed: aclitem, regclass and so on, and arrays of them.
NAMING_TYPES = frozenset(
    {24, 1008, 1033, 1034, *range(2202, 2212), 3734, 3735, 3769, 3770, 4089, 4090, 4096, 4097, 4191, 4192}
)
FIRST_OWN_TYPE = 16384


@dataclass(frozen=True, slots=True)
class Horizon:
    """Tells which transactions a cut includes. Without `before`, no row version of the node is settled; `why` says so.

    All transactions before xid `before` are included, unless they changed a row of `touched`, the hashes of keys by
    group number, or a table of `truncated`. So are the transactions in `xids`, which are in order. `is_own`: the node
    belongs to the chain.
    """

    before: int | None
    xids: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    touched: Mapping[int, Hashes] = field(default_factory=dict)
    truncated: frozenset[int] = frozenset()
    why: str = ""
    is_own: bool = True

    def settled(self, xmin: Ints, xmax: Ints, oldest_running: int) -> Flags:
        """Flag the versions that were written before the cut and that nobody has begun to replace.

        `oldest_running` is the oldest transaction that still ran when they were read.
        """
        if self.before is None:
            return np.zeros(len(xmin), np.bool_)
        is_old = (xmin < FIRST_NORMAL_XID) | precedes(xmin, self.before) | np.isin(xmin, self.xids)
        settled: Flags = is_old & ((xmax == 0) | precedes(xmax, oldest_running))
        return settled


def precedes(xids: Ints, other: int) -> Flags:
    """Flag the xids that are older than `other`, by the 32-bit order of PostgreSQL (transam.c)."""
    distance: Ints = (xids - other) & XID_MASK
    return distance > XID_HALF


def read_slot(connection: psycopg.Connection[Any], slot: str) -> tuple[int, Lsn] | None:
    """Return the slot's catalog_xmin and position; None if there is no usable slot."""
    row = connection.execute(SLOT_QUERY, (slot,)).fetchone()
    return (int(row[0]), Lsn.parse(row[1])) if row and row[1] else None


def belongs_to(chain: Chain, shard: str, identity: NodeIdentity) -> bool:
    """Whether the running primary is the database that the chain's snapshots were taken of."""
    was = chain.baseline.get(shard)
    return was is not None and all(
        getattr(was, name) == getattr(identity, name) for name in ("system_identifier", "timeline", "database_oid")
    )


def find_horizon(store: ObjectStore, chain: Chain, shard: str, slot: tuple[int, Lsn] | None) -> Horizon:
    """Find out which transactions of the shard the chain's last cut includes; raise ObjectDamagedError."""
    if slot is None:
        return Horizon(None, why="the chain has no replication slot any more, so nobody knows what has changed since")
    catalog_xmin, confirmed = slot
    if confirmed > chain.archived_to(shard):
        return Horizon(None, why="an increment was attempted since: take an increment, then repeat the check")
    segments = segment_sources(chain, 0, shard)
    position, excluded = chain.position(shard), chain.excluded(shard)
    xids = [np.empty(0, np.int64)]
    included_early = set[int]()
    decided = set[int]()
    for source in segments[-SEGMENTS_READ_MAX:]:
        events = read_events(store, source.segment)
        op, lsn, xid = (to_numpy(events[name]).astype(np.int64) for name in ("op", "lsn", "xid"))
        is_included = (lsn < position) & ~np.isin(lsn, np.fromiter(excluded, np.int64))
        xids.append(xid[is_included & np.isin(op, (COMMIT, PREPARE))])
        included_early |= set(xid[is_included & (op == PREPARE)].tolist())
        decided |= set(xid[(op != PREPARE) & (op != COMMIT)].tolist())
    touched, truncated = _read_touched(store, segments, position, excluded, included_early - decided)
    return Horizon(catalog_xmin, np.unique(np.concatenate(xids)), touched, truncated)


def _read_touched(
    store: ObjectStore,
    segments: Sequence[SegmentSource],
    position: Lsn,
    excluded: Collection[Lsn],
    undecided: Collection[int],
) -> tuple[dict[int, Hashes], frozenset[int]]:
    """Return the keys, by group, that transactions outside of the cut have changed, and the groups they truncated.

    `undecided` are transactions that the cut includes although nobody has committed them yet.
    """
    found: dict[int, list[Hashes]] = {}
    truncated: set[int] = set()
    for number, source in enumerate(segments):
        segment = source.segment
        is_recent = bool(undecided) and number >= len(segments) - SEGMENTS_READ_MAX
        reaches = segment.through > position or any(segment.after <= lsn < segment.through for lsn in excluded)
        if not segment.changes or not (reaches or is_recent):
            continue
        for table in read_at_cut(store, source, SEGMENT_SCHEMA):
            op, lsn, xid = (to_numpy(table[name]).astype(np.int64) for name in ("op", "lsn", "xid"))
            is_outside = (lsn >= position) | np.isin(lsn, np.fromiter(excluded, np.int64))
            is_outside |= np.isin(xid, np.fromiter(undecided, np.int64))
            rows = table.filter(to_mask(is_outside & np.isin(op, CHANGES)))
            group = to_numpy(rows["group"])
            truncated |= set(group[to_numpy(rows["op"]) == TRUNCATE].tolist())
            hashes = {name: xxhash64(column_of(rows[name])) for name in ("key", "row")}
            for one in np.unique(group).tolist():
                # In a group without a key, the line identifies the row.
                found.setdefault(one, []).extend(of_rows[group == one] for of_rows in hashes.values())
    return {number: np.unique(np.concatenate(parts)) for number, parts in found.items()}, frozenset(truncated)


def lasting_groups(groups: Mapping[int, Group], *, is_unchanged: bool) -> frozenset[int]:
    """Return the groups in which the text of a value changes only if the row is written.

    If DDL `is_unchanged` since the cut, the text of users' types can't have changed, such as the labels of an enum.
    """
    return frozenset(
        number
        for number, group in groups.items()
        if all(
            column.type_oid not in NAMING_TYPES and (is_unchanged or column.type_oid < FIRST_OWN_TYPE)
            for column in group.columns
        )
    )
