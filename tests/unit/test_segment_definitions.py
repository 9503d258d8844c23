"""Which definition of its table a change is decoded under, and when it is decoded under none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cutline.columns.bytes_column import from_list
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import fields_of, from_json
from cutline.nodes.groups import Column, Group, SchemaChangedError
from cutline.storage.errors import error_of, report_of
from cutline.wal.decoding.decoder import Decoded, Decoder
from cutline.wal.decoding.known_definitions import SchemaMovedError
from cutline.wal.segments.archive import Definition
from tests.unit.made_changes import FULL, FULL_OID, KEYED, list_changes
from tests.wal import pgoutput_messages as pgoutput

OID = 16_500
ID, NAME, AGE = Column("id", "int", 23, -1, 0), Column("name", "text", 25, -1, 1), Column("age", "int", 23, -1, 1)
OLD = Group(1, "public", "person", "default", 1, (ID, NAME))
NEW = Group(2, "public", "person", "default", 1, (ID, NAME, replace(AGE, position=2)))
OLD_TABLE = pgoutput.relation(OID, "public", "person", "d", [(True, "id", 23, -1), (False, "name", 25, -1)])
NEW_TABLE = pgoutput.relation(
    OID, "public", "person", "d", [(True, "id", 23, -1), (False, "name", 25, -1), (False, "age", 23, -1)]
)
MIDDLE_TABLE = pgoutput.relation(OID, "public", "person", "d", [(True, "id", 23, -1), (False, "age", 23, -1)])
OLD_ROW, NEW_ROW = pgoutput.insert(OID, [b"1", b"a"]), pgoutput.insert(OID, [b"2", b"b", b"3"])


def transaction(lsn: int, *messages: bytes) -> list[bytes]:
    return [pgoutput.begin(lsn, 7), *messages, pgoutput.commit(lsn, lsn + 10)]


def decode_with(versions: list[Definition], *messages: bytes) -> Decoded:
    return Decoder("n1", tuple(versions), "exact").feed(from_list(list(messages)))


def lines(found: Decoded) -> list[tuple[Any, ...]]:
    rows = sorted(found.changes.to_pylist(), key=lambda row: (row["lsn"], row["seq"]))
    return [(row["lsn"], chr(row["op"]), row["group"], row["row"]) for row in rows]


def test_rows_are_decoded_under_the_last_description_before_them() -> None:
    messages = [
        *transaction(100, OLD_TABLE, OLD_ROW),
        *transaction(200, OLD_ROW, NEW_TABLE, NEW_ROW, pgoutput.truncate(OID), NEW_ROW),
        *transaction(300, OLD_TABLE, pgoutput.truncate(OID), OLD_ROW),
    ]
    old, new = b"1\ta\n", b"2\tb\t3\n"
    expected = [
        (100, "U", 1, old), (200, "U", 1, old), (200, "U", 2, new), (200, "T", 2, b""), (200, "U", 2, new),
        (300, "T", 1, b""), (300, "U", 1, old),
    ]  # fmt: skip
    versions = [Definition(OID, OLD), Definition(OID, NEW)]
    assert lines(decode_with(versions, *messages)) == expected
    # The result is the same wherever a batch begins.
    for cut in range(1, len(messages)):
        one = Decoder("n1", tuple(versions), "exact")
        parts = [one.feed(from_list(part)) for part in (messages[:cut], messages[cut:])]
        assert [row for part in parts for row in lines(part)] == expected


def test_the_newer_of_two_equal_definitions_gets_the_rows() -> None:
    again = replace(OLD, number=9)
    found = decode_with(
        [Definition(OID, OLD), Definition(OID, again, copied_from=Lsn(500))], *transaction(100, OLD_TABLE, OLD_ROW)
    )
    assert [row[2] for row in lines(found)] == [9]


def test_a_table_is_known_by_its_oid_and_not_by_its_name() -> None:
    other = pgoutput.relation(OID + 1, "public", "person", "d", [(True, "id", 23, -1), (False, "name", 25, -1)])
    found = decode_with([Definition(OID, OLD)], *transaction(100, other, pgoutput.insert(OID + 1, [b"1", b"a"])))
    assert (lines(found), found.ignored) == ([], 1)
    renamed = pgoutput.relation(OID, "public", "people", "d", [(True, "id", 23, -1), (False, "name", 25, -1)])
    with pytest.raises(SchemaMovedError, match=r"public\.person"):
        decode_with([Definition(OID, OLD)], *transaction(100, renamed, OLD_ROW))
    found = decode_with([Definition(OID, OLD), Definition(OID, replace(OLD, number=4, table="people"))],
                    *transaction(100, renamed, OLD_ROW))  # fmt: skip
    assert [row[2] for row in lines(found)] == [4]


@pytest.mark.parametrize(
    ("changed", "matches"),
    [
        ({}, True),
        ({"identity": "index"}, True),  # the same key, by an index
        ({"key_width": 2}, False),
        ({"identity": "full", "key_width": 0}, False),
        ({"identity": "append_only", "key_width": 0}, False),
        ({"schema": "other"}, False),
        ({"columns": (ID, replace(NAME, name="nom"))}, False),
        ({"columns": (ID, replace(NAME, type_oid=1043))}, False),
        ({"columns": (ID, replace(NAME, type_modifier=14))}, False),
        ({"columns": (replace(ID, position=1), replace(NAME, position=0))}, False),
        ({"columns": (ID,)}, False),
        ({"partitions": 8}, True),
    ],
)
def test_everything_in_a_description_must_match(changed: dict[str, Any], *, matches: bool) -> None:
    versions = [Definition(OID, replace(OLD, **changed))]
    messages = transaction(100, OLD_TABLE, OLD_ROW)
    if matches:
        assert len(lines(decode_with(versions, *messages))) == 1
    else:
        with pytest.raises(SchemaMovedError):
            decode_with(versions, *messages)


def test_key_flags_make_no_difference_to_replica_identity_full() -> None:
    for flags in ((True, True), (False, False)):
        columns = [(flag, name, 25, -1) for flag, name in zip(flags, "xy", strict=True)]
        table = pgoutput.relation(FULL_OID, "s", "full", "f", columns)
        found = decode_with(
            [Definition(FULL_OID, FULL)], *transaction(100, table, pgoutput.insert(FULL_OID, [b"1", b"2"]))
        )
        assert list_changes(found) == [(0, "I", 5, b"", b"1\t2\n")]


def test_changes_before_a_new_copy_are_dropped_if_no_definition_matches_them() -> None:
    versions = [Definition(OID, OLD), Definition(OID, NEW, copied_from=Lsn(200))]
    messages = [
        *transaction(100, MIDDLE_TABLE, OLD_ROW, pgoutput.truncate(OID)),
        *transaction(199, OLD_ROW),
        *transaction(200, NEW_TABLE, NEW_ROW),
    ]
    found = decode_with(versions, *messages)
    assert ([row[:3] for row in lines(found)], found.ignored) == ([(200, "U", 2)], 3)
    # If one of them was prepared, and decided after the copy, the copy lacks its changes.
    assert found.dropped == {100, 199}
    with pytest.raises(SchemaMovedError) as raised:
        decode_with(versions, *transaction(199, MIDDLE_TABLE, OLD_ROW), *transaction(200, OLD_ROW))
    assert raised.value.details == {
        "node": "n1", "group": "public.person", "oid": OID,
        "moved": [{"node": "n1", "group": "public.person", "oid": OID}],
    }  # fmt: skip


def test_changes_of_a_table_that_is_gone_are_dropped_if_no_definition_matches_them() -> None:
    messages = [*transaction(100, OLD_TABLE, OLD_ROW), *transaction(200, MIDDLE_TABLE, OLD_ROW)]
    found = decode_with([Definition(OID, OLD, is_gone=True)], *messages)
    assert ([row[:3] for row in lines(found)], found.ignored) == ([(100, "U", 1)], 1)
    assert not found.dropped


def test_an_unknown_description_without_rows_raises_no_error() -> None:
    found = decode_with([Definition(OID, OLD)], *transaction(100, MIDDLE_TABLE, OLD_TABLE, OLD_ROW, NEW_TABLE))
    assert len(lines(found)) == 1


def test_all_tables_that_moved_are_named_at_once_and_the_error_survives_a_report() -> None:
    full = pgoutput.relation(FULL_OID, "s", "full", "f", [(True, "x", 25, -1)])
    rows = transaction(100, MIDDLE_TABLE, OLD_ROW, full, pgoutput.insert(FULL_OID, [b"1"]), OLD_ROW)
    with pytest.raises(SchemaChangedError) as raised:
        decode_with([Definition(OID, OLD), Definition(FULL_OID, FULL)], *rows)
    error = error_of(json.loads(json.dumps(report_of(raised.value))))
    assert (type(error), error.slug, error.exit_code) == (SchemaMovedError, "schema-moved", 3)
    assert error.details["moved"] == [
        {"node": "n1", "group": "s.full", "oid": FULL_OID}, {"node": "n1", "group": "public.person", "oid": OID},
    ]  # fmt: skip


LSNS = st.integers(0, 2**63 - 1).map(Lsn)


@given(st.integers(0, 2**32 - 1), st.sampled_from([KEYED, FULL, OLD, NEW]), st.none() | LSNS,
       st.booleans())  # fmt: skip
def test_a_definition_round_trips_through_json(oid: int, group: Group, copied_from: Lsn | None, is_gone: bool) -> None:  # noqa: FBT001
    definition = Definition(oid, group, copied_from, is_gone)
    assert from_json(json.dumps(fields_of(definition)), Definition) == definition
