"""The driver folds small chains of every kind; what is too large is left to Spark, and nothing is read in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import limits, local_fold
from cutline.snapshots.fold.changed_keys import KeySet
from cutline.snapshots.fold.fold import Fold
from cutline.snapshots.fold.local_fold import LocalFold, fold_locally
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, BaseSources, SegmentSource, Source, Sources
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from cutline.wal.segments.archive import SegmentRange
from cutline.wal.segments.segments import (
    DELETE,
    INSERT,
    PARTIAL,
    SEGMENT_SCHEMA,
    UPSERT,
    create_segment,
    parquet_options,
)
from tests.chains.drawn_history import store_history
from tests.chains.folded_rows import rows_at_cut
from tests.run.soak import SEED
from tests.stores.damage import flip_byte

KEYED, LINES = 1, 2
HISTORIES = 10


@pytest.fixture(autouse=True)
def driver_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who folds small amounts is drawn for every module (tests/run/folding.py)."""
    monkeypatch.setattr(limits, "CHANGES_MAX", 500_000)


@pytest.mark.parametrize("runs_min", [1, 1000], ids=["together", "alone"])
@pytest.mark.parametrize("number", range(HISTORIES))
def test_drawn_histories_are_folded_to_the_rows_that_the_tables_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, runs_min: int
) -> None:
    monkeypatch.setattr(local_fold, "RUNS_MIN", runs_min)
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number)
    folded = fold_locally(sources, location, location)
    assert folded is not None
    whole = Fold(None, folded.changed, folded.problems, [], local=folded.images)
    assert rows_at_cut(whole, sources, location) == expected


Row = tuple[int, bytes, bytes]
Change = tuple[int, int, bytes, bytes]


def store_chain(
    folder: Path, base: list[Row], *segments: list[Change], truncated: frozenset[int] = frozenset()
) -> Sources:
    """Store one base object of (group, key, line), and a segment for each list of (group, op, key, line)."""
    store = StoreLocation(f"file://{folder}").open()
    rows = [{"group": group, "partition": 0, "key": key, "row": row} for group, key, row in base]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, BASE_SCHEMA), sink, **parquet_options(BASE_SCHEMA))
    body = sink.getvalue().to_pybytes()
    store.create("base", body)
    counts = {number: len([one for one in base if one[0] == number]) for number in (KEYED, LINES)}
    source = Source("base", "a", 0, len(body), digest(body))
    found: list[SegmentSource] = []
    for number, changes in enumerate(segments, 1):
        at = {"lsn": 10 * number, "end_lsn": 10 * number + 1, "xid": 1, "partition": 0}
        written = [
            at | {"seq": seq, "group": group, "op": op, "key": key, "row": row}
            for seq, (group, op, key, row) in enumerate(changes)
        ]
        tables = (pa.Table.from_pylist(written, SEGMENT_SCHEMA), pa.Table.from_batches([], SEGMENT_SCHEMA))
        place = SegmentRange("a", "op", Lsn(10 * number - 10), Lsn(10 * number + 2))
        one = create_segment(store, "wal", number, place, tables, continued=None).segment
        found.append(SegmentSource(Source(one.key, "a", 0, one.size, one.digest), one, Lsn(1000), frozenset(), {}))
    bases = BaseSources.of([BaseSource(source, counts, truncated, frozenset({LINES}))])
    return Sources(("a",), bases, tuple(found), frozenset({LINES}), {(0, KEYED): 3, (0, LINES): 1})


def fold(folder: Path, sources: Sources) -> LocalFold | None:
    location = StoreLocation(f"file://{folder}")
    return fold_locally(sources, location, location)


def rows_of(folded: LocalFold | None) -> list[tuple[Any, ...]]:
    """The images: group, partition, key, lsn and row."""
    assert folded is not None
    return sorted(tuple(row.values())[1:] for row in folded.images.to_pylist())


def keys_of(folded: LocalFold) -> dict[int, set[bytes]]:
    """The changed keys of node 0, by group."""
    found: dict[int, set[bytes]] = {}
    for group, keys in folded.changed.get(0, {}).items():
        assert isinstance(keys, KeySet)
        found[group] = set(keys.keys.to_arrow().to_pylist())
    return found


BASE: list[Row] = [(KEYED, b"1", b"1\told\tkept\n"), (LINES, b"", b"x\n"), (LINES, b"", b"x\n"), (LINES, b"", b"y\n")]


def test_values_come_from_the_base_row_and_from_partial_images_before(tmp_path: Path) -> None:
    first, second = (KEYED, PARTIAL, b"1", b"1\tone\t\\u\n"), (KEYED, PARTIAL, b"1", b"1\t\\u\t\\u\n")
    sources = store_chain(tmp_path, BASE, [first], [second])
    folded = fold(tmp_path, sources)
    assert folded is not None
    assert rows_of(folded) == [(KEYED, 0, b"1", 20, b"1\tone\tkept\n")]
    assert (keys_of(folded), folded.problems) == ({KEYED: {b"1"}}, [])


def test_a_row_keeps_its_values_under_another_key(tmp_path: Path) -> None:
    moved = [(KEYED, DELETE, b"1", b"2\n"), (KEYED, PARTIAL, b"2", b"2\tnew\t\\u\n")]
    # Another row has the key that the first one left.
    other = [(KEYED, INSERT, b"1", b"1\tother\tvalue\n"), (KEYED, PARTIAL, b"1", b"1\t\\u\tlater\n")]
    folded = fold(tmp_path, store_chain(tmp_path, BASE, moved, other))
    assert folded is not None
    assert rows_of(folded) == [(KEYED, 0, b"1", 20, b"1\tother\tlater\n"), (KEYED, 0, b"2", 10, b"2\tnew\tkept\n")]
    assert keys_of(folded) == {KEYED: {b"1", b"2"}}


def test_lines_are_counted(tmp_path: Path) -> None:
    first = [(LINES, INSERT, b"", b"y\n"), (LINES, DELETE, b"", b"x\n"), (LINES, INSERT, b"", b"z\n")]
    second = [(LINES, DELETE, b"", b"z\n"), (LINES, INSERT, b"", b"z\n"), (LINES, INSERT, b"", b"z\n")]
    folded = fold(tmp_path, store_chain(tmp_path, BASE, first, second))
    assert folded is not None
    # The base has x twice and y once: only the base rows of x are replaced.
    assert [row[-1] for row in rows_of(folded)] == [b"x\n", b"y\n", b"z\n", b"z\n"]
    assert keys_of(folded) == {LINES: {b"x\n"}}


def test_what_is_missing_is_a_problem_with_the_group_of_its_row(tmp_path: Path) -> None:
    changes = [(KEYED, PARTIAL, b"9", b"9\tnew\t\\u\n"), *[(LINES, DELETE, b"", b"y\n")] * 2]
    expected = [(PROBLEM, KEYED, b"9", 10, b"9\tnew\t\\u\n"), (PROBLEM, LINES, b"", 0, b"y\n")]
    assert rows_of(fold(tmp_path, store_chain(tmp_path, BASE, changes))) == expected


def test_truncated_base_rows_complete_nothing(tmp_path: Path) -> None:
    changes = [(KEYED, PARTIAL, b"1", b"1\tnew\t\\u\n")]
    folded = fold(tmp_path, store_chain(tmp_path, BASE, changes, truncated=frozenset({KEYED})))
    assert rows_of(folded) == [(PROBLEM, KEYED, b"1", 10, b"1\tnew\t\\u\n")]


@pytest.mark.parametrize(
    "changes",
    [
        [(KEYED, UPSERT, b"1", b"1\ta\tb\n"), (KEYED, PARTIAL, b"1", b"1\tc\t\\u\n")],
        [(KEYED, PARTIAL, b"1", b"1\t\\u\tb\n"), (KEYED, PARTIAL, b"1", b"1\tc\t\\u\n")],
        [(KEYED, INSERT, b"1", b"1\tc\tb\n"), (LINES, INSERT, b"", b"c\n")],
    ],
)
def test_no_base_object_is_read_if_the_changes_have_all_values(tmp_path: Path, changes: list[Change]) -> None:
    sources = store_chain(tmp_path, BASE, changes)
    (tmp_path / "base").unlink()
    folded = fold(tmp_path, sources)
    assert folded is not None
    assert (rows_of(folded)[0][-1], folded.problems) == (b"1\tc\tb\n", [])


def test_a_base_object_that_cant_be_read_is_a_problem_if_its_rows_are_needed(tmp_path: Path) -> None:
    sources = store_chain(tmp_path, BASE, [(LINES, DELETE, b"", b"x\n"), (KEYED, PARTIAL, b"1", b"1\t\\u\tb\n")])
    flip_byte(tmp_path / "base")
    folded = fold(tmp_path, sources)
    assert folded is not None
    assert [one["details"]["object"] for one in folded.problems] == ["base"]
    assert {row[0] for row in rows_of(folded)} == {PROBLEM}


SIZES: list[tuple[Any, str, int]] = [
    (limits, "CHANGES_MAX", 1),
    (limits, "STORED_BYTES_MAX", 0),
    (limits, "READ_BYTES_MAX", 100),
    (limits, "BASE_BYTES_MAX", 0),
    (local_fold, "LARGE_BYTES", 1),
]


@pytest.mark.parametrize(("module", "name", "value"), SIZES, ids=[name for _, name, _ in SIZES])
def test_what_the_driver_should_not_hold_is_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: int
) -> None:
    sources = store_chain(tmp_path, BASE, [(KEYED, PARTIAL, b"1", b"1\t\\u\tb\n"), (LINES, INSERT, b"", b"c\n")])
    assert fold(tmp_path, sources) is not None
    monkeypatch.setattr(module, name, value)
    assert fold(tmp_path, sources) is None


def test_a_line_that_remains_too_often_is_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = b"x" * 1000 + b"\n"
    sources = store_chain(tmp_path, [(LINES, b"", line)] * 100, [(LINES, DELETE, b"", line)])
    assert len(rows_of(fold(tmp_path, sources))) == 99
    # Enough to read the base rows, but not to hold an image of each, too.
    monkeypatch.setattr(limits, "READ_BYTES_MAX", 150_000)
    assert fold(tmp_path, sources) is None


def test_keys_with_the_same_hash_are_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = store_chain(tmp_path, BASE, [(KEYED, INSERT, b"2", b"2\ta\tb\n")])
    monkeypatch.setattr(local_fold, "last_changes", lambda _changes: None)
    assert fold(tmp_path, sources) is None
