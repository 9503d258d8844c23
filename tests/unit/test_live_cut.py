"""Which row versions a cut must have, and what the comparison of a database with a cut tells."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from cutline.check.live_cut import identity_of, place_text
from cutline.check.live_entries import NO_PLACE, Summary, classify, totals_of
from cutline.check.live_horizon import Horizon, lasting_groups, precedes
from cutline.check.live_pages import LineAt
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.nodes.groups import Column, Group

KEYED, MULTISET = 1, 2
NAMES = ("equal", "settled", "wrong", "left", "more")


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def compared(*rows: tuple[int, ...]) -> pa.Table:
    """Return rows of the comparison: group, and the amounts of NAMES."""
    columns = {"node": pa.array([0] * len(rows), pa.int32()), "group": pa.array([row[0] for row in rows], pa.int32())}
    columns |= {"partition": columns["node"], "identity": pa.array(range(len(rows)), pa.int64())}
    columns |= {name: pa.array([row[at] for row in rows], pa.int64()) for at, name in enumerate(NAMES, start=1)}
    return pa.table(columns | {"place": columns["identity"], "problem": pa.nulls(len(rows), pa.binary())})


def verdicts(rows: pa.Table) -> list[tuple[int, ...]]:
    found = classify(rows, {MULTISET})
    return list(zip(*(found[name].to_pylist() for name in ("unknown", "changed", "gone", "added")), strict=True))


def test_xids_are_compared_around_the_circle() -> None:
    assert precedes(ints(5, 10, 11), 10).tolist() == [True, False, False]
    assert precedes(ints(4294967295, 3), 3).tolist() == [True, False]
    assert precedes(ints(2_147_483_651), 4).tolist() == [False]
    assert precedes(ints(2_147_483_652), 4).tolist() == [True]


def test_a_version_is_settled_if_its_writer_is_known_and_nobody_has_begun_to_replace_it() -> None:
    horizon = Horizon(100, ints(105, 107))
    xmin, xmax = ints(99, 100, 105, 106, 2, 99, 99, 99), ints(0, 0, 0, 0, 0, 98, 199, 200)
    assert horizon.settled(xmin, xmax, 200).tolist() == [True, False, True, False, True, True, True, False]
    assert not Horizon(None).settled(xmin, xmax, 200).any()


def test_values_of_types_that_name_other_objects_do_not_last() -> None:
    def group(number: int, type_oid: int) -> Group:
        return Group(number, "s", "t", "default", 1, (Column("id", "x", type_oid, -1, 0),))

    groups = {1: group(1, 23), 2: group(2, 2205), 3: group(3, 16400)}
    assert lasting_groups(groups, is_unchanged=True) == {1, 3}
    assert lasting_groups(groups, is_unchanged=False) == {1}


def test_rows_with_a_key_are_wrong_changed_gone_or_new() -> None:
    rows = compared(
        (KEYED, 1, 1, 0, 0, 0),  # equal
        (KEYED, 0, 1, 1, 1, 0),  # settled, and other contents at the cut
        (KEYED, 0, 1, 1, 0, 0),  # settled, and not at the cut
        (KEYED, 0, 0, 0, 1, 1),  # written since
        (KEYED, 0, 0, 0, 1, 0),  # deleted since
        (KEYED, 0, 0, 0, 0, 1),  # inserted since
        (KEYED, 1, 1, 0, 0, 1),  # read twice: before and after an update
    )
    assert verdicts(rows) == [
        (0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0),
    ]  # fmt: skip


def test_lines_of_a_table_without_a_key_are_counted() -> None:
    assert verdicts(compared((MULTISET, 2, 2, 1, 0, 0), (MULTISET, 1, 0, 0, 3, 0), (MULTISET, 0, 0, 0, 0, 2))) == [
        (1, 0, 0, 0), (0, 0, 3, 0), (0, 0, 0, 2),
    ]  # fmt: skip


def summarised(summary: Summary, batches: Iterable[pa.RecordBatch]) -> tuple[dict[int, dict[str, int]], list[int]]:
    """Return the totals by group, and the identities of the examples."""
    found = pa.Table.from_batches(list(summary.of(batches)))
    totals = totals_of([found.filter(found["is_total"])]).to_pylist()
    examples = found.filter(pa.compute.invert(found["is_total"]))
    return {row["group"]: row for row in totals}, examples["identity"].to_pylist()


def test_a_summary_counts_everything_and_shows_only_what_is_proven() -> None:
    wrong, gone, equal = (KEYED, 0, 1, 1, 1, 0), (KEYED, 0, 0, 0, 1, 0), (KEYED, 1, 1, 0, 0, 0)
    batches = [*compared(wrong, gone, equal).to_batches(), *compared(wrong, wrong, gone).to_batches()]
    totals, examples = summarised(Summary(frozenset(), frozenset([0]), frozenset(), 2), batches)
    assert [totals[KEYED][name] for name in ("equal", "wrong", "gone")] == [1, 3, 2]
    # Two of the three wrong rows.
    assert examples == [0, 0]
    # No row may leave an append-only table.
    _, examples = summarised(Summary(frozenset(), frozenset([0]), frozenset([(0, KEYED)]), 9), batches)
    assert examples == [0, 1, 0, 1, 2]
    # In another database nothing is proven, and every difference is shown.
    _, examples = summarised(Summary(frozenset(), frozenset(), frozenset(), 9), batches)
    assert examples == [0, 1, 0, 1, 2]


def test_a_row_is_identified_by_its_key_or_its_line() -> None:
    keyed = Group(1, "s", "t", "default", 1, (Column("id", "integer", 23, -1, 0),))
    full = Group(1, "s", "t", "full", 0, (Column("id", "integer", 23, -1, 0),))
    line = LineAt(b"7", b"7\n")
    expected = xxhash64(from_list([b"7", b"7\n"])).view(np.int64).tolist()
    assert [identity_of(line, keyed), identity_of(line, full)] == expected


def test_a_place_is_a_ctid() -> None:
    assert place_text((12 << 16) | 3) == "(12,3)"
    assert place_text(NO_PLACE) == ""
