"""What was written since a cut, and what the comparison of a database with a cut proves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cutline.check.live import changes_since
from cutline.check.live.changes_since import ChangesSince, ChangesUnknownError, Touched
from cutline.check.live.cut_comparison import TableVerdict, entry_of, is_continued, judge_rows, place_text
from cutline.check.live.entries import (
    ENTRY_SCHEMA,
    FILES,
    NO_PLACE,
    OVERFLOW,
    PLACES_MAX,
    SUMMARY_SCHEMA,
    TOTALS,
    Summary,
    compared_rows,
    entry_batch,
    fact_batch,
    merged,
)  # fmt: skip
from cutline.check.live.pages import LineAt
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.fold.schema_at_cut import SchemaMapping, to_schema_at_cut
from cutline.snapshots.fold.sources import SegmentSource
from cutline.wal.segments.segments import COMMIT, DELETE, INSERT, PREPARE, SEGMENT_SCHEMA, TRUNCATE, UPSERT


def rows_of(*rows: tuple[int, int, int, int]) -> pa.Table:
    """Return compared rows, given as group, equal, left and more; the identity is the row's number."""
    values = [
        {"node": 0, "group": group, "partition": 0, "identity": number, "equal": equal, "left": left, "more": more,
         "places": None, "entries": None, "problem": None}
        for number, (group, equal, left, more) in enumerate(rows)
    ]  # fmt: skip
    return pa.Table.from_pylist(values, SUMMARY_SCHEMA)


def test_rows_that_nobody_wrote_have_changed_are_lost_or_unknown() -> None:
    rows = rows_of((1, 0, 1, 1), (1, 0, 1, 0), (1, 0, 0, 1), (1, 0, 1, 1), (1, 1, 0, 1))
    written = np.array([False, False, False, True, True])
    verdict, wrong = judge_rows(rows, written, is_multiset=False)
    assert verdict == TableVerdict(written=2, changed=1, lost=1, unknown=1)
    assert (verdict.wrong, wrong["identity"].to_pylist()) == (3, [0, 1, 2])


def test_lines_without_a_key_are_counted() -> None:
    verdict, _ = judge_rows(rows_of((2, 5, 3, 0), (2, 0, 0, 2)), np.zeros(2, np.bool_), is_multiset=True)
    assert verdict == TableVerdict(lost=3, unknown=2)


def entries_of(*rows: tuple[int, int, int, int, int]) -> list[pa.RecordBatch]:
    """Return entries, given as group, identity, entry, stored and live, in batches of two rows."""
    values = [
        {"node": 0, "group": group, "partition": 0, "identity": identity, "entry": entry, "stored": stored,
         "live": live, "place": 7 if live else NO_PLACE, "problem": None}
        for group, identity, entry, stored, live in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(values, ENTRY_SCHEMA).to_batches(max_chunksize=2)


def test_rows_are_compared_by_their_identity() -> None:
    batches = entries_of(
        (1, 5, 50, 1, 0), (1, 5, 50, 0, 1),  # equal
        (1, 6, 60, 1, 0), (1, 6, 61, 0, 1),  # other contents
        (1, 7, 70, 1, 0), (1, 8, 80, 0, 1),  # on one side only
        (2, 5, 50, 3, 0), (2, 5, 50, 0, 1), (2, 5, 50, 0, 4),  # a line that occurs more often
    )  # fmt: skip
    found = compared_rows(pa.Table.from_batches(batches)).to_pylist()
    names = ("group", "identity", "equal", "left", "more", "places", "entries")
    assert [tuple(row[name] for name in names) for row in found] == [
        (1, 5, 1, 0, 0, [], []), (1, 6, 0, 1, 1, [7], [61]), (1, 7, 0, 1, 0, [], []), (1, 8, 0, 0, 1, [7], [80]),
        (2, 5, 3, 0, 2, [7, 7], [50, 50]),
    ]  # fmt: skip
    assert len(compared_rows(ENTRY_SCHEMA.empty_table())) == 0


def test_equal_lines_are_counted_before_they_are_sent() -> None:
    (batch,) = pa.Table.from_batches(entries_of((2, 5, 50, 1, 0), (2, 5, 50, 1, 0), (2, 6, 60, 1, 0))).combine_chunks(
    ).to_batches()  # fmt: skip
    found = sorted((row["identity"], row["stored"], row["live"]) for row in merged(batch).to_pylist())
    assert found == [(5, 2, 0), (6, 1, 0)]
    assert len(merged(batch.slice(0, 0))) == 0


def test_places_of_equal_lines_are_kept_up_to_a_number() -> None:
    count = PLACES_MAX + 3
    identity = np.array([5] * count + [6], np.uint64)
    batch = entry_batch(0, np.full(count + 1, 2), np.zeros(count + 1), identity, identity, live=np.arange(count + 1))
    found = merged(batch).to_pylist()
    assert [row["live"] for row in found] == [1] * (PLACES_MAX - 1) + [4, 1]
    assert [row["place"] for row in found] == [*range(PLACES_MAX), count]
    (first, second) = compared_rows(pa.Table.from_batches([merged(batch)])).to_pylist()
    assert (first["more"], first["places"], second["places"]) == (count, list(range(PLACES_MAX)), [count])


def test_a_summary_has_the_rows_that_differ_and_the_totals() -> None:
    batches = entries_of((1, 1, 10, 1, 1), (1, 2, 20, 1, 0), (2, 3, 30, 3, 4), (1, 4, 40, 1, 1), (1, 5, 50, 0, 2))
    batches.append(fact_batch(0, FILES, 1, 16384))
    found = pa.Table.from_batches(list(Summary(10).of(batches))).to_pylist()
    assert [(row["group"], row["identity"]) for row in found if row["group"] > 0] == [(1, 2), (1, 5), (2, 3)]
    totals = {row["partition"]: row["equal"] for row in found if row["group"] == TOTALS}
    assert totals == {1: 2, 2: 3}
    assert [(row["partition"], row["identity"]) for row in found if row["group"] == FILES] == [(1, 16384)]
    # With room for two rows, the third is left out, and its table is named.
    found = pa.Table.from_batches(list(Summary(2).of(batches))).to_pylist()
    assert [(row["group"], row["identity"]) for row in found if row["group"] > 0] == [(1, 2), (1, 5)]
    assert [row["partition"] for row in found if row["group"] == OVERFLOW] == [2]


def changes(*rows: tuple[int, int, bytes, bytes]) -> pa.Table:
    """Return changes, given as op, group, key and row."""
    values = [
        {"lsn": 1, "end_lsn": 2, "seq": 1, "xid": 3, "global_id": None, "op": op, "group": group, "partition": 0,
         "key": key, "row": row}
        for op, group, key, row in rows
    ]  # fmt: skip
    return pa.Table.from_pylist(values, SEGMENT_SCHEMA)


def test_rows_are_written_by_their_keys_or_lines_and_all_at_once_by_a_truncate() -> None:
    touched = Touched()
    touched.add(changes((UPSERT, 1, b"7", b"7\tx\n"), (DELETE, 2, b"", b"line\n")))
    touched.add(changes((TRUNCATE, 3, b"", b""), (UPSERT, 1, b"8", b"8\ty\n")))
    touched.add(changes())
    hashes = xxhash64(from_list([b"7", b"8", b"9", b"line\n"]))
    assert touched.covers(1, hashes).tolist() == [True, True, False, False]
    assert touched.covers(2, hashes).tolist() == [False, False, False, True]
    assert touched.covers(3, hashes).all()
    assert not touched.covers(4, hashes).any()


def test_hashes_of_lines_are_kept_only_where_they_may_identify_rows_and_not_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    touched = Touched()
    touched.add(changes((UPSERT, 1, b"7", b"7\tx\n"), (INSERT, 2, b"", b"line\n"), (DELETE, 1, b"8", b"9\n")))
    hashes = xxhash64(from_list([b"7", b"8", b"9\n", b"7\tx\n"]))
    assert touched.covers(1, hashes).tolist() == [True, True, True, False]
    assert touched.covers(2, xxhash64(from_list([b"line\n"]))).all()
    monkeypatch.setattr(changes_since, "HASHES_MAX", 10)
    # The same keys again and again take no more room; new ones do.
    for _ in range(30):
        touched.add(changes((UPSERT, 1, b"7", b"7\ty\n")))
    many = changes(*((UPSERT, 1, str(number).encode(), b"x\n") for number in range(30)))
    with pytest.raises(ChangesUnknownError, match="rows were written since the cut: take an increment"):
        touched.add(many)


class Archive:
    """Segments of ten bytes of WAL each, one for each transaction, which is given as op and xid."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, transactions: list[tuple[int, int]]) -> None:
        self.transactions = transactions
        self.read: list[int] = []
        # The first segment that a chain lists which begins with a merge, and the position of its base.
        self.first_of_merge, self.merged_at = 0, 0
        monkeypatch.setattr(changes_since, "segment_sources", lambda chain, *_: self.sources(chain))
        monkeypatch.setattr(changes_since, "read_shown", lambda *_: self.chain())
        monkeypatch.setattr(
            changes_since, "read_events", lambda _, segment: self.table(segment.number, *self.event(segment))
        )
        monkeypatch.setattr(changes_since, "read_at_cut", lambda _, source, __: self.changes_of(source))

    def sources(self, chain: Any) -> list[Any]:
        numbers = range(self.first_of_merge if chain.beginning else 0, len(self.transactions))
        mapping = SchemaMapping(frozenset({1}), counted_from=Lsn(self.merged_at))
        segments = [SimpleNamespace(number=number, after=10 * number, open=None) for number in numbers]
        return [
            SegmentSource(None, segment, Lsn(0), frozenset(), {}, mapping)  # type: ignore[arg-type]
            for segment in segments
        ]

    def chain(self, *, is_merged: bool = False, excluded: frozenset[int] = frozenset()) -> Any:
        last = 10 * len(self.transactions)
        return SimpleNamespace(
            name="daily", last=SimpleNamespace(increment=1), beginning="merge" if is_merged else None,
            position=lambda _: last, excluded=lambda _: excluded,
        )  # fmt: skip

    def event(self, segment: Any) -> tuple[int, int]:
        self.read.append(segment.number)
        return self.transactions[segment.number]

    def table(self, number: int, op: int, xid: int) -> pa.Table:
        row = {"lsn": 10 * number + 5, "end_lsn": 10 * number + 6, "seq": 1, "xid": xid, "global_id": None, "op": op,
               "group": 1, "partition": 0, "key": str(number).encode(), "row": b"x"}  # fmt: skip
        return pa.Table.from_pylist([row], SEGMENT_SCHEMA)

    def changes_of(self, source: SegmentSource) -> list[pa.Table]:
        number = source.segment.number
        return list(to_schema_at_cut(self.table(number, UPSERT, self.transactions[number][1]), source.mapping))

    def search(
        self, running: set[int], excluded: frozenset[int] = frozenset(), *, is_merged: bool = False
    ) -> tuple[bool, list[int]]:
        """Return whether everything is known, and the segments whose changes count as written."""
        chain = self.chain(is_merged=is_merged, excluded=excluded)
        since = ChangesSince(
            SimpleNamespace(id="s1"), chain, {}, {}, frozenset(running), (), "", None  # type: ignore[arg-type]
        )  # fmt: skip
        touched = Touched()
        is_known = since.add_unseen(None, touched)  # type: ignore[arg-type]
        keys = [str(number).encode() for number in range(len(self.transactions))]
        return is_known, np.flatnonzero(touched.covers(1, xxhash64(from_list(keys)))).tolist()


def test_a_transaction_that_no_session_sees_yet_is_found_however_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(monkeypatch, [(COMMIT, xid) for xid in range(100)])
    archive.transactions[3] = (PREPARE, 3)
    assert archive.search({2, 3}) == (True, [2, 3])
    archive.read.clear()
    assert archive.search({99}) == (True, [99])
    assert len(archive.read) <= changes_since.SEGMENTS_AT_ONCE
    # A transaction that has not ended is nowhere in the archive, which was searched as a whole.
    assert archive.search({500}) == (True, [])
    # What the cut leaves out counts as written anyway.
    assert archive.search({2}, frozenset({25})) == (True, [])


def test_what_a_merge_has_in_its_base_is_looked_for_in_the_segments_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that waits for a synchronous standby since before the merge, and one that is still prepared."""
    archive = Archive(monkeypatch, [(COMMIT, xid) for xid in range(100)])
    archive.transactions[3] = (PREPARE, 3)
    archive.first_of_merge, archive.merged_at = 90, 900
    assert archive.search({2, 3, 95}, is_merged=True) == (True, [2, 3, 95])


def test_beyond_the_limit_of_the_search_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive(monkeypatch, [(COMMIT, xid) for xid in range(100)])
    monkeypatch.setattr(changes_since, "SEGMENTS_READ_MAX", 50)
    assert archive.search({2, 70}) == (False, [70])
    assert archive.search({70}) == (True, [70])
    assert archive.search(set()) == (True, [])


def test_a_table_continues_if_all_of_its_changes_are_in_the_wal_and_its_values_look_the_same() -> None:
    group = Group(1, "s", "t", "default", 1, (Column("id", "integer", 23, -1, 0),))
    state = TableState("s.t", 7, "p", "m", 100, 1, "1.5", (), None)

    def with_(**fields: object) -> TableState:
        values = {name: getattr(state, name) for name in state.__struct_fields__}
        return TableState(**(values | fields))

    # VACUUM FULL and TRUNCATE only give the table a new file.
    assert is_continued(group, group, state, with_(file=200))
    for fields in ({"oid": 8}, {"membership": "n"}, {"publication": "q"}, {"attributes": 2}, {"columns": "1.6"},
                   {"types": ("enum 1 2 a.3",)}):  # fmt: skip
        assert not is_continued(group, group, state, with_(**fields)), fields
    other = Group(1, "s", "t", "default", 1, (Column("id", "bigint", 20, -1, 0),))
    assert not is_continued(group, other, state, state)
    assert not is_continued(group, group, state, None)


def test_the_entry_of_a_version_is_that_of_its_key_and_line() -> None:
    lines = from_list([b"7\ta\n"])
    expected = xxhash64(lines, xxhash64(from_list([b"7"]))).view(np.int64).tolist()
    assert [entry_of(LineAt(b"7", b"7\ta\n", 1, 2))] == expected


def test_a_place_is_a_ctid() -> None:
    assert place_text((12 << 16) | 3) == "(12,3)"
    assert place_text(NO_PLACE) == ""
