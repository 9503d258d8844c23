"""Long lines: their stand-ins, the places where they are read again, and values that come from earlier lines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutline.snapshots.fold.long_lines
from cutline.columns.bytes_column import Bytes, from_list
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.key_history import Images, merge
from cutline.snapshots.fold.long_lines import (
    LONG_LINE_BYTES,
    NO_PLACE,
    LongLines,
    complete_image,
    line_names,
    read_with_places,
    stand_in_of,
    with_stand_ins,
)
from cutline.snapshots.fold.sources import BaseSource, BaseSources, Source, problem_of
from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import parquet_options

LONG = b"k\t" + b"x" * LONG_LINE_BYTES
LINES = [b"a\tshort\n", LONG + b"1\n", b"x" * (LONG_LINE_BYTES - 1) + b"\n", LONG + b"2\n", LONG + b"1\n"]


def store_base(store: InMemoryStore, key: str, lines: list[bytes], per_row_group: int) -> BaseSource:
    keys = [b"%d" % number for number in range(len(lines))]
    table = pa.table([[1] * len(lines), [0] * len(lines), keys, lines], schema=BASE_SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=per_row_group, **parquet_options(table.schema))
    body = sink.getvalue().to_pybytes()
    store.create(key, body)
    return BaseSource(Source(key, "a", 0, len(body), digest(body)), {1: len(lines)})


def read(store: InMemoryStore, objects: tuple[BaseSource, ...]) -> list[tuple[bytes, int]]:
    """Row and place of every row, as a fold reads them."""
    tables = (
        table for number, one in enumerate(objects) for table in read_with_places(store, one, number, BASE_SCHEMA)
    )
    return [(row["row"], row["place"]) for table in tables for row in with_stand_ins(table).to_pylist()]


@pytest.mark.parametrize("kept", [0, 1 << 30])
def test_a_long_line_is_read_again_at_its_place(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.snapshots.fold.long_lines, "KEPT_BYTES_MAX", kept)
    store = InMemoryStore("memory://test")
    objects = (store_base(store, "base/0", LINES, 2), store_base(store, "base/1", LINES[::-1], 3))
    found = read(store, objects)
    assert [place == NO_PLACE for _, place in found] == [len(line) <= LONG_LINE_BYTES for line in LINES + LINES[::-1]]
    assert [row for row, place in found if place == NO_PLACE] == [LINES[0], LINES[2], LINES[2], LINES[0]]
    reader = LongLines(store, BaseSources.of(objects), ())
    # Every second row, then the others, then all in reverse order.
    for row, place in [*found[::2], *found[1::2], *found[::-1]]:
        if place != NO_PLACE:
            assert reader.read(place, row).tobytes() in {LONG + b"1\n", LONG + b"2\n"}
            assert stand_in_of(reader.read(place, row)) == row


def test_a_place_that_holds_another_line_or_is_damaged_is_an_error() -> None:
    store = InMemoryStore("memory://test")
    objects = (store_base(store, "base/0", LINES, 2), store_base(store, "base/1", LINES, 2))
    stand_in, place = next(one for one in read(store, objects) if one[1] != NO_PLACE)
    never = stand_in_of(np.frombuffer(b"what never was\n", np.uint8))
    with pytest.raises(ObjectDamagedError, match=r"base/0 .* a row has changed"):
        LongLines(store, BaseSources.of(objects), ()).read(place, never)
    elsewhere = InMemoryStore("memory://test")
    elsewhere.create("base/0", store.read("base/0")[:-1] + b"?")
    reader = LongLines(elsewhere, BaseSources.of(objects), ())
    with pytest.raises(ObjectDamagedError, match=r"base/0 .* differ from those that were committed"):
        reader.read(place, stand_in)
    assert reader.current_source == objects[0].source


def test_equal_lines_have_equal_names_and_different_lines_different_ones() -> None:
    names = line_names(pa.array(LINES, pa.binary()))
    values = [names.data[low:high].tobytes() for low, high in zip(names.offsets, names.offsets[1:], strict=False)]
    assert (values[0], values[2]) == (LINES[0], LINES[2])
    assert (values[1] == values[4], values[1] == values[3]) == (True, False)
    # No name is a problem report, and a stand-in does not end as a line does.
    assert [problem_of(value) for value in values] == [None] * len(LINES)
    assert not values[1].endswith(b"\n")


def test_rows_that_are_not_lines_stay() -> None:
    table = pa.table([[LINES[1], LINES[1]], [5, 6]], names=["row", "place"])
    kept = with_stand_ins(table, np.array([False, True])).to_pylist()
    assert kept[0] == {"row": LINES[1], "place": NO_PLACE}
    assert kept[1] == {"row": stand_in_of(np.frombuffer(LINES[1], np.uint8)), "place": 6}


VALUES = st.sampled_from([b"", b"a", b"\\\\u", b"\\N", b"\\u", b"\\u", b"\\u"])
HISTORIES = st.lists(st.one_of(st.just(b""), st.tuples(VALUES, VALUES, VALUES)), min_size=1, max_size=6)


@given(HISTORIES)
def test_completing_one_row_gives_the_same_as_merging_whole_columns(history: list[bytes | tuple[bytes, ...]]) -> None:
    lines = [b"\t".join(image) + b"\n" if isinstance(image, tuple) else b"" for image in history]
    if not lines[-1]:
        return
    merged, complete = merge(Images(from_list(lines), np.array([0, len(lines)])), 3)
    found = complete_image((np.frombuffer(line, np.uint8) for line in reversed(lines)), 3)
    assert (found is not None) == bool(complete[0])
    if found is not None:
        assert found.tobytes() == merged.data.tobytes()


def test_no_more_earlier_lines_are_read_than_needed() -> None:
    read: list[int] = []

    def newest_first() -> Iterator[Bytes]:
        for number, line in enumerate([b"1\t\\u\n", b"0\tx\n", b"0\ty\n"]):
            read.append(number)
            yield np.frombuffer(line, np.uint8)

    found = complete_image(newest_first(), 2)
    assert found is not None
    assert (found.tobytes(), read) == (b"1\tx\n", [0, 1])
