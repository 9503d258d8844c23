"""A chain of a shard and its standby whose tables changed their definitions, with states written by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from cutline.columns.bytes_column import from_list, partition_of
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, base_table
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DefinitionChanges, StoredObject
from cutline.storage.digest import digest
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Definition, Segment, SegmentRange
from cutline.wal.segments.segments import (
    COMMIT,
    EVERY_PARTITION,
    NO_GROUP,
    SEGMENT_SCHEMA,
    create_segment,
    parquet_options,
)
from tests.unit.made_commits import full_commit, increment_commit

NODES = ("a", "b")
STRANGER = 77  # the table of a failed attempt, which only the segments define
# (lsn, number, op, key, line without its newline); the changes of a transaction have the same lsn.
Change = tuple[int, int, str, str, str]


def group(number: int, table: str, columns: str, missing: Mapping[int, str] | None = None, key_width: int = 1) -> Group:
    """Return a definition whose columns have these numbers, in stored order."""
    found = tuple(
        Column(f"c{one}", "text", 25, -1, place, int(one), (missing or {}).get(int(one)))
        for place, one in enumerate(columns)
    )
    return Group(number, "s", table, "default" if key_width else "full", key_width, found, 4)


# Definitions 1 to 7 belong to the full snapshot. `person` loses its second column and gains a fourth, later a fifth.
PERSON, PERSON_AGE, PERSON_MAIL = (group(1, "person", "123"), group(11, "person", "134", {4: "7"}),
                                   group(21, "person", "1345"))  # fmt: skip
LOG, LOG_LEVEL = group(2, "log", "12", key_width=0), group(12, "log", "123", {3: "info"}, key_width=0)
DROPPED = group(3, "dropped", "12")
SWAPPED, SWAPPED_COPIED, SWAPPED_MORE = (group(4, "swapped", "12"), group(14, "swapped", "123"),
                                       group(24, "swapped", "1234", {4: "more"}))  # fmt: skip
CUT, CUT_LATER = group(5, "cut", "12"), group(25, "cut", "123", {3: "x"})
CUT_LAST, CUT_LAST_LATER = group(6, "cut_last", "12"), group(26, "cut_last", "12")
EMPTY, EMPTY_LATER = group(7, "empty", "", key_width=0), group(27, "empty", "1", {1: "was empty"}, key_width=0)
NEW = group(28, "new", "12")

BASE: dict[Group, list[str]] = {
    PERSON: ["1\tann\tbio1", "2\tbob\tbio2", "3\tcid\tbio3", "4\tdan\tbio4", "5\teve\tbio5"],
    LOG: ["t1\tx", "t1\tx", "t2\ty"],
    DROPPED: ["1\to"],
    SWAPPED: ["1\ts1", "2\ts2"],
    CUT: ["1\tbase", "2\tbase"],
    CUT_LAST: ["1\tbase"],
    EMPTY: ["", ""],
}
CHANGES: list[list[Change]] = [
    [(50, 1, "U", "2", "2\tbob\tfifty"), (51, 6, "U", "2", "2\tof segment 1")],
    [
        (110, 1, "u", "3", "3\tcyd\t\\u"),
        (111, 1, "U", "4", "4\tdora\tbio 4"),
        (120, 11, "u", "1", "1\t\\u\t30"),
        (121, 11, "U", "6", "6\tbio6\t60"),
        (122, 11, "D", "5", "7\n"),
        (122, 11, "u", "7", "7\t\\u\t70"),
        (130, 4, "U", "2", "2\tbefore the copy"),
        (135, 2, "I", "", "t3\tz"),
        (140, 12, "I", "", "t4\tq\twarn"),
        (142, 12, "D", "", "t1\tx\tinfo"),
        (145, 14, "U", "9", "9\tbefore both copies\tw"),
        (155, 14, "U", "1", "1\tbetween the copies\tw"),
        (170, 14, "U", "2", "2\tafter the copies\tw2"),
        (172, STRANGER, "U", "8", "8\tnobody knows"),
        (173, STRANGER, "T", "", ""),
        (180, 5, "T", "", ""),
        (181, 5, "U", "3", "3\tlater"),
    ],
    [
        (210, 21, "u", "3", "3\t\\u\t41\tmail3"),
        (211, 3, "U", "1", "1\tgone by now"),
        (220, 6, "U", "3", "3\tbefore the last truncate"),
        (230, 26, "T", "", ""),
        (231, 26, "U", "4", "4\tafter it"),
        (240, 27, "D", "", "was empty"),
        (241, 27, "I", "", "no more"),
        (245, 28, "U", "1", "1\tbefore it was copied"),
        (260, 28, "U", "2", "2\tsince"),
        (270, 14, "U", "2", "2\tstill under 14\tw2"),
        (271, 24, "U", "3", "3\tunder 24\tw3\tm3"),
    ],
]
# The tables that were copied again, with the LSN and rows of each copy.
COPIED = {
    "a": {14: (150, ["1\ts1\tw", "2\tbefore the copy\tw"]), 28: (250, ["1\tcopied"])},
    "b": {14: (160, ["1\tbetween the copies\tw", "2\tbefore the copy\tw"]), 28: (255, ["1\tcopied"])},
}
STATES = [
    {
        "person": ["1\tann\tbio1", "2\tbob\tfifty", "3\tcid\tbio3", "4\tdan\tbio4", "5\teve\tbio5"],
        "log": ["t1\tx", "t1\tx", "t2\ty"],
        "dropped": ["1\to"],
        "swapped": ["1\ts1", "2\ts2"],
        "cut": ["1\tbase", "2\tbase"],
        "cut_last": ["1\tbase", "2\tof segment 1"],
        "empty": ["", ""],
    },
    {
        "person": [
            "1\tbio1\t30", "2\tfifty\t7", "3\tbio3\t7", "4\tbio 4\t7", "6\tbio6\t60", "7\tbio5\t70",
        ],
        "log": ["t1\tx\tinfo", "t2\ty\tinfo", "t3\tz\tinfo", "t4\tq\twarn"],
        "dropped": ["1\to"],
        "swapped": ["1\tbetween the copies\tw", "2\tafter the copies\tw2"],
        "cut": ["3\tlater"],
        "cut_last": ["1\tbase", "2\tof segment 1"],
        "empty": ["", ""],
    },
    {
        "person": [
            "1\tbio1\t30\t\\N", "2\tfifty\t7\t\\N", "3\tbio3\t41\tmail3", "4\tbio 4\t7\t\\N", "6\tbio6\t60\t\\N",
            "7\tbio5\t70\t\\N",
        ],
        "log": ["t1\tx\tinfo", "t2\ty\tinfo", "t3\tz\tinfo", "t4\tq\twarn"],
        "swapped": ["1\tbetween the copies\tw\tmore", "2\tstill under 14\tw2\tmore", "3\tunder 24\tw3\tm3"],
        "cut": ["3\tlater\tx"],
        "cut_last": ["4\tafter it"],
        "empty": ["no more", "was empty"],
        "new": ["1\tcopied", "2\tsince"],
    },
]  # fmt: skip


def store_base(store: ObjectStore, node: str, name: str, rows: Mapping[Group, list[str]]) -> StoredObject:
    """Store one base object with these rows."""
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, BASE_SCHEMA, **parquet_options(BASE_SCHEMA)) as writer:
        for definition, lines in rows.items():
            writer.write_table(base_table(definition, from_list([line.encode() + b"\n" for line in lines])))
    body = sink.getvalue().to_pybytes()
    key = f"base/{node}/{name}"
    store.create(key, body)
    counts = {definition.number: len(lines) for definition, lines in rows.items()}
    return StoredObject(key, "base", node, len(body), digest(body), counts)


def change_table(changes: list[Change]) -> pa.Table:
    definitions = {one.number: one for one in (*BASE, PERSON_AGE, PERSON_MAIL, LOG_LEVEL, SWAPPED_COPIED, SWAPPED_MORE,
                                               CUT_LATER, CUT_LAST_LATER, EMPTY_LATER, NEW)}  # fmt: skip
    rows: list[dict[str, Any]] = []
    numbers = Counter[int]()
    for lsn, number, op, key, line in changes:
        definition = definitions.get(number, PERSON)
        has_line = op in "IUu" or definition.is_multiset
        row = (line + "\n" if has_line and op != "T" else line).encode()
        placed = row if definition.is_multiset else key.encode()
        partition = EVERY_PARTITION if op == "T" else int(partition_of(from_list([placed]), definition.partitions)[0])
        rows.append({
            "lsn": lsn, "end_lsn": lsn, "seq": numbers[lsn], "xid": lsn, "op": ord(op), "group": number,
            "partition": partition, "key": key.encode(), "row": row,
        })  # fmt: skip
        numbers[lsn] += 1
    return pa.Table.from_pylist(rows, SEGMENT_SCHEMA)


def commit_table(changes: list[Change]) -> pa.Table:
    """Return the ends of the changes' transactions."""
    every = {"seq": 0, "op": COMMIT, "group": NO_GROUP, "partition": 0, "key": b"", "row": b""}
    rows = [every | {"lsn": lsn, "end_lsn": lsn + 1, "xid": lsn} for lsn in sorted({change[0] for change in changes})]
    return pa.Table.from_pylist(rows, SEGMENT_SCHEMA)


AlterChanges = Callable[[str, int, list[Change]], list[Change]]


def build_chain(store: ObjectStore, alter: AlterChanges = lambda node, number, changes: changes) -> Chain:
    """Build the chain and store its objects; `alter` may replace the changes of a node's segment."""
    segments: list[dict[str, tuple[Segment, ...]]] = [{} for _ in CHANGES]
    for number, changes in enumerate(CHANGES):
        for node in NODES:
            held = SegmentRange(node, "op", Lsn(number * 100), Lsn(number * 100 + 100))
            tables = (change_table(alter(node, number, changes)), commit_table(changes))
            unlisted = (Definition(STRANGER, group(STRANGER, "stranger", "12")),)
            stored = create_segment(store, f"wal/{node}", number + 1, held, tables, unlisted, continued=None)
            segments[number][node] = (stored.segment,)
    full = replace(
        full_commit(position=100),
        segments=segments[0],
        groups={"a": tuple(BASE)},
        copied=tuple(store_base(store, node, "full", BASE) for node in NODES),
    )
    first, second = (
        replace(increment_commit(number, position=number * 100 + 100), segments=segments[number]) for number in (1, 2)
    )
    copies = {
        (node, number): (at, store_base(store, node, f"{number}", {definition: rows}))
        for node, found in COPIED.items()
        for number, (at, rows) in found.items()
        for definition in (SWAPPED_COPIED if number == 14 else NEW,)
    }

    def definition_changes(
        groups: tuple[Group, ...], gone: tuple[int, ...], successions: dict[int, int], copied: int
    ) -> DefinitionChanges:
        return DefinitionChanges(
            groups={"a": groups},
            gone={"a": gone},
            successions={"a": successions},
            begun={
                node: {**dict.fromkeys(successions, Lsn(1)), copied: Lsn(copies[node, copied][0])} for node in NODES
            },
            objects=tuple(copies[node, copied][1] for node in NODES),
        )

    in_first = definition_changes((PERSON_AGE, LOG_LEVEL, SWAPPED_COPIED), (1, 2, 4), {11: 1, 12: 2}, 14)
    first = replace(first, definition_changes=in_first)
    second = replace(
        second,
        definition_changes=definition_changes(
            (PERSON_MAIL, SWAPPED_MORE, CUT_LATER, CUT_LAST_LATER, EMPTY_LATER, NEW),
            (11, 3, 14, 5, 6, 7),
            {21: 11, 24: 14, 25: 5, 26: 6, 27: 7},
            28,
        ),
    )
    return Chain(full, (first, second))
