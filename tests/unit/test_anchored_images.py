"""Images that lack values are completed where the values are: with a base row, or with an image in a segment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.snapshots.fold import anchored_images, limits
from cutline.snapshots.fold.changes import choose_changes
from cutline.snapshots.fold.fold import Fold, fold
from cutline.snapshots.fold.sources import PROBLEM, Sources
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, UPSERT
from tests.chains.drawn_history import KEYED, store_history
from tests.chains.folded_rows import images_of, rows_at_cut, segments_fold, session_without_spark
from tests.run.soak import SEED
from tests.unit.test_local_fold import Change, Row, store_chain

HISTORIES = 18


SESSION = session_without_spark()


@pytest.fixture(autouse=True)
def fold_by_segment() -> Iterator[None]:
    with segments_fold():
        yield


def folded_by_segment(sources: Sources, location: StoreLocation) -> Fold:
    folded = fold(SESSION, sources, location, for_loading=True, completes=True)
    assert folded.images is None
    return folded


@pytest.mark.parametrize("number", range(HISTORIES))
def test_drawn_histories_have_the_rows_that_the_tables_had(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of them is completed a row at a time."""
    if number % 3 == 0:
        monkeypatch.setattr(anchored_images, "COMPLETED_BYTES", 1)
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number, has_long_lines=False)
    assert rows_at_cut(folded_by_segment(sources, location), sources, location) == expected


BASE: list[Row] = [(KEYED, key, key + b"\told\tkept\n") for key in (b"1", b"2", b"3", b"4")]


def folded_rows(tmp_path: Path, *segments: list[Change]) -> set[bytes]:
    location, sources = StoreLocation(f"file://{tmp_path}"), store_chain(tmp_path, BASE, *segments)
    return {row for _, group, row in rows_at_cut(folded_by_segment(sources, location), sources, location)}


def test_values_come_from_the_newest_row_that_has_them(tmp_path: Path) -> None:
    first: list[Change] = [
        (KEYED, PARTIAL, b"1", b"1\tnew\t\\u\n"),
        (KEYED, INSERT, b"5", b"5\tinserted\tlarge\n"),
        (KEYED, DELETE, b"2", b"6\n"),
        (KEYED, PARTIAL, b"6", b"6\tmoved\t\\u\n"),
        (KEYED, DELETE, b"3", b""),
    ]
    second: list[Change] = [
        (KEYED, PARTIAL, b"5", b"5\tupdated\t\\u\n"),
        (KEYED, UPSERT, b"3", b"3\tagain\tother\n"),
        (KEYED, PARTIAL, b"3", b"3\t\\u\tlast\n"),
        (KEYED, PARTIAL, b"1", b"1\t\\u\tnow\n"),
    ]
    assert folded_rows(tmp_path, first, second) == {
        b"1\tnew\tnow\n",
        b"6\tmoved\tkept\n",
        b"3\tagain\tlast\n",
        b"4\told\tkept\n",
        b"5\tupdated\tlarge\n",
    }


def test_a_row_that_nobody_has_is_reported(tmp_path: Path) -> None:
    """After a DELETE nothing has the values; a base row may lack, which only the readers of the base can tell."""
    location = StoreLocation(f"file://{tmp_path}")
    changes: list[Change] = [
        (KEYED, DELETE, b"1", b""),
        (KEYED, PARTIAL, b"1", b"1\tnew\t\\u\n"),
        (KEYED, PARTIAL, b"9", b"9\tnew\t\\u\n"),
    ]
    sources = store_chain(tmp_path, BASE, changes)
    folded = folded_by_segment(sources, location)
    found = [(group, partition, key) for _, group, partition, key, _, _ in images_of(folded, sources, location)]
    assert found == [(PROBLEM, KEYED, b"1")]
    assert [len(images.images) for images in folded.in_bases[0].values()] == [1]


def test_images_that_take_too_much_memory_are_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources = store_chain(tmp_path, BASE, [(KEYED, PARTIAL, b"1", b"1\tnew\t\\u\n")])
    assert choose_changes(SESSION, sources, location) is not None
    assert choose_changes(SESSION, sources, location, completes=False) is None
    monkeypatch.setattr(limits, "CHOSEN_KEYS_BYTES_MAX", 60)
    assert choose_changes(SESSION, sources, location) is None
