"""Readers of base objects get the rows that are not dead, in the order of the object, and no others."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.dead_rows import read_dead_rows, store_dead_rows
from cutline.snapshots.fold.long_lines import LONG_LINE_BYTES, LongLines, read_with_places, stand_in_of
from cutline.snapshots.fold.sources import BaseSource, BaseSources, Source, read_tables, verify_object
from cutline.snapshots.records.commit import BASE, DDL, DeadRows, StoredObject
from cutline.snapshots.records.commit_rules import check_object
from cutline.storage.digest import digest
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

FOLDER = "snapshots/s/base/n/20260101T000000Z-0123456abc"
LONG = LONG_LINE_BYTES + 1


def stored(store: ObjectStore, lines: list[bytes], row_group_size: int, dead: Iterable[int]) -> Source:
    """Store the lines as rows of group 1, with the numbers of those that are dead."""
    columns = [
        pa.array([1] * len(lines), pa.int32()),
        pa.array([0] * len(lines), pa.int32()),
        pa.array([b"%d" % number for number in range(len(lines))], pa.binary()),
        pa.array(lines, pa.binary()),
    ]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_arrays(columns, schema=BASE_SCHEMA), sink, row_group_size, use_dictionary=False)
    body = sink.getvalue().to_pybytes()
    key = f"{FOLDER}/part-{secrets.token_hex(4)}.parquet"
    store.create(key, body)
    numbers = np.array(sorted(dead), np.int64)
    listed = store_dead_rows(store, f"{FOLDER}/dead-000001", numbers) if len(numbers) else None
    return Source(key, "n", 0, len(body), digest(body), {1: len(lines) - len(numbers)}, dead=listed)


@given(st.data(), st.integers(1, 40), st.integers(1, 12))
def test_dead_rows_are_never_read(data: st.DataObject, count: int, row_group_size: int) -> None:
    dead = data.draw(st.sets(st.integers(0, count - 1)))
    long = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    lines = [(b"l" * LONG if number in long else b"") + b"%d\n" % number for number in range(count)]
    store = InMemoryStore("memory://dead")
    source = stored(store, lines, row_group_size, dead)
    expected = [line for number, line in enumerate(lines) if number not in dead]
    assert [row for table in read_tables(store, source, BASE_SCHEMA) for row in table["row"].to_pylist()] == expected
    verify_object(store, source)

    # A long line is found again at its place.
    base = BaseSource(source, source.rows or {})
    reader = LongLines(store, BaseSources.of([base]), ())
    found: list[Any] = []
    for table in read_with_places(store, base, 0, BASE_SCHEMA):
        for row in table.to_pylist():
            line = reader.read(row["place"], stand_in_of(np.frombuffer(row["row"], np.uint8)))
            found.append(line.tobytes())
    assert found == expected


@given(st.sets(st.integers(0, 3_000_000), min_size=1, max_size=200))
def test_numbers_are_read_as_they_were_stored(dead: set[int]) -> None:
    store = InMemoryStore("memory://dead")
    numbers = np.array(sorted(dead), np.int64)
    listed = store_dead_rows(store, f"{FOLDER}/dead", numbers)
    assert (listed.rows, listed.key.startswith(f"{FOLDER}/dead-")) == (len(dead), True)
    assert read_dead_rows(store, "n", listed, 3_000_001).tolist() == sorted(dead)


def test_scattered_numbers_take_about_a_byte() -> None:
    store = InMemoryStore("memory://dead")
    numbers = np.flatnonzero(np.random.default_rng(1).random(1_000_000) < 0.01)
    assert store_dead_rows(store, f"{FOLDER}/dead", numbers).size < 1.3 * len(numbers)


def test_an_object_that_contradicts_its_entry_is_damaged() -> None:
    store = InMemoryStore("memory://dead")
    lines = [b"%d\n" % number for number in range(10)]
    source = stored(store, lines, 4, [3, 7])
    assert source.dead is not None
    other = stored(store, lines, 4, [3, 7, 8]).dead
    for wrong in (
        structs.replace(source.dead, rows=1),
        structs.replace(source.dead, digest=digest(b"")),
        structs.replace(source.dead, size=source.dead.size + 1),
        structs.replace(source.dead, key=f"{FOLDER}/dead-gone.parquet"),
        other,
        None,
    ):
        changed = Source(source.key, "n", 0, source.size, source.digest, source.rows, dead=wrong)
        with pytest.raises(ObjectDamagedError) as raised:
            list(read_tables(store, changed, BASE_SCHEMA))
        assert raised.value.node == "n"


@pytest.mark.parametrize("numbers", [[3, 3], [7, 3], [-1, 3], [3, 10]], ids=str)
def test_numbers_that_are_impossible_are_damage(numbers: list[int]) -> None:
    store = InMemoryStore("memory://dead")
    listed = store_dead_rows(store, f"{FOLDER}/dead", np.array(numbers, np.int64))
    with pytest.raises(ObjectDamagedError, match="numbers that are not those of dead rows among 10") as raised:
        read_dead_rows(store, "n", listed, 10)
    assert raised.value.key == listed.key


def test_an_object_of_something_else_is_damage() -> None:
    store = InMemoryStore("memory://dead")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"other": [1, 2]}), sink)
    body = sink.getvalue().to_pybytes()
    for content in (body, b"no Parquet"):
        key = f"{FOLDER}/dead-{secrets.token_hex(4)}.parquet"
        store.create(key, content)
        with pytest.raises(ObjectDamagedError):
            read_dead_rows(store, "n", DeadRows(key, len(content), digest(content), 2), 10)


def test_only_objects_of_rows_have_dead_rows_of_their_own_node() -> None:
    dead = DeadRows(f"{FOLDER}/dead-1.parquet", 1, "d", 1)
    good = StoredObject(f"{FOLDER}/part-1.parquet", BASE, "n", 1, "d", {1: 1}, dead)
    check_object("s", good)
    for wrong in (
        structs.replace(good, dead=structs.replace(dead, rows=0)),
        structs.replace(good, dead=structs.replace(dead, key=dead.key.replace("/n/", "/m/"))),
        structs.replace(good, dead=structs.replace(dead, key=f"{FOLDER}/part-2.parquet")),
        structs.replace(good, key=f"{FOLDER}/dead-2.parquet"),
        structs.replace(good, kind=DDL, key="snapshots/s/schema/n/o/archive-1.dump.zst", rows={}),
    ):
        with pytest.raises(ValueError, match="object snapshots/s/"):
            check_object("s", wrong)
