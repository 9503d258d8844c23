"""Row versions of running databases: how lines and snapshots are read, and which differences are proven."""

from __future__ import annotations

import numpy as np
import pytest

from cutline.check.hashing import combine_hashes, differing_keys
from cutline.check.live.ordered_snapshots import SnapshotBounds, hidden_transactions
from cutline.check.live.pages import (
    BadRange,
    Versions,
    count_unproven,
    fields_after,
    is_bad_page,
    places_query,
    proven_missing,
    proves_damage,
    shown,
    tids_of,
    versions_of,
    versions_query,
)
from cutline.check.live.run import GAP_PAGES, Suspects, is_unsteady, page_runs, together
from cutline.columns.bytes_column import BytesColumn, from_list
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import PageRange

GROUP = Group(0, "public", "t", "default", 1, (Column("id", "integer", 23, -1, 0), Column("a", "text", 25, -1, 1)))


def values_of(column: BytesColumn) -> list[bytes]:
    return [bytes(column.data[low:high]) for low, high in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


def versions(*rows: tuple[int, int]) -> Versions:
    """Return versions of one table, given as page and hash."""
    places = np.array([(1, page, number) for number, (page, _) in enumerate(rows)], np.int64).reshape(-1, 3)
    return Versions(places, np.array([value for _, value in rows], np.uint64))


def hashes(found: Versions) -> list[int]:
    return [int(value) for value in found.hashes]


def test_places_are_read_from_lines() -> None:
    lines = from_list([b"(0,1)\t745\t7\tx\n", b"(4294967294,65535)\t4294967295\t8\ty\\tz\n", b"(12,3)\t9\t\\N\t\n"])
    pages, items = tids_of(lines)
    assert (pages.tolist(), items.tolist()) == ([0, 4294967294, 12], [1, 65535, 3])
    assert values_of(fields_after(lines, 2)) == [b"7\tx\n", b"8\ty\\tz\n", b"\\N\t\n"]


def test_a_table_without_columns_has_empty_lines() -> None:
    lines = from_list([b"(0,1)\t745\n", b"(0,2)\t746\n"])
    assert values_of(fields_after(lines, 2)) == [b"\n", b"\n"]


def test_a_range_is_read_by_its_pages_without_the_rows_of_children() -> None:
    columns = 'SELECT ctid, xmin, "id", "a" FROM ONLY "public"."t"'
    copied = "TO STDOUT (ENCODING 'SQL_ASCII')"
    assert versions_query(PageRange(GROUP, 1)) == f"COPY ({columns}) {copied}"
    bounded = f"COPY ({columns} WHERE ctid >= '(8,0)'::tid AND ctid < '(9,0)'::tid) {copied}"
    assert versions_query(PageRange(GROUP, 1, 8, 9)) == bounded
    assert places_query(GROUP, ["(0,1)"]) == f"COPY ({columns} WHERE ctid = ANY (ARRAY['(0,1)']::tid[])) {copied}"


def test_pages_that_differ_are_found_on_either_side() -> None:
    keys = np.array([(1, 0), (1, 0), (1, 1), (2, 0)], np.int64)
    first = combine_hashes(keys, np.array([10, 11, 12, 13], np.uint64))
    second = combine_hashes(keys[:3], np.array([11, 10, 99, 0], np.uint64)[:3])
    assert differing_keys(first, second).tolist() == [[1, 1], [2, 0]]
    assert differing_keys(second, first).tolist() == [[1, 1], [2, 0]]
    assert differing_keys(first, first).tolist() == []


def test_only_a_version_that_lasts_on_one_side_is_proven_to_be_missing_on_the_other() -> None:
    before, after = versions((0, 1), (0, 2), (0, 3)), versions((0, 1), (0, 3), (0, 4))
    # 2 was deleted and 4 inserted meanwhile; 3 is there.
    assert hashes(proven_missing(before, versions((0, 3)), after)) == [1]
    assert hashes(proven_missing(before, versions((0, 1), (0, 3)), after)) == []


def test_lines_without_places_differ_only_if_both_readings_of_each_side_agree() -> None:
    one, two = versions((0, 1), (0, 1), (0, 2)), versions((0, 1), (0, 2))
    assert count_unproven(one, two, one, two) == 1
    assert count_unproven(one, two, two, two) == 0
    assert count_unproven(one, one, one, one) == 0


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([5], [(5, 6)]),
        ([1, 2, 3 + GAP_PAGES, 100], [(1, 3), (3 + GAP_PAGES, 4 + GAP_PAGES), (100, 101)]),
        ([0, GAP_PAGES], [(0, GAP_PAGES + 1)]),
        (list(range(25)), [(0, 10), (10, 20), (20, 25)]),
    ],
)
def test_pages_are_read_in_ranges(pages: list[int], runs: list[tuple[int, int]]) -> None:
    assert page_runs(np.array(pages, np.int64), 10) == runs


def test_suspects_are_divided_into_tasks_without_losing_a_page() -> None:
    suspects = [Suspects("b", 1, np.arange(1500)), Suspects("b", 2, np.arange(10)), Suspects("b", 3, np.arange(600))]
    tasks = list(together(suspects))
    assert [sum(len(one.pages) for one in task) for task in tasks] == [1024, 1024, 62]
    for suspect in suspects:
        parts = [one.pages for task in tasks for one in task if one.oid == suspect.oid]
        assert np.concatenate(parts).tolist() == suspect.pages.tolist()


def test_a_snapshot_hides_what_still_runs_and_what_has_not_begun() -> None:
    primary = SnapshotBounds.parse("100:105:100,103")
    assert primary == SnapshotBounds(100, 105, (100, 103))
    assert SnapshotBounds.parse("7:7:") == SnapshotBounds(7, 7)
    with pytest.raises(ValueError, match="not a snapshot"):
        SnapshotBounds.parse("7")
    # The standby shows nothing from its xmax on.
    assert hidden_transactions(primary, SnapshotBounds(100, 102)) == [100]
    assert hidden_transactions(primary, SnapshotBounds(100, 105)) == [100, 103]
    # A restarted standby may be ahead: what the primary does not list may have committed there.
    assert hidden_transactions(primary, SnapshotBounds(100, 107)) == [100, 103, 105, 106]
    assert hidden_transactions(primary, SnapshotBounds(100, 1_000_000)) is None


def test_a_long_line_is_cut_off() -> None:
    assert shown(b"1\tx\n") == "1\tx"
    assert shown(b"x" * 2000 + b"\n") == "x" * 1000 + "…"
    assert shown(b"\xff\n") == "\\xff"


def test_only_some_errors_prove_that_data_is_damaged() -> None:
    assert all(proves_damage(state, "") for state in ("XX001", "XX002", "58030"))
    # A library that a standby lacks, and what concurrent DDL causes, prove nothing; a lost file of the table does.
    assert not proves_damage("58P01", 'could not access file "$libdir/postgis-3": No such file or directory')
    assert not proves_damage("XX000", "cache lookup failed for type 16402")
    assert proves_damage("58P01", 'could not open file "base/16384/16397": No such file or directory')
    assert proves_damage("58P01", 'could not access status of transaction 7: Could not open file "pg_xact/0000"')


def test_names_prove_nothing_unless_both_servers_print_them_alike_before_and_after() -> None:
    old, new = frozenset({"enum 1 2 red.3"}), frozenset({"enum 1 2 crimson.4"})
    nodes = ("p", "s")
    steady = {("p", 7): new, ("s", 7): new}
    assert not is_unsteady(7, nodes, steady, steady)
    assert is_unsteady(7, nodes, {("p", 7): new, ("s", 7): old}, steady)
    assert is_unsteady(7, nodes, {("p", 7): old, ("s", 7): old}, steady)
    # Another standby that lags does not matter.
    assert not is_unsteady(7, nodes, steady | {("t", 7): old}, steady)


def test_a_version_has_its_xmin() -> None:
    lines = from_list([b"(0,7)\t900\t1\tx\n", b"(4294967294,12)\t4294967295\t\n"])
    assert [column.tolist() for column in versions_of(lines)] == [[0, 4294967294], [7, 12], [900, 4294967295]]


def test_pages_that_a_node_could_not_read_are_left_out() -> None:
    pages = np.array([(1, 2), (1, 3), (1, 7), (2, 3), (3, 0)], np.int64)
    bad = [BadRange("b", 1, 3, 4, "", is_damaged=True), BadRange("b", 3, 0, None, "", is_damaged=True)]
    assert is_bad_page(pages, bad).tolist() == [False, True, False, False, True]
    assert is_bad_page(pages, []).tolist() == [False] * 5
