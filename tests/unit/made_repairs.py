"""A shard with two copies in a store, made from a history of transactions, to damage and repair without servers.

Table `item` has a key, `log` has none. Both copies decode the same transactions, from positions of their own, and
divide rows and WAL differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import structs
from msgspec.structs import replace

from cutline.columns.bytes_column import from_list
from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, ObjectWriter, base_table
from cutline.snapshots.operations.object_lists import store_lists_above
from cutline.snapshots.operations.operation import Operation, commit_operation, record_outcome
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    FullSnapshot,
    Increment,
    ObjectList,
    Previous,
    StoredObject,
    split_entries,
)
from cutline.snapshots.records.commit_rules import LARGE_PART, count_listed, definition_counts
from cutline.snapshots.records.documents import base_prefix, ddl_prefix
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.snapshots.repair.work import Work
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from cutline.wal.cut.cut_values import NodeCut, Undecided
from cutline.wal.segments.archive import Segment, SegmentRange, archive_prefix
from cutline.wal.segments.segments import CHANGES, SEGMENT_SCHEMA, create_segment
from tests.unit.made_commits import MARKED_AT, full_commit, increment_commit, unused_url
from tests.unit.made_garbage import StoreBuilder

NAME, NODES = "daily", ("a", "b")
ITEM = Group(1, "public", "item", "default", 1, (Column("id", "int", 23, -1, 0), Column("v", "text", 25, -1, 1)), 2)
LOG = Group(2, "public", "log", "full", 0, (Column("v", "text", 25, -1, 0),), 2)
Row = tuple[int, bytes]


class NoSpark:
    """A SparkSource for work that needs no session."""

    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        raise AssertionError("this work needs no Spark")

    def session(self) -> object:
        raise AssertionError("this work needs no Spark")


def item(key: int, value: str) -> Row:
    return (ITEM.number, f"{key}\t{value}\n".encode())


def log(value: str) -> Row:
    return (LOG.number, f"{value}\n".encode())


@dataclass(frozen=True)
class Change:
    """A change: op, the row, and for a moved key the new key."""

    op: str
    row: Row
    new_key: bytes = b""


@dataclass(frozen=True)
class Transaction:
    """Changes with the position of the commit (or PREPARE) record, whose end is 5 bytes later.

    A `prepared` transaction was committed by a record at that position.
    """

    at: int
    changes: tuple[Change, ...]
    prepared: int | None = None

    @property
    def end(self) -> int:
        return self.at + 5


def upserts(at: int, *rows: Row) -> Transaction:
    return Transaction(at, tuple(Change("U" if row[0] == ITEM.number else "I", row) for row in rows))


def deletes(at: int, *rows: Row) -> Transaction:
    return Transaction(at, tuple(Change("D", row) for row in rows))


def key_of(row: Row) -> bytes:
    return row[1].partition(b"\t")[0] if row[0] == ITEM.number else b""


@dataclass
class MadeShard:
    """The shard: its rows before the first transaction, the transactions, and where both copies begin."""

    rows: Sequence[Row]
    transactions: Sequence[Transaction] = ()
    base: Mapping[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    # The ends of the segments of each node, by commit: the last of each is the end of the commit's WAL.
    borders: Mapping[str, Sequence[Sequence[int]]] = field(default_factory=lambda: {"a": [[1000]], "b": [[1000]]})
    parts: Mapping[str, int] = field(default_factory=lambda: {"a": 3, "b": 2})
    # The objects with large objects of the primary, in an object list.
    large: int = 0
    builder: StoreBuilder = field(default_factory=StoreBuilder)
    location: StoreLocation = field(default_factory=lambda: StoreLocation(unused_url()))

    def __post_init__(self) -> None:
        self.store = self.location.open()
        self.builder.store = self.store
        self.fleet_id = ensure_identity(self.store, self.fleet)[0].fleet_id

    @property
    def fleet(self) -> Fleet:
        nodes = (Node("a", "dbname=a"), Node("b", "dbname=b", "a"))
        return Fleet(Path("fleet.toml"), "shop", self.location, nodes, "exact", GroupRules(), "local[*]", {})

    def work(self) -> Work:
        return Work(self.location, NoSpark(), Silent())  # type: ignore[arg-type]

    def state_at(self, position: int) -> Counter[Row]:
        """The rows after all transactions that were committed before `position`."""
        return apply(Counter(self.rows), [one for one in self.transactions if (one.prepared or one.at) < position])

    def take(self) -> Chain:
        """Commit the full snapshot, and an increment for each further list of borders."""
        commits = len(self.borders["a"])
        chain: Chain | None = None
        for number in range(commits):
            operation = self.builder.begin_create(NAME, number)
            owner = chain.full.operation if chain else operation.id
            segments = {node: self._segments(node, number, owner, chain) for node in NODES}
            position = Lsn(self.borders["a"][number][-1])
            made = full_commit(owner) if number == 0 else increment_commit(number, owner)
            undecided = tuple(
                Undecided(f"g{xid}", Lsn(one.at), Lsn(one.end))
                for xid, one in enumerate(self.transactions, start=1)
                if one.prepared is not None and one.at < position <= one.prepared
            )
            cut_node = NodeCut("a", position, position, position, 0, undecided, (), (), MARKED_AT)
            cut = structs.replace(made.cut, nodes=(cut_node,))
            made = structs.replace(made, snapshot=NAME, operation=operation.id, segments=segments, cut=cut)
            if isinstance(made, FullSnapshot):
                made = structs.replace(
                    made, fleet_id=self.fleet_id, groups={"a": (ITEM, LOG)},
                    base={node: Lsn(at) for node, at in self.base.items()},
                    copied=(*(o for node in NODES for o in self.store_base(operation, node)), self._ddl(operation)),
                    lists=self._large_objects(operation),
                )  # fmt: skip
                counts = count_listed({"a"}, made) | definition_counts(Chain(made))
            else:
                assert chain
                made = structs.replace(
                    made, previous=Previous(chain.last.operation, chain.last.digest), history=chain.next_history
                )
                assert isinstance(made, Increment)
                last = replace(chain, increments=(*chain.increments, made))
                counts = count_listed({"a"}, made) | definition_counts(last)
            made = structs.replace(made, counts=counts)
            commit_operation(self.store, Operation(operation), made)
            record_outcome(self.store, operation, "done")
            chain = read_chain(self.store, NAME)
        assert chain
        return chain

    def store_base(self, operation: Intent, node: str) -> list[StoredObject]:
        """Store the node's base objects: rows are dealt to them in turn, and both tables share objects."""
        rows = sorted(self.state_at(self.base[node]).elements())
        count = self.parts[node]
        beginning = f"{base_prefix(NAME, node, operation.id)}/part-000001"
        writer = ObjectWriter(self.store, BASE_SCHEMA, BASE, node, beginning, 1 << 30, 1 << 30)
        for part in range(count):
            # The copies divide the rows differently.
            some = (
                rows[part::count] if node == "a" else rows[len(rows) * part // count : len(rows) * (part + 1) // count]
            )
            for group in (ITEM, LOG):
                lines = [row for number, row in some if number == group.number]
                if lines:
                    writer.write(base_table(group, from_list(lines)))
                    writer.count(group.number, len(lines), 1)
            writer.close()
        return writer.objects

    def _ddl(self, operation: Intent) -> StoredObject:
        key = f"{ddl_prefix(NAME, 'a', operation.id)}/archive-0123abcd.dump.zst"
        self.store.create(key, b"ddl")
        return StoredObject(key, DDL, "a", 3, digest(self.location.open_raw().read(key)), {})

    def _large_objects(self, operation: Intent) -> tuple[ObjectList, ...]:
        objects: list[StoredObject] = []
        for number in range(self.large):
            key, body = f"{base_prefix(NAME, 'a', operation.id)}/{LARGE_PART}000001-{number:06d}.parquet", b"large"
            self.store.create(key, body)
            found = digest(self.location.open_raw().read(key))
            objects.append(StoredObject(key, LARGE_OBJECTS, "a", len(body), found, {LARGE_OBJECTS_COUNT: 1}))
        return split_entries(store_lists_above(self.store, NAME, operation.id, objects, 0))[1]

    def _segments(self, node: str, number: int, owner: str, chain: Chain | None) -> tuple[Segment, ...]:
        earlier = chain.segments(node) if chain else ()
        after, first = (earlier[-1].through, len(earlier) + 1) if earlier else (Lsn(self.base[node]), 1)
        found = []
        for at, border in enumerate(self.borders[node][number]):
            wal_range = SegmentRange(node, "op", after, Lsn(border))
            tables = decoded(self.transactions, self.base[node], after, border)
            found.append(
                create_segment(
                    self.store, archive_prefix(NAME, node, owner), first + at, wal_range, tables, continued=None
                ).segment
            )
            after = Lsn(border)
        return tuple(found)


def apply(rows: Counter[Row], transactions: Sequence[Transaction]) -> Counter[Row]:
    """Apply changes to rows: rows with a key replace each other, others are counted."""
    keyed = {key_of(row): row for row in rows if row[0] == ITEM.number}
    lines = Counter({row: count for row, count in rows.items() if row[0] == LOG.number})
    for transaction in transactions:
        for change in transaction.changes:
            if change.op == "T":
                keyed, lines = ({}, lines) if change.row[0] == ITEM.number else (keyed, Counter())
            elif change.row[0] == LOG.number:
                lines[change.row] += 1 if change.op == "I" else -1
            elif change.op == "D":
                keyed.pop(key_of(change.row), None)
            else:
                keyed[key_of(change.row)] = change.row
    return Counter(keyed.values()) + lines


def decoded(transactions: Sequence[Transaction], base: int, after: int, border: int) -> tuple[pa.Table, pa.Table]:
    """What a slot that began at `base` yields of the WAL between the positions: changes and events."""
    changes, events = [SEGMENT_SCHEMA.empty_table()], [SEGMENT_SCHEMA.empty_table()]
    for xid, one in enumerate(transactions, start=1):
        gid = None if one.prepared is None else f"g{xid}"
        # A transaction that was prepared before the slot began is decoded when it is committed.
        begin = one.end if one.end > base or one.prepared is None else one.prepared + 5
        if one.prepared is not None and after < one.prepared + 5 <= border and one.prepared + 5 > base:
            events.append(event("K", one.prepared, xid, gid))
        if not after < begin <= border or begin <= base:
            continue
        changes += [row_of(change, one, xid, seq, gid) for seq, change in enumerate(one.changes)]
        events.insert(1 if begin != one.end else len(events), event("P" if gid else "C", one.at, xid, gid))
    return pa.concat_tables(changes), pa.concat_tables(events)


def event(op: str, at: int, xid: int, gid: str | None) -> pa.Table:
    row = {
        "lsn": at, "end_lsn": at + 5, "seq": 1, "xid": xid, "global_id": gid, "op": ord(op), "group": 0,
        "partition": -1, "key": b"", "row": b"",
    }  # fmt: skip
    return pa.Table.from_pylist([row], schema=SEGMENT_SCHEMA)


def row_of(change: Change, one: Transaction, xid: int, seq: int, gid: str | None) -> pa.Table:
    group = ITEM if change.row[0] == ITEM.number else LOG
    table = base_table(group, from_list([change.row[1]]))
    is_delete = change.op == "D" and group is ITEM
    values = table.to_pylist()[0] | {"lsn": one.at, "end_lsn": one.at, "seq": seq * 2, "xid": xid, "global_id": gid}
    values |= {"op": ord(change.op)} | ({"row": change.new_key and change.new_key + b"\n"} if is_delete else {})
    if change.op == "T":
        values |= {"key": b"", "row": b"", "partition": -1}
    return pa.Table.from_pylist([values], schema=SEGMENT_SCHEMA)


def restored(shard: MadeShard, chain: Chain, node: str) -> Counter[Row]:
    """What a fold of the node's copy yields at the chain's last cut, computed row by row."""
    position, (counted_from, pending) = chain.position(node), chain.counted_from(node)
    rows: Counter[Row] = Counter()
    for entry in chain.base_entries(node):
        assert isinstance(entry, StoredObject)
        body = shard.store.read(entry.key)
        assert digest(body) == entry.digest
        dead: set[int] = set()
        if entry.dead is not None:
            numbers = shard.store.read(entry.dead.key)
            assert digest(numbers) == entry.dead.digest
            dead = set(pq.read_table(pa.BufferReader(numbers))["number"].to_pylist())
        for number, row in enumerate(pq.read_table(pa.BufferReader(body)).to_pylist()):
            if number not in dead:
                rows[(row["group"], row["row"])] += 1
    changes: list[dict[str, object]] = []
    for segment in chain.segments(node):
        body = shard.store.read(segment.key)
        assert digest(body) == segment.digest
        changes += [row for row in pq.read_table(pa.BufferReader(body)).to_pylist() if row["op"] in CHANGES]
    keyed = {key_of(row): row for row in rows if row[0] == ITEM.number}
    assert len(keyed) == sum(count for row, count in rows.items() if row[0] == ITEM.number), "a key occurs twice"
    lines = Counter({row: count for row, count in rows.items() if row[0] == LOG.number})
    for change in sorted(changes, key=lambda one: (one["lsn"], one["seq"])):  # type: ignore[arg-type, return-value]
        assert isinstance(change["lsn"], int)
        if change["lsn"] >= position or change["lsn"] in chain.excluded(node):
            continue
        if change["lsn"] < counted_from and change["lsn"] not in pending:
            continue
        row, op = (change["group"], change["row"]), chr(change["op"])  # type: ignore[arg-type]
        if op == "T":
            keyed, lines = ({}, lines) if row[0] == ITEM.number else (keyed, Counter())
        elif row[0] == LOG.number:
            lines[row] += 1 if op == "I" else -1  # type: ignore[index]
        elif op == "D":
            keyed.pop(change["key"], None)  # type: ignore[arg-type]
        else:
            keyed[change["key"]] = row  # type: ignore[index, assignment]
    assert not [row for row, count in lines.items() if count < 0], "a line is deleted more often than it occurs"
    return Counter(keyed.values()) + lines


def damage(shard: MadeShard, key: str, body: bytes | None = b"damaged") -> None:
    """Replace the object's bytes, as a disk would; None removes it."""
    shard.store.delete(key)
    if body is not None:
        shard.store.create(key, body)
