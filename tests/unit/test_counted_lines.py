"""Changes of tables without a key stay in their segments: lines are counted by hash, and exactly where needed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pyarrow as pa
import pytest

import cutline.snapshots.fold.changes
import cutline.snapshots.fold.counted_lines
from cutline.check.copies import Copies
from cutline.check.hashing import Sums, combine_all, combine_hashes
from cutline.check.partitions import _hash_left, hash_reported
from cutline.check.streams import LastChanges, last_tasks
from cutline.columns.bytes_column import column_of, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changed_keys import find_valid_rows
from cutline.snapshots.fold.changes import choose_changes
from cutline.snapshots.fold.counted_lines import LineMatches
from cutline.snapshots.fold.fold import Fold, fold
from cutline.snapshots.fold.sources import PROBLEM, Sources, read_at_cut, read_tables
from cutline.snapshots.records.chain import Chain
from cutline.spark.driver_session import DriverSession
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, INSERT, SEGMENT_SCHEMA, UPSERT
from tests.chains.drawn_history import KEYED, LINES, NODES, State, store_history
from tests.chains.folded_rows import images_of, rows_at_cut
from tests.run.soak import SEED
from tests.unit.made_commits import commit, counted
from tests.unit.test_local_fold import store_chain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HISTORIES = 20


def no_spark() -> SparkSession:
    raise AssertionError("Spark is not needed")


SESSION = cast("SparkSession", DriverSession(no_spark, 2))


@pytest.fixture(autouse=True)
def fold_by_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_MAX", 0)
    monkeypatch.setattr(limits, "CHANGES_PER_SEGMENT", 0)
    monkeypatch.setattr(limits, "CHOSEN_CHANGES_MAX", 100_000)


@pytest.fixture(params=["hashes", "few hashes"])
def hashes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different lines may have the same hash."""
    if request.param == "few hashes":
        whole = cutline.snapshots.fold.counted_lines.hash_rows
        for module in (cutline.snapshots.fold.counted_lines, cutline.snapshots.fold.changes):
            monkeypatch.setattr(module, "hash_rows", lambda *given: whole(*given) & 1)


def folded_by_segment(sources: Sources, location: StoreLocation) -> Fold:
    folded = fold(SESSION, sources, location, for_loading=True)
    assert folded.images is None
    return folded


@pytest.mark.usefixtures("hashes")
@pytest.mark.parametrize("number", range(HISTORIES))
def test_drawn_histories_have_the_rows_that_the_tables_had(tmp_path: Path, number: int) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number, is_whole=True, has_long=False)
    assert rows_at_cut(folded_by_segment(sources, location), sources, location) == expected


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    monkeypatch.setattr(Copies, "since", lambda _self, _node: Lsn(200))
    monkeypatch.setattr(Copies, "recopied_since", lambda _self, _node: {})
    return Copies(NODES, dict.fromkeys(NODES, NODES[0]), Chain(counted(commit(0))))


def reports_of(sources: Sources, location: StoreLocation) -> dict[str, bytes | None]:
    """What the tasks of a check report of the segments."""
    reports: dict[str, bytes | None] = {}
    for key, task in last_tasks(sources).items():
        last = LastChanges(task)
        for table in read_tables(location.open(), task.segment.source, SEGMENT_SCHEMA):
            last.add(table)
        reports[key] = last.report()
    return reports


def sums_of(rows: State) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The hashes of all rows; the first field of a row with a key is the key."""
    lines = list(rows.elements())
    places = np.array([(node, group, 0) for node, group, _ in lines], np.int64)
    keys = [line.partition(b"\t")[0] if group % 10 == KEYED else b"" for _, group, line in lines]
    columns = [
        column_of(pa.chunked_array([pa.array(values, pa.binary())])) for values in (keys, [one[2] for one in lines])
    ]
    return combine_hashes(places, xxhash64(columns[1], xxhash64(columns[0]))).as_dict()


@pytest.mark.parametrize("number", range(HISTORIES))
def test_a_check_hashes_the_rows_that_the_tables_had(tmp_path: Path, number: int, copies: Copies) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number, is_whole=True, has_long=False)
    reported = hash_reported(SESSION, sources, copies, reports_of(sources, location), location)
    assert reported is not None
    parts: list[Sums] = list(reported.rows)
    for base in sources.bases:
        of_node = base.source.number
        changed = reported.changed.get(of_node, {})
        matches = LineMatches(base, changed)
        for batch in (one for table in read_at_cut(location.open(), base, BASE_SCHEMA) for one in table.to_batches()):
            matches.add(batch)
            held = batch.filter(pa.array(find_valid_rows(batch, base, changed)))
            rows = Counter((of_node, one["group"], one["row"]) for one in held.select(["group", "row"]).to_pylist())
            parts += [Sums(np.array([key]), np.array([value])) for key, value in sums_of(rows).items()] if rows else []
        for removed in reported.removed.get(of_node, []):
            removed.add(matches.matches())
    for of_removed in reported.removed.values():
        assert all((removed.left >= 0).all() for removed in of_removed)
        parts += map(_hash_left, of_removed)
    assert combine_all(parts, 3).as_dict() == sums_of(expected)


def test_a_line_that_never_was_is_missing_and_equal_lines_are_counted(tmp_path: Path) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    base = [(KEYED, b"1", b"1\told\n"), *[(LINES, b"", b"x\n")] * 3, (LINES, b"", b"y\n")]
    changes = [
        [(LINES, DELETE, b"", b"x\n"), (LINES, INSERT, b"", b"new\n"), (KEYED, UPSERT, b"1", b"1\tnew\n")],
        [(LINES, INSERT, b"", b"y\n"), (LINES, DELETE, b"", b"y\n"), (LINES, DELETE, b"", b"new\n")],
    ]
    sources = store_chain(tmp_path / "whole", base, *changes)
    at = StoreLocation(f"file://{tmp_path}/whole")
    rows = rows_at_cut(folded_by_segment(sources, at), sources, at)
    assert rows == Counter({(0, LINES, b"x\n"): 2, (0, LINES, b"y\n"): 1, (0, KEYED, b"1\tnew\n"): 1})
    sources = store_chain(tmp_path, base, *changes, [(LINES, DELETE, b"", b"never\n"), (LINES, DELETE, b"", b"x\n")])
    images = images_of(folded_by_segment(sources, location), sources, location)
    # The group of a row that is missing is in the place of the partition.
    assert [(group, partition, row) for _, group, partition, _, _, row in images if group in (PROBLEM, LINES)] == [
        (PROBLEM, LINES, b"never\n"),
        (LINES, 0, b"x\n"),
    ]


@pytest.mark.parametrize(
    ("limit", "line"), [("CHOSEN_KEYS_BYTES_MAX", b"x\n"), ("READ_BYTES_MAX", b"x\n"), (None, b"x" * (1 << 17) + b"\n")]
)
def test_lines_that_take_too_much_memory_are_left_to_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, line: bytes
) -> None:
    """Of lines that were only inserted, the driver holds no line at all."""
    monkeypatch.setattr(cutline.snapshots.fold.counted_lines, "CONTESTED_BYTES_MIN", 0)
    location = StoreLocation(f"file://{tmp_path}")
    inserted, deleted = [(LINES, INSERT, b"", line)] * 3, [(LINES, DELETE, b"", line)]
    base = [(LINES, b"", line)] * 2
    sources = store_chain(tmp_path, base, inserted, deleted)
    assert limit is None or choose_changes(SESSION, sources, location) is not None
    if limit:
        monkeypatch.setattr(limits, limit, 0)
    only_deleted = store_chain(tmp_path / "deleted", base, deleted)
    assert choose_changes(SESSION, only_deleted, StoreLocation(f"file://{tmp_path}/deleted")) is None
    only_inserted = store_chain(tmp_path / "inserted", base, inserted)
    found = choose_changes(SESSION, only_inserted, StoreLocation(f"file://{tmp_path}/inserted"))
    assert found is not None
    assert (len(found.last), found.added, len(found.images)) == (0, None, 1)
