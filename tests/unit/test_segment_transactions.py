"""What the check of a segment's transactions accepts, and what contradicts itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from cutline.check.segment_transactions import SegmentTransactions
from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.wal.segments.archive import OpenTransaction, SegmentRange
from tests.unit.made_segments import table

Row = dict[str, object]
EMPTY: Row = {"global_id": None, "group": 0, "partition": -1, "key": b"", "row": b""}


def change(lsn: int, xid: int, seq: int = 1, **other: object) -> Row:
    """A change, which has the position of its transaction."""
    numbers = {"lsn": lsn, "end_lsn": lsn, "seq": seq, "xid": xid, "op": ord("U"), "group": 7, "partition": 0}
    return EMPTY | numbers | {"key": b"1", "row": b"1\n"} | other


def end(op: str, lsn: int, xid: int, **other: object) -> Row:
    """The event of a record of 8 bytes."""
    return EMPTY | {"lsn": lsn, "end_lsn": lsn + 8, "seq": 0, "xid": xid, "op": ord(op)} | other


def counted(rows: Iterable[Row], before: OpenTransaction | None = None) -> list[Row]:
    """The rows, with the number of changes in each end of a transaction that has none yet."""
    rows = list(rows)
    numbers = Counter(row["lsn"] for row in rows if row["group"] != 0)
    if before is not None:
        numbers[int(before.lsn)] += before.changes
    return [{"changes": numbers[row["lsn"]] if row["op"] in (ord("C"), ord("P")) else None} | row for row in rows]


def segment(
    *rows: Row, open_at: int | None = None, continued: OpenTransaction | None = None, base: int = 100
) -> SegmentTransactions:
    """Check a segment of the WAL from 100 to 200; with an open transaction, up to where that ends."""
    rows = tuple(counted(rows, continued))
    opened = None
    if open_at:
        begun = continued.changes if continued is not None and continued.lsn == open_at else 0
        opened = OpenTransaction(Lsn(open_at), 9, begun + sum(row["lsn"] == open_at for row in rows if row["group"]))
    checks = SegmentTransactions(SegmentRange("n1", "op", Lsn(100), Lsn(open_at or 200), opened), Lsn(base), continued)
    for is_event in (False, True):
        if some := [row for row in rows if (row["group"] == 0) == is_event]:
            checks.add(table(some))
    checks.end()
    return checks


OF_GLOBAL = {"global_id": "transfer"}


def test_transactions_that_a_drain_writes_are_accepted() -> None:
    segment()
    segment(
        # Two changes of a transaction in one phase, which may be tagged: then only its COMMIT has the global id.
        change(110, 5), change(110, 5, 2), end("C", 110, 5, **OF_GLOBAL),
        # A part of a transaction in two phases, and its end.
        change(120, 6, **OF_GLOBAL), end("P", 120, 6, **OF_GLOBAL), end("K", 140, 6, **OF_GLOBAL),
        # A part that was rolled back: the event has the end of the PREPARE.
        end("P", 150, 7, global_id="undone"), end("R", 158, 7, global_id="undone", end_lsn=170),
        # Markers, of which only the end is known.
        end("M", 180, 0, end_lsn=180), end("M", 200, 0, end_lsn=200),
    )  # fmt: skip


def test_a_transaction_that_was_prepared_before_the_slot_is_decoded_when_it_is_committed() -> None:
    rows = [change(90, 6, **OF_GLOBAL), end("P", 90, 6, **OF_GLOBAL), end("K", 140, 6, **OF_GLOBAL)]
    segment(*rows)
    with pytest.raises(RowsInvalidError, match="an event that ends at 0/62, but it holds the WAL from 0/64 to 0/C8"):
        segment(*rows, base=97)


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([change(110, 6), end("C", 110, 5)], "the xid of a change at 0/6E is not that of the transaction"),
        ([change(110, 5), change(110, 6, 2), end("C", 110, 5)], "the xid of a change at 0/6E"),
        ([change(110, 5, end_lsn=118), end("C", 110, 5)], "another position as its end, 0/76"),
        ([change(110, 5, **OF_GLOBAL), end("C", 110, 5)], "the global id of a change at 0/6E"),
        ([change(110, 5, **OF_GLOBAL), end("C", 110, 5, **OF_GLOBAL)], "the global id of a change at 0/6E"),
        ([change(110, 5), end("P", 110, 5, **OF_GLOBAL)], "the global id of a change at 0/6E"),
        ([change(110, 5, global_id="other"), end("P", 110, 5, **OF_GLOBAL)], "the global id of a change at 0/6E"),
        ([change(111, 5), end("C", 110, 5)], "changes at 0/6F, where no transaction ends"),
        ([change(110, 5)], "changes at 0/6E, where no transaction ends"),
        ([end("C", 110, 5), end("C", 120, 6), end("C", 110, 5)], "the end of the transaction at 0/6E twice"),
        ([end("K", 110, 5, **OF_GLOBAL)] * 2, "the end of the transaction at 0/6E twice"),
        ([end("C", 92, 5)], "an event that ends at 0/64, but"),
        ([end("C", 193, 5)], "an event that ends at 0/C9, but"),
        ([end("R", 158, 7, global_id="undone", end_lsn=201)], "an event that ends at 0/C9, but"),
        ([end("C", 120, 5, end_lsn=119)], "an event that begins at 0/78 and ends at 0/77, but"),
        ([end("M", 120, 0, end_lsn=119)], "an event that begins at 0/78 and ends at 0/77, but"),
        ([end("C", 99, 5, end_lsn=110)], "an event that begins at 0/63 and ends at 0/6E, but"),
        ([end("K", 99, 5, end_lsn=110, **OF_GLOBAL)], "an event that begins at 0/63 and ends at 0/6E, but"),
        ([end("P", 99, 5, end_lsn=110, **OF_GLOBAL)], "an event that begins at 0/63 and ends at 0/6E, but"),
        ([end("C", 110, 5, end_lsn=122), end("C", 120, 6)], "that begins at 0/78, before another one ends at 0/7A"),
        ([end("C", 110, 5), end("C", 130, 5)], "transaction 5 ends twice in it"),
        ([end("P", 110, 5, **OF_GLOBAL), end("C", 130, 5)], "transaction 5 ends twice in it"),
        ([end("K", 110, 5, **OF_GLOBAL), end("K", 130, 5, **OF_GLOBAL)], "transaction 5 is decided twice in it"),
        ([end("K", 110, 5, **OF_GLOBAL), end("R", 130, 5, **OF_GLOBAL)], "transaction 5 is decided twice in it"),
        ([end("C", 110, 1 << 32)], "an event whose transaction ID 4294967296 is invalid"),
        ([end("C", 110, -1)], "an event whose transaction ID -1 is invalid"),
        ([change(110, 5), end("C", 110, 5, changes=2)], "has 1 changes of the transaction at 0/6E, but its end says 2"),
        ([change(110, 5), end("C", 110, 5, changes=0)], "has 1 changes of the transaction at 0/6E, but its end says 0"),
        ([end("P", 110, 5, changes=1, **OF_GLOBAL)], "has 0 changes of the transaction at 0/6E, but its end says 1"),
        ([change(110, 5), end("C", 110, 5, changes=None)], "at 0/6E does not say how many changes it has"),
    ],
)  # fmt: skip
def test_a_segment_that_contradicts_itself_is_damage(rows: list[Row], what: str) -> None:
    with pytest.raises(RowsInvalidError, match=what):
        segment(*rows)


def test_a_transaction_that_spans_segments_goes_on_where_it_stopped() -> None:
    first = segment(end("C", 110, 5), change(150, 6, 9), open_at=150)
    assert (first.lacks_end, first.is_open_prepared) == (False, False)
    assert segment(change(150, 6, 9, **OF_GLOBAL), open_at=150).is_open_prepared is True
    # Its rows so far are of tables that the rules exclude.
    assert segment(end("C", 110, 5), open_at=150).is_open_prepared is None
    continued = OpenTransaction(Lsn(150), 9, 4)
    assert not segment(change(150, 6, 11), end("C", 150, 6), continued=continued).lacks_end
    assert not segment(end("C", 150, 6), continued=continued).lacks_end
    assert not segment(open_at=150, continued=continued).lacks_end
    assert segment(end("C", 160, 6), continued=continued).lacks_end
    assert segment(continued=continued).lacks_end


@pytest.mark.parametrize(
    ("rows", "open_at", "what"),
    [
        ([change(150, 6, 9), end("C", 150, 6)], None, "repeats changes of the transaction at 0/96"),
        ([change(150, 6, 10)], 150, "at 0/96 after change 9"),
        ([change(150, 6, 8), change(150, 7, 9)], 150, "the xid of a change at 0/96"),
        ([end("C", 150, 6, end_lsn=150)], 150, "the end of the transaction at 0/96, or of a later one"),
    ],
)  # fmt: skip
def test_a_transaction_that_spans_segments_otherwise_is_damage(rows: list[Row], open_at: int | None, what: str) -> None:
    continued = None if open_at else OpenTransaction(Lsn(150), 9, 0)
    with pytest.raises(RowsInvalidError, match=what):
        segment(*rows, open_at=open_at, continued=continued)


EXACT, TEXT, BAG = 7, 8, 9
FORMS = TableForms.of(
    [
        Group(EXACT, "public", "exact", "default", 1, (Column("id", "bigint", 20, -1, 1),)),
        Group(TEXT, "public", "words", "default", 1, (Column("id", "text", 25, -1, 1),)),
        Group(BAG, "public", "bag", "full", 0, (Column("id", "bigint", 20, -1, 1),)),
    ]
)


def halves(*changes_: Row) -> None:
    """Check a segment with these changes of one transaction, table by table."""
    checks = SegmentTransactions(SegmentRange("n1", "op", Lsn(100), Lsn(200)), Lsn(100), forms=FORMS)
    for one in counted([*changes_, end("C", 110, 5)]):
        checks.add(table([one]))
    checks.end()


def new(seq: int, group: int = EXACT, op: str = "U") -> Row:
    return change(110, 5, seq, group=group, op=ord(op))


def old(seq: int, group: int = EXACT, row: bytes = b"") -> Row:
    return change(110, 5, seq, group=group, op=ord("D"), row=row)


def test_an_update_may_be_one_change_or_two() -> None:
    # Without a change of the key, or with one, in any order.
    halves(new(0), old(2), new(3), new(5), old(4))
    # A value that is left out; the DELETE then has the new key.
    halves(old(2, row=b"2\n"), new(3, op="u"))
    halves(old(2, TEXT, b"2\n"), new(3, TEXT, "u"))
    # A key that was stored outside of its row is in the WAL even if it is the same.
    halves(new(1, TEXT), new(3, TEXT, "u"))
    # Rows without a key; the DELETE has a row.
    halves(old(2, BAG, b"1\n"), new(3, BAG, "I"), new(4, BAG, "I"), old(6, BAG, b"1\n"))
    # Changes of other tables between, and a TRUNCATE.
    halves(new(40), change(110, 5, 42, op=ord("T")), new(0, TEXT))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ([new(3)], "the new row of an update of a key, but not the delete"),
        ([new(3, BAG, "I")], "but not the delete"),
        ([old(2, TEXT), new(3)], "but not the delete"),
        ([old(2), new(3), new(5)], "but not the delete"),
        ([old(4), new(3)], "but not the delete"),
        ([new(2), new(3)], "but not the delete"),
        ([old(2, row=b"2\n")], "the delete of the old row of an update of a key, but not the new row"),
        ([old(2, TEXT, b"2\n"), new(5, TEXT, "u")], "but not the new row"),
    ],
)
def test_half_of_an_update_is_damage(changes: list[Row], what: str) -> None:
    with pytest.raises(RowsInvalidError, match=what):
        halves(*changes)
