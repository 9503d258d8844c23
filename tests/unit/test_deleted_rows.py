"""Deletes of rows that were never there, in changes of a few keys."""

from __future__ import annotations

import numpy as np
import pytest

from cutline.check.copies import Copies
from cutline.check.deleted_rows import DeletedKeys, ExpectedRows, KeyDeletes, expected_rows, note_missing
from cutline.check.report import Findings, SnapshotReport
from cutline.check.stored_rows import salted
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import Hashes, from_list, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.fold.schema_at_cut import SchemaMapping
from cutline.snapshots.fold.sources import SegmentSource, Source
from cutline.snapshots.records.chain import Chain
from tests.unit.made_commits import full_commit, segment
from tests.unit.made_segments import table

KEYED = Group(3, "public", "t", "default", 1, (Column("id", "bigint", 20, -1, 1),))
OTHER, BAG = Group(4, "public", "u", "default", 1, KEYED.columns), Group(5, "public", "bag", "full", 0, KEYED.columns)
FORMS = TableForms.of([KEYED, OTHER, BAG])
# op, key, position, number in the transaction, group
Change = tuple[str, bytes, int, int, int]


def of(*changes: Change, mapping: SchemaMapping | None = None, excluded: frozenset[Lsn] = frozenset()) -> KeyDeletes:
    """Return what a segment with these changes reports, of which those before 100 belong to the state."""
    rows: list[dict[str, object]] = [
        {"lsn": lsn, "end_lsn": lsn, "seq": seq, "xid": 1, "global_id": None, "op": ord(op), "group": group,
         "partition": 0, "key": key, "row": b""}
        for op, key, lsn, seq, group in changes
    ]  # fmt: skip
    listed = segment("a", 1, 0, 100)
    source = SegmentSource(Source(listed.key, "a", 0, 1, ""), listed, Lsn(100), excluded, {}, mapping)
    keys = DeletedKeys(source, FORMS)
    for at in range(0, len(rows), 2):
        keys.add(table(rows[at : at + 2]))
    return keys.report()


def expected(*reports: KeyDeletes) -> set[tuple[int, bytes]]:
    """The rows that the base copy must have, by group and key, of those with keys up to 9."""
    rows = expected_rows(reports)
    assert (np.sort(rows.hashes) == rows.hashes).all()
    names = [(group, str(number).encode()) for group in (3, 4, 5) for number in range(10)]
    known = {int(hash_of(*name)[0]): name for name in names}
    assert [known[one][0] for one in rows.hashes.tolist()] == rows.groups.tolist()
    return {known[one] for one in rows.hashes.tolist()}


def hash_of(group: int, key: bytes) -> Hashes:
    return salted(xxhash64(from_list([key])), np.array([group]))


def test_a_row_whose_first_change_deletes_it_was_copied() -> None:
    deleted = of(("D", b"1", 10, 1, 3), ("U", b"2", 10, 2, 3), ("D", b"2", 11, 1, 3), ("u", b"4", 11, 2, 3))
    assert expected(deleted) == {(3, b"1")}
    # The order is that of positions and numbers, however the changes are stored.
    assert expected(of(("D", b"1", 10, 2, 3), ("U", b"1", 10, 1, 3))) == set()
    assert expected(of(("U", b"1", 10, 2, 3), ("D", b"1", 10, 1, 3))) == {(3, b"1")}
    # Another table's row with that key.
    assert expected(of(("D", b"1", 10, 2, 3), ("U", b"1", 10, 1, 4))) == {(3, b"1")}
    # A row that moved to another key.
    assert expected(of(("D", b"1", 10, 2, 3), ("u", b"2", 10, 3, 3), ("D", b"2", 12, 1, 3))) == {(3, b"1")}


def test_a_delete_before_a_truncate_does_not_hide_the_next_of_the_same_key() -> None:
    """Segments that are read together report one delete of a key."""
    changes = ("D", b"1", 10, 1, 3), ("T", b"", 20, 1, 3), ("D", b"1", 30, 1, 3)
    assert expected(*map(of, changes)) == expected(of(*changes)) == {(3, b"1")}
    # The TRUNCATE may be stored before the deletes, and may be another table's.
    assert expected(of(changes[1], changes[2], changes[0])) == {(3, b"1")}
    assert expected(of(("D", b"1", 10, 1, 4), *changes[1:])) == {(4, b"1"), (3, b"1")}


def test_an_earlier_segment_may_have_written_the_row() -> None:
    written, deleted = of(("U", b"1", 10, 1, 3), ("U", b"2", 10, 2, 3)), of(("D", b"1", 20, 1, 3))
    assert expected(written, deleted) == set()
    assert expected(deleted, written) == {(3, b"1")}
    assert expected(deleted, written, deleted) == {(3, b"1")}
    assert expected(of(("D", b"2", 5, 1, 3)), written, deleted) == {(3, b"2")}
    assert expected() == set()


def test_changes_that_do_not_count_expect_nothing() -> None:
    # After the cut, of a transaction that does not belong to the state, and of a table without a key.
    assert expected(of(("D", b"1", 100, 1, 3), ("D", b"2", 99, 1, 3))) == {(3, b"2")}
    assert expected(of(("D", b"1", 10, 1, 3), ("D", b"2", 11, 1, 3), excluded=frozenset({Lsn(11)}))) == {(3, b"1")}
    assert expected(of(("D", b"1", 10, 1, 5))) == set()
    # Of a table that was copied again, also under its definition before.
    again = SchemaMapping(frozenset({3, 4}), since={4: Lsn(5)})
    assert expected(of(("D", b"1", 10, 1, 3), ("D", b"1", 10, 2, 4), mapping=again)) == {(3, b"1")}


def test_a_base_copy_may_lack_the_rows_before_a_truncate() -> None:
    cleared = of(("D", b"1", 10, 1, 3), ("D", b"1", 10, 2, 4), ("T", b"", 20, 1, 3), ("D", b"2", 20, 2, 3))
    assert expected(cleared) == {(4, b"1")}
    later = of(("D", b"3", 30, 1, 3))
    assert expected(cleared, later) == {(4, b"1"), (3, b"3")}
    assert expected(of(("D", b"5", 10, 1, 3)), cleared) == {(4, b"1")}


def test_truncates_and_last_changes_are_collected() -> None:
    changes = [("U", b"1", 40, 0, 3), ("T", b"", 20, 1, 3), ("T", b"", 20, 1, 5), ("D", b"1", 30, 0, 5),
               ("T", b"", 99, 0, 4), ("T", b"", 100, 0, 3)]  # fmt: skip
    collected = of(*changes, excluded=frozenset({Lsn(99)}))
    assert collected.truncates == ((3, 20), (5, 20))
    assert set(collected.last_changes) == {(3, 40), (5, 30)}
    # One of a transaction in two phases.
    listed = segment("a", 1, 0, 100)
    keys = DeletedKeys(SegmentSource(Source(listed.key, "a", 0, 1, ""), listed, Lsn(100), frozenset(), {}, None), FORMS)
    keys.add(table([{"lsn": 20, "end_lsn": 20, "seq": 0, "xid": 1, "global_id": "x", "op": ord("T"), "group": 3,
                     "partition": -1, "key": b"", "row": b""}]))  # fmt: skip
    assert (keys.report().truncates, keys.report().last_changes) == ((), ((3, 20),))


def test_rows_are_found_by_hash() -> None:
    rows = expected_rows([of(("D", b"1", 10, 1, 3), ("D", b"2", 10, 2, 3))])
    assert rows.find(np.concatenate([hash_of(3, b"7"), hash_of(3, b"2")])).tolist() == [
        rows.hashes.tolist().index(int(hash_of(3, b"2")[0]))
    ]
    nothing = expected_rows([])
    assert nothing.find(hash_of(3, b"1")).tolist() == []


@pytest.mark.parametrize("is_damaged", [False, True])
def test_rows_that_no_base_copy_has_are_a_conflict(*, is_damaged: bool) -> None:
    """Unless the copy is damaged: then an object that can't be read may have had them."""
    copies = Copies(("a", "b"), {"a": "a", "b": "a"}, Chain(full_commit()))
    findings = Findings(SnapshotReport("daily", 0))
    if is_damaged:
        findings.damaged.add("b")
    numbers = np.array([3, 3, 4], np.int64)
    rows = ExpectedRows(np.array([1, 2, 3], np.uint64), numbers, np.array([30, 20, 10], np.int64))
    note_missing({0: rows, 1: rows}, {0: np.ones(3, np.bool_), 1: np.array([False, False, True])}, copies, findings)
    found = [(one.kind, one.node, one.detail) for one in findings.report.conflicts]
    what = "changes delete 2 rows that were never there, the first of them at 0/14"
    assert found == ([] if is_damaged else [("history", "b", what)])
