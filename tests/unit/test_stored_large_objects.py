"""Stored large objects that somebody sealed who can write to the store: only what a copy task writes is read."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from cutline.check.stored_large_objects import LargeCheckTask, OidRange, overlaps, read_large
from cutline.restore.rows.large_objects import ActorsTask, definition_statements, read_actors
from cutline.snapshots.base_copy.large_objects import LARGE_SCHEMA, PART_BYTES
from cutline.snapshots.records.commit import (
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    Grant,
    LargeObjectDefinition,
    StoredObject,
    parse_definition,
)
from cutline.storage.digest import digest
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import parquet_options
from tests.tables.large_object_states import HOSTILE_DEFINITIONS

OWNED = json.dumps({"owner": "o", "comment": "it's", "grants": [["o", "", "SELECT", False]]})
WHOLE = b"x" * PART_BYTES
Part = tuple[int, int, bytes, str | None]


@pytest.fixture
def location(tmp_path: Any) -> StoreLocation:
    return StoreLocation(f"file://{tmp_path}/store")


def store_rows(location: StoreLocation, *objects: list[Part], schema: pa.Schema = LARGE_SCHEMA) -> LargeCheckTask:
    """Store the objects of one copy task."""
    store, stored = location.open(), list[StoredObject]()
    assert isinstance(store, LocalStore)
    store.root.mkdir(exist_ok=True)
    for number, rows in enumerate(objects):
        sink, columns = pa.BufferOutputStream(), list(zip(*rows, strict=True))
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=False)], schema)
        pq.write_table(table, sink, **parquet_options(schema))
        body, key = sink.getvalue().to_pybytes(), f"part-large-000000-{number:06d}-0"
        store.create(key, body)
        count = sum(row[3] is not None for row in rows)
        stored.append(
            StoredObject(key, LARGE_OBJECTS, "s1", len(body), digest(body), rows={LARGE_OBJECTS_COUNT: count})
        )
    return LargeCheckTask(tuple(stored), location)


def messages(task: LargeCheckTask) -> list[str]:
    """What a check says of each object, "" if it is intact."""
    return [one.problem["message"] if one.problem else "" for one in read_large(task)]


def test_a_definition_is_read() -> None:
    assert parse_definition(OWNED) == LargeObjectDefinition("o", "it's", (Grant("o", "", "SELECT", may_grant=False),))
    # As PostgreSQL writes it.
    text = '{"owner" : "o", "comment" : null, "grants" : null}'
    assert parse_definition(text) == LargeObjectDefinition("o", None, None)


def test_the_statements_of_a_definition() -> None:
    grants = (Grant("o", "", "SELECT", may_grant=False), Grant("g", 'r"r', "UPDATE", may_grant=True))
    found = [one.as_string() for one in definition_statements(7, LargeObjectDefinition("o", "it's", grants), "me")]
    assert found == [
        "COMMENT ON LARGE OBJECT 7 IS 'it''s'",
        'ALTER LARGE OBJECT 7 OWNER TO "o"',
        'REVOKE ALL ON LARGE OBJECT 7 FROM "o"',
        "GRANT SELECT ON LARGE OBJECT 7 TO PUBLIC",
        'SET ROLE "g"; GRANT UPDATE ON LARGE OBJECT 7 TO "r""r" WITH GRANT OPTION; RESET ROLE',
    ]


@pytest.mark.parametrize("text", HOSTILE_DEFINITIONS.values(), ids=HOSTILE_DEFINITIONS)
def test_a_damaged_definition_is_a_damaged_object(location: StoreLocation, text: str) -> None:
    task = store_rows(location, [(7, 0, b"x", OWNED), (8, 0, b"x", text)])
    ((problem, low, high),) = read_large(task)
    assert problem
    assert (low, high) == (0, 0)
    assert (problem["exit_code"], problem["details"]["kind"]) == (3, "unreadable")
    assert "large object 8: a definition is invalid" in problem["message"]
    assert len(problem["message"]) < 1000
    report = read_actors(ActorsTask(task.objects, location))
    assert report.problem
    assert report.problem["message"] == problem["message"]


def test_the_parts_that_a_task_writes_are_read(location: StoreLocation) -> None:
    begin: list[Part] = [(7, 0, b"", OWNED), (8, 0, WHOLE, OWNED), (9, 0, WHOLE, OWNED), (10, 0, WHOLE, OWNED)]
    more: list[Part] = [(8, PART_BYTES, WHOLE, None)]
    rest: list[Part] = [(8, 2 * PART_BYTES, b"x", None), (10, PART_BYTES, b"x", None), (2**32 - 1, 0, b"x", OWNED)]
    task = store_rows(location, begin, more, rest)
    assert messages(task) == ["", "", ""]
    assert read_actors(ActorsTask(task.objects, location)).oids == {"o": 2**32 - 1}


def test_the_ranges_of_oids_are_those_of_first_parts(location: StoreLocation) -> None:
    begin: list[Part] = [(7, 0, b"", OWNED), (8, 0, WHOLE, OWNED), (2**32 - 1, 0, WHOLE, OWNED)]
    # Large object 8 goes on behind larger oids.
    more: list[Part] = [(8, PART_BYTES, b"x", None), (2**32 - 1, PART_BYTES, b"x", None)]
    readings = read_large(store_rows(location, begin, more))
    assert [(one.low, one.high) for one in readings] == [(7, 2**32 - 1), (0, 0)]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([(1, 5), (6, 9), (10, 10)], {}),
        # A repair may have given keys in another order.
        ([(6, 9), (1, 5)], {}),
        ([(1, 5), (5, 9)], {"b": "a"}),
        ([(3, 3), (3, 3)], {"b": "a"}),
        ([(1, 9), (2, 3), (4, 5), (10, 12)], {"b": "a", "c": "a"}),
        ([(4, 5), (7, 9), (1, 9)], {"a": "c", "b": "c"}),
    ],
)
def test_an_oid_in_two_objects_is_found(ranges: list[tuple[int, int]], expected: dict[str, str]) -> None:
    found = dict(overlaps(OidRange(low, high, key) for (low, high), key in zip(ranges, "abcd", strict=False)))
    assert found.keys() == expected.keys()
    assert all(f"object {other} contains" in found[key] for key, other in expected.items())


@pytest.mark.parametrize(
    ("rows", "detail"),
    [
        ([(7, 1, b"x", OWNED)], "at offset 1 instead of 0"),
        ([(7, -1, b"x", OWNED)], "at offset -1 instead of 0"),
        ([(0, 0, b"x", OWNED)], "large object 0"),
        ([(2**32, 0, b"x", OWNED)], "large object 4294967296"),
        ([(7, 0, WHOLE + b"x", OWNED)], "262145 bytes"),
        ([(7, 0, b"x", OWNED), (7, 0, b"x", OWNED)], "large object 7 is listed after large object 7"),
        ([(7, 0, b"x", None)], "at offset 0, after its last part"),
        ([(7, 0, b"x", OWNED), (7, 1, b"x", None)], "at offset 1, after its last part"),
        ([(7, 0, WHOLE, OWNED), (7, -5, b"x", None)], "at offset -5 instead of 262144"),
        ([(7, 0, WHOLE, OWNED), (7, 2 * PART_BYTES, b"x", None)], "at offset 524288 instead of 262144"),
        ([(7, 0, WHOLE, OWNED), (7, PART_BYTES, b"", None)], "contains an empty part"),
    ],
)
def test_parts_in_another_order_are_damage(location: StoreLocation, rows: list[Part], detail: str) -> None:
    (message,) = messages(store_rows(location, rows))
    assert detail in message


def test_other_columns_are_damage(location: StoreLocation) -> None:
    for schema in (LARGE_SCHEMA.remove(1), LARGE_SCHEMA.set(0, pa.field("oid", pa.int64()))):
        rows: list[Any] = [(7, b"x", OWNED, None) if len(schema) == 3 else (7, 0, b"x", OWNED)]
        task = store_rows(location, rows, schema=schema)
        assert "its columns are not oid, offset" in messages(task)[0]
        assert read_actors(ActorsTask(task.objects, location)).problem
        location.open().delete(task.objects[0].key)


def test_damage_of_one_object_is_no_conflict_of_the_next(location: StoreLocation) -> None:
    task = store_rows(
        location, [(7, 0, WHOLE, "no")], [(7, PART_BYTES, WHOLE, None)], [(7, 2 * PART_BYTES, b"x", None)]
    )
    first, *others = messages(task)
    assert "a definition is invalid" in first
    assert others == ["", ""]


@pytest.mark.parametrize(
    ("roles", "is_known"),
    [(None, True), (frozenset({"o"}), True), (frozenset({"another"}), False), (frozenset(), False)],
)
def test_the_roles_of_a_definition_are_those_of_the_server(
    location: StoreLocation, roles: frozenset[str] | None, *, is_known: bool
) -> None:
    grants = [["o", "pg_monitor", "SELECT", False], ["o", "", "SELECT", False], ["o", "ärger", "SELECT", False]]
    granted = json.dumps({"owner": "o", "comment": None, "grants": grants})
    task = replace(store_rows(location, [(7, 0, b"x", OWNED), (8, 0, b"x", granted)]), roles=roles)
    (message,) = messages(task)
    assert (message == "") == is_known
    if not is_known:
        assert "large object 7 names role o, which the stored roles of its server lack" in message
