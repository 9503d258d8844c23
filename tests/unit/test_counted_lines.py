"""Changes of tables without a key stay in their segments: lines are counted by hash, and exactly where needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import cutline.snapshots.fold.changes
import cutline.snapshots.fold.counted_lines
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.changes import choose_changes
from cutline.snapshots.fold.fold import Fold, fold
from cutline.snapshots.fold.sources import PROBLEM, Sources
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, INSERT, UPSERT
from tests.chains.drawn_history import KEYED, LINES, store_history
from tests.chains.folded_rows import images_of, rows_at_cut, segments_fold, session_without_spark
from tests.run.soak import SEED
from tests.unit.test_local_fold import store_chain

HISTORIES = 12


SESSION = session_without_spark()


@pytest.fixture(autouse=True)
def fold_by_segment() -> Iterator[None]:
    with segments_fold():
        yield


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
    sources, expected = store_history(location.open(), SEED + number, is_whole=True, has_long_lines=False)
    assert rows_at_cut(folded_by_segment(sources, location), sources, location) == expected


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
