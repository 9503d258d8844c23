"""Key history: where a row's unchanged values are found, compared with a randomly changed table that keeps all."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from cutline.columns.bytes_column import from_list, offsets_of
from cutline.snapshots.fold.key_history import AFTER_ALL, BASE_LSN, BEFORE_ALL, Images, build_key_history, merge
from cutline.wal.segments.segments import DELETE, PARTIAL, UPSERT

PLACE = [("node", pa.int32()), ("group", pa.int32())]
WANTED = pa.schema([*PLACE, ("key", pa.binary())])
MOVES = pa.schema([*PLACE, ("key", pa.binary()), ("row", pa.binary()), ("lsn", pa.int64()), ("seq", pa.int64())])
MARK = b"\\u"
KEYS = [b"", b"b", b"c"]
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "update", "move", "touch"]),
        st.sampled_from(KEYS),
        st.sampled_from(KEYS),
        st.sampled_from([(True, True), (True, False), (False, True), (False, False)]),
        st.booleans(),
    ),
    max_size=30,
)


@dataclass
class RememberedTable:
    """Rows of a key and two values, and the changes that WAL would contain: (lsn, seq, op, key, row)."""

    rows: dict[bytes, tuple[bytes, bytes]]
    changes: list[tuple[int, int, int, bytes, bytes]] = field(default_factory=list)
    lsn: int = 10
    seq: int = 0
    fresh: int = 0

    def apply(self, what: str, key: bytes, to: bytes, written: tuple[bool, bool], *, commits: bool) -> None:
        if commits:
            self.lsn, self.seq = self.lsn + 10, 0
        if what == "insert" and key not in self.rows:
            self._write(key, (None, None), (True, True))
        elif what == "delete" and key in self.rows:
            del self.rows[key]
            self._log(DELETE, key, b"")
        elif what in ("update", "touch") and key in self.rows:
            self._write(key, self.rows[key], written if what == "update" else (False, False))
        elif what == "move" and key in self.rows and to not in self.rows:
            old = self.rows.pop(key)
            self._log(DELETE, key, b"" if all(written) else to + b"\n")
            self._write(to, old, written)

    def _write(self, key: bytes, old: tuple[bytes | None, ...], written: tuple[bool, bool]) -> None:
        self.fresh += 1
        values = [b"%d" % self.fresh if new else bytes(value or b"") for value, new in zip(old, written, strict=True)]
        self.rows[key] = (values[0], values[1])
        shown = [value if new else MARK for value, new in zip(values, written, strict=True)]
        self._log(UPSERT if all(written) else PARTIAL, key, b"\t".join([key, *shown]) + b"\n")

    def _log(self, op: int, key: bytes, row: bytes) -> None:
        self.changes.append((self.lsn, self.seq, op, key, row))
        self.seq += 1


def fold(base: dict[bytes, tuple[bytes, bytes]], table: RememberedTable) -> dict[bytes, bytes]:
    """Compute the rows as a fold does: the last image of every key, completed along its key history."""
    lines = {key: b"\t".join([key, *values]) + b"\n" for key, values in base.items()}
    images = [(BASE_LSN, 0, UPSERT, key, line) for key, line in lines.items()] + table.changes
    latest = {change[3]: change for change in sorted(images)}
    state = {key: change[4] for key, change in latest.items() if change[2] == UPSERT}
    wanted = [key for key, change in latest.items() if change[2] == PARTIAL]
    moves = [
        {"node": 0, "group": 1, "key": key, "row": row[:-1], "lsn": lsn, "seq": seq}
        for lsn, seq, op, key, row in table.changes
        if op == DELETE and row
    ]
    entries = build_key_history(
        pa.Table.from_pylist([{"node": 0, "group": 1, "key": key} for key in wanted], WANTED),
        pa.Table.from_pylist(moves, MOVES),
    ).to_pylist()
    for target in wanted:
        history = sorted(
            (lsn, seq, b"" if op == DELETE else row)
            for one in entries
            if one["target"] == target
            for lsn, seq, op, key, row in images
            if key == one["key"] and (one["low_lsn"], one["low_seq"]) <= (lsn, seq) < (one["high_lsn"], one["high_seq"])
        )
        column = from_list([line for *_, line in history])
        merged, complete = merge(Images(column, offsets_of(np.array([len(history)], np.int64))), 3)
        assert complete.all()
        state[target] = merged.to_arrow()[0].as_py()
    return state


@given(st.sets(st.sampled_from(KEYS)), OPERATIONS)
def test_every_row_is_completed_from_its_own_earlier_images(
    present: set[bytes], operations: list[tuple[str, bytes, bytes, tuple[bool, bool], bool]]
) -> None:
    base = {key: (b"base", b"of " + key) for key in sorted(present)}
    table = RememberedTable(dict(base))
    for what, key, to, written, commits in operations:
        table.apply(what, key, to, written, commits=commits)
    assert fold(base, table) == {key: b"\t".join([key, *values]) + b"\n" for key, values in table.rows.items()}


def test_a_row_that_moved_twice_lived_under_three_keys() -> None:
    moves = [
        {"node": 0, "group": 1, "key": b"a", "row": b"b", "lsn": 20, "seq": 0},
        {"node": 0, "group": 1, "key": b"b", "row": b"c", "lsn": 30, "seq": 2},
        {"node": 1, "group": 1, "key": b"x", "row": b"c", "lsn": 40, "seq": 0},
    ]
    wanted = pa.Table.from_pylist([{"node": 0, "group": 1, "key": b"c"}], WANTED)
    found = build_key_history(wanted, pa.Table.from_pylist(moves, MOVES)).to_pylist()
    spans = [(row["key"], (row["low_lsn"], row["low_seq"]), (row["high_lsn"], row["high_seq"])) for row in found]
    assert spans == [(b"c", (30, 2), AFTER_ALL), (b"b", (20, 0), (30, 2)), (b"a", BEFORE_ALL, (20, 0))]
    assert {row["target"] for row in found} == {b"c"}


def test_the_key_history_of_no_rows_is_empty() -> None:
    assert len(build_key_history(WANTED.empty_table(), MOVES.empty_table())) == 0


def test_a_key_that_another_row_takes_later_is_traced_to_the_row_that_left_it() -> None:
    # a becomes k at 1, k becomes b at 2, c becomes k at 3: the row b was k before, and a before that, but never c.
    columns = {"key": [b"a", b"k", b"c"], "row": [b"k", b"b", b"k"], "lsn": [1, 2, 3], "seq": [0, 0, 0]}
    moves = pa.table({"node": [0] * 3, "group": [1] * 3, **columns}, schema=MOVES)
    wanted = pa.table({"node": [0], "group": [1], "key": [b"b"]}, schema=WANTED)
    lived = [(one["key"], one["low_lsn"], one["high_lsn"]) for one in build_key_history(wanted, moves).to_pylist()]
    assert lived == [(b"b", 2, AFTER_ALL[0]), (b"k", 1, 2), (b"a", BEFORE_ALL[0], 1)]
