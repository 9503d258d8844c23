"""Chains of several shards, written event by event: each cut is resolved as a create does it, from intact archives.

Commit k covers the WAL from 1000 * k to 1000 * (k + 1) on every node; its start marker is at + 900, its finish marker
at + 950. Events are 10 bytes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from msgspec import structs

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.storage.store import ObjectStore
from cutline.wal.cut.cut_values import Cut, InDoubt, Undecided
from cutline.wal.cut.resolve import NodeWindow, resolve
from cutline.wal.segments.archive import Segment, SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment
from tests.unit.made_commits import MARKED_AT, full_commit, identity, increment_commit

PER_COMMIT, START, FINISH = 1000, 900, 950
Row = dict[str, Any]


def row(op: str, lsn: int, gid: str | None, *, participants: str = "", xid: int | None = None) -> Row:
    """An event; the xid of a COMMIT PREPARED is that of its PREPARE."""
    return {
        "lsn": lsn, "end_lsn": lsn + 10, "seq": 0, "xid": lsn if xid is None else xid, "global_id": gid, "op": ord(op),
        "group": 0, "partition": -1, "key": participants.encode(), "row": b"",
    }  # fmt: skip


def transaction(gid: str, lsn: int, *, participants: str = "", committed: int | None = None) -> list[Row]:
    """A prepared transaction, and its COMMIT PREPARED, by default 50 bytes after it."""
    settled = lsn + 50 if committed is None else committed
    return [row("P", lsn, gid, participants=participants), row("K", settled, gid, xid=lsn)]


def rolled_back(gid: str, lsn: int, *, participants: str = "") -> list[Row]:
    """A prepared transaction that is rolled back; the lsn of the ROLLBACK PREPARED is the end of the PREPARE."""
    return [
        row("P", lsn, gid, participants=participants),
        row("R", lsn + 10, gid, xid=lsn) | {"end_lsn": lsn + 60},
    ]


def table(rows: Sequence[Row]) -> pa.Table:
    return pa.Table.from_pylist(sorted(rows, key=lambda one: one["end_lsn"]), schema=SEGMENT_SCHEMA)


@dataclass(slots=True)
class MadeShards:
    """The events on each node by name; standbys have their own, given by `backup_of`.

    By default, all slots existed before the first event.
    """

    events: Mapping[str, Sequence[Row]]
    backup_of: Mapping[str, str] = field(default_factory=dict)
    commits: int = 1
    base: Mapping[str, int] = field(default_factory=dict)
    slots_complete_at: Mapping[str, int] | None = None

    def chain(
        self,
        store: ObjectStore,
        is_lost: Callable[[str, Row], bool] = lambda *_: False,
        segments: int = 1,
    ) -> Chain:
        """Store the archives, without the events that are lost, in so many segments each; return the chain.

        The cuts are those of the intact archives.
        """
        shards = [node for node in self.events if node not in self.backup_of]
        previous = {shard: Lsn(self.base.get(shard, 0)) for shard in shards}
        undecided: dict[str, tuple[Undecided, ...]] = dict.fromkeys(shards, ())
        in_doubt: dict[str, tuple[InDoubt, ...]] = dict.fromkeys(shards, ())
        made: list[Commit] = []
        numbers = dict.fromkeys(self.events, 0)
        for commit in range(self.commits):
            begin = commit * PER_COMMIT
            windows = {
                shard: NodeWindow(
                    previous[shard], Lsn(begin + START), Lsn(begin + FINISH), table(self.events[shard]), MARKED_AT,
                    undecided[shard], in_doubt[shard],
                )
                for shard in shards
            }  # fmt: skip
            cut = resolve(windows)
            previous = {node.node: node.position for node in cut.nodes}
            undecided = {node.node: node.undecided for node in cut.nodes}
            in_doubt = {node.node: node.in_doubt for node in cut.nodes}
            listed: dict[str, tuple[Segment, ...]] = {}
            for node, rows in self.events.items():
                kept = [one for one in rows if not is_lost(node, one)]
                listed[node] = tuple(self._segments(store, node, kept, begin, numbers, segments))
            made.append(self._commit(commit, cut, listed))
        return Chain(made[0], tuple(made[1:]))  # type: ignore[arg-type]

    def _segments(
        self, store: ObjectStore, node: str, rows: list[Row], begin: int, numbers: dict[str, int], count: int
    ) -> list[Segment]:
        size = PER_COMMIT // count
        made: list[Segment] = []
        for after in range(begin, begin + PER_COMMIT, size):
            numbers[node] += 1
            wal_range = SegmentRange(node, "op", Lsn(after), Lsn(after + size))
            held = table([one for one in rows if after < one["end_lsn"] <= after + size])
            made.append(
                create_segment(store, node, numbers[node], wal_range, (table([]), held), continued=None).segment
            )
        return made

    def _commit(self, number: int, cut: Cut, segments: Mapping[str, tuple[Segment, ...]]) -> Commit:
        made = increment_commit(number) if number else full_commit()
        record = structs.replace(
            made.cut, nodes=cut.nodes, global_transactions=cut.global_transactions,
            included_early=cut.included_early, in_flight=cut.in_flight,
        )  # fmt: skip
        if number:
            return structs.replace(made, cut=record, segments=dict(segments))
        nodes = tuple(identity(node, self.backup_of.get(node)) for node in self.events)
        base = {node: Lsn(self.base.get(node, ORIGIN)) for node in self.events}
        complete_at = dict.fromkeys(self.events, 0) if self.slots_complete_at is None else self.slots_complete_at
        complete = {shard: Lsn(position) for shard, position in complete_at.items()}
        return structs.replace(
            made, cut=record, segments=dict(segments), baseline=nodes, base=base, slots_complete_at=complete
        )
