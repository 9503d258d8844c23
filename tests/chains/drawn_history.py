"""Base copies and segments of drawn changes of tables with and without a key, and the rows that the tables then have.

Each of two nodes has a table with a key and two values, and a table without a key. An UPDATE may leave values unchanged
and may change the key; a table may be truncated; some lines are long; in half of the histories both tables get another
column. The last changes are after the cut, and some are of a transaction that the cut excludes.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

import cutline.wal.segments.segments
from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.long_lines import LONG_LINE_BYTES
from cutline.snapshots.fold.schema_at_cut import Conversion, SchemaMapping
from cutline.snapshots.fold.sources import BaseSource, BaseSources, SegmentSource, Source, Sources, truncations
from cutline.storage.digest import digest
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import (
    DELETE,
    EVERY_PARTITION,
    INSERT,
    PARTIAL,
    SEGMENT_SCHEMA,
    TRUNCATE,
    UPSERT,
    create_segment,
    parquet_options,
)

NODES = ("a", "b")
# The numbers of the tables at first, and after they got another column, whose value in older rows is ADDED.
KEYED, LINES, KEYED_LATER, LINES_LATER = 1, 2, 11, 12
MULTISETS = frozenset({LINES, LINES_LATER})
ADDED, MARK = b"as added", b"\\u"
SEGMENTS = 3
MAPPING = SchemaMapping(
    frozenset({KEYED_LATER, LINES_LATER}),
    {KEYED: Conversion(KEYED_LATER, 3, (0, 1, 2, ADDED)), LINES: Conversion(LINES_LATER, 2, (0, 1, ADDED), True)},  # noqa: FBT003
)
COLUMN_COUNTS = {
    (number, group): count
    for number in range(len(NODES))
    for group, count in ((KEYED, 3), (LINES, 2), (KEYED_LATER, 4), (LINES_LATER, 3))
}
KEYS, TEXTS = [b"", b"k", b"key", b"0"], [b"x", b"y", b"\\N", b"z"]
LONG = b"long" * (LONG_LINE_BYTES // 4)
OPERATIONS = (
    ["insert"] * 4
    + ["update"] * 8
    + ["move"] * 4
    + ["delete"] * 2
    + ["add line"] * 4
    + ["delete line"] * 4
    + ["commit"] * 6
)
Line = tuple[bytes, ...]
State = Counter[tuple[int, int, bytes]]


@dataclass(slots=True)
class DrawnTables:
    """The tables of one node: rows by key, lines, and the changes that WAL would contain.

    If `is_whole`, no change leaves values out. With `has_long`, some values of the table with a key are long, and with
    `has_long_lines` some lines of the other.
    """

    draw: random.Random
    rows: dict[bytes, Line] = field(default_factory=dict)
    lines: Counter[Line] = field(default_factory=Counter)
    changes: list[dict[str, Any]] = field(default_factory=list)
    is_altered: bool = False
    is_whole: bool = False
    has_long: bool = True
    has_long_lines: bool = True
    lsn: int = 10
    seq: int = 0
    made: int = 0

    def change(self) -> None:
        """Make one drawn change."""
        key, other = self.draw.choice(KEYS), self.draw.choice(KEYS)
        match self.draw.choice(OPERATIONS):
            case "insert" if key not in self.rows:
                self.rows[key] = (key, *(self._value() for _ in range(3 if self.is_altered else 2)))
                self._log(INSERT, key, self.rows[key])
            case "update" if key in self.rows:
                self._update(key, key)
            case "move" if key in self.rows and other not in self.rows:
                self._update(key, other)
            case "delete" if key in self.rows:
                del self.rows[key]
                self._log(DELETE, key, ())
            case "add line":
                line = (
                    self._text(is_long=self.has_long_lines),
                    self.draw.choice(TEXTS),
                    *([self.draw.choice(TEXTS)] if self.is_altered else []),
                )
                self.lines[line] += 1
                self._log(INSERT, None, line)
            case "delete line" if self.lines:
                line = self.draw.choice(sorted(self.lines))
                self.lines -= Counter([line])
                self._log(DELETE, None, line)
            case "commit":
                self.commit()

    def commit(self) -> None:
        """Begin another transaction."""
        self.lsn, self.seq = self.lsn + 10, 0

    def change_in_vain(self) -> frozenset[Lsn]:
        """Make changes that are not part of the state; return the positions of their transactions."""
        self.commit()
        rows, lines, count = dict(self.rows), self.lines.copy(), len(self.changes)
        for _ in range(5):
            self.change()
        self.rows, self.lines = rows, lines
        self.commit()
        return frozenset(Lsn(one["lsn"]) for one in self.changes[count:])

    def truncate(self, *, keyed: bool) -> None:
        """Truncate one of the tables."""
        (self.rows if keyed else self.lines).clear()
        self._log(TRUNCATE, b"" if keyed else None, (), EVERY_PARTITION)

    def alter(self) -> None:
        """Add a column to both tables."""
        self.is_altered = True
        self.rows = {key: (*row, ADDED) for key, row in self.rows.items()}
        self.lines = Counter({(*line, ADDED): count for line, count in self.lines.items()})

    def stored_rows(self) -> list[dict[str, Any]]:
        """Return the rows of a base copy."""
        keyed = [(KEYED, key, row) for key, row in sorted(self.rows.items())]
        found = [*keyed, *((LINES, b"", line) for line in sorted(self.lines.elements()))]
        return [{"group": group, "partition": 0, "key": key, "row": to_line(row)} for group, key, row in found]

    def state(self, node: int) -> State:
        """Return the rows as they are now: node, group and line."""
        found: State = Counter()
        for group, rows in zip(self._groups, (self.rows.values(), self.lines.elements()), strict=True):
            found.update((node, group, to_line(row)) for row in rows)
        return found

    @property
    def _groups(self) -> tuple[int, int]:
        return (KEYED_LATER, LINES_LATER) if self.is_altered else (KEYED, LINES)

    def _update(self, key: bytes, to: bytes) -> None:
        old = self.rows.pop(key)[1:]
        values = [self._value() if self.is_whole or self.draw.random() < 0.5 else None for _ in old]
        self.rows[to] = (to, *(before if new is None else new for new, before in zip(values, old, strict=True)))
        is_partial = None in values
        if to != key:
            self._log(DELETE, key, (to,) if is_partial else ())
        self._log(PARTIAL if is_partial else UPSERT, to, (to, *(MARK if new is None else new for new in values)))

    def _value(self) -> bytes:
        self.made += 1
        return self._text(is_long=self.has_long) + b"%d" % self.made

    def _text(self, *, is_long: bool) -> bytes:
        return LONG if is_long and self.draw.random() < 0.05 else self.draw.choice(TEXTS[:2])

    def _log(self, op: int, key: bytes | None, row: Line, partition: int = 0) -> None:
        self.seq += 1
        self.changes.append(
            {
                "lsn": self.lsn, "end_lsn": self.lsn, "seq": self.seq, "xid": 1, "group": self._groups[key is None],
                "partition": partition, "key": key or b"", "op": op, "row": to_line(row) if row else b"",
            }
        )  # fmt: skip


def to_line(row: Line) -> bytes:
    """Return the line of a row."""
    return b"\t".join(row) + b"\n"


def store_history(
    store: ObjectStore,
    seed: int,
    changes: int = 120,
    *,
    is_whole: bool = False,
    has_long: bool = True,
    has_long_lines: bool = True,
) -> tuple[Sources, State]:
    """Store base copies and segments of drawn changes; return them, and the rows at the cut.

    For `is_whole`, `has_long` and `has_long_lines` see DrawnTables.
    """
    draw = random.Random(seed)
    mapping = MAPPING if draw.random() < 0.5 else None
    bases: list[BaseSource] = []
    segments: list[SegmentSource] = []
    expected: State = Counter()
    for number in range(len(NODES)):
        tables = DrawnTables(draw, is_whole=is_whole, has_long=has_long, has_long_lines=has_long_lines)
        for _ in range(changes // 4):
            tables.change()
        base, tables.changes = tables.stored_rows(), []
        alter_at, exclude_at, truncate_at = (
            draw.randrange(changes),
            draw.randrange(changes),
            draw.randrange(2 * changes),
        )
        excluded = frozenset[Lsn]()
        for step in range(changes):
            tables.change()
            if step == truncate_at:
                tables.truncate(keyed=draw.random() < 0.5)
            if mapping and step == alter_at:
                tables.commit()
                tables.alter()
            if step == exclude_at:
                excluded = tables.change_in_vain()
        tables.commit()
        expected += tables.state(number)
        position = Lsn(tables.lsn)
        for _ in range(5):
            tables.change()
        found = _store_segments(store, number, tables.changes, position, excluded)
        found = [replace(one, mapping=mapping) for one in found]
        truncated = truncations(store, found)
        segments += [replace(one, truncated=truncated) for one in found]
        for one in _store_bases(store, number, base):
            bases.append(replace(one, truncated=frozenset(truncated), mapping=mapping))
    draw.shuffle(segments)
    return Sources(NODES, BaseSources.of(bases), tuple(segments), MULTISETS, COLUMN_COUNTS), expected


def _store_segments(
    store: ObjectStore, number: int, changes: list[dict[str, Any]], position: Lsn, excluded: frozenset[Lsn]
) -> list[SegmentSource]:
    """Store the changes of a node in several segments, each with whole transactions."""
    found: list[SegmentSource] = []
    positions = sorted({one["lsn"] for one in changes})
    after, node = 0, NODES[number]
    for part in range(SEGMENTS):
        through = positions[-1] + 1 if part == SEGMENTS - 1 else positions[len(positions) * (part + 1) // SEGMENTS]
        rows = [one for one in changes if after <= one["lsn"] < through]
        tables = (pa.Table.from_pylist(rows, SEGMENT_SCHEMA), pa.Table.from_batches([], SEGMENT_SCHEMA))
        place = SegmentRange(node, "op", Lsn(after), Lsn(through))
        with patch.object(cutline.wal.segments.segments, "ROWS_PER_ROW_GROUP", 20):
            segment = create_segment(store, f"wal/{node}", part + 1, place, tables, continued=None).segment
        source = Source(segment.key, node, number, segment.size, segment.digest, segment=segment)
        found.append(SegmentSource(source, segment, position, excluded, {}))
        after = through
    return found


def _store_bases(store: ObjectStore, number: int, rows: list[dict[str, Any]]) -> list[BaseSource]:
    """Store the rows of a base copy in two objects."""
    found: list[BaseSource] = []
    for part in range(2):
        own = rows[part::2]
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(own, BASE_SCHEMA)
        pq.write_table(table, sink, row_group_size=3, **parquet_options(BASE_SCHEMA))
        body = sink.getvalue().to_pybytes()
        key, counts = f"base/{NODES[number]}/{part}", Counter(one["group"] for one in own)
        store.create(key, body)
        source = Source(key, NODES[number], number, len(body), digest(body), counts)
        found.append(BaseSource(source, counts, multisets=MULTISETS))
    return found
