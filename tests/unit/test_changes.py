"""Decoding hand-made messages into changes and events."""

from __future__ import annotations

import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cutline.columns.bytes_column import from_list
from cutline.wal.decoding.known_definitions import SchemaMovedError
from cutline.wal.decoding.pgoutput import DecodingError
from cutline.wal.segments.segments import EVERY_PARTITION, NO_GROUP, SEGMENT_SCHEMA, UNKNOWN_TIME
from tests.unit.made_changes import (
    ALL_MESSAGES,
    FULL_OID,
    KEYED_COLUMNS,
    KEYED_OID,
    OTHER_OID,
    RELATIONS,
    decode,
    decode_in_transaction,
    list_changes,
    new_decoder,
)
from tests.wal import pgoutput_messages as pgoutput


def test_rows_are_stored_with_their_key_first() -> None:
    found = decode_in_transaction(
        pgoutput.insert(KEYED_OID, [b"c\tc", b"1", None, b"b\\b"]),
        pgoutput.update(KEYED_OID, [b"c2", b"1", b"d", b"bb"]),
        pgoutput.delete(KEYED_OID, key=[None, b"1", None, b"bb"]),
    )
    assert found == [
        (0, "U", 3, b"1\tb\\\\b", b"1\tb\\\\b\tc\\tc\t\\N\n"),
        (2, "U", 3, b"1\tbb", b"1\tbb\tc2\td\n"),
        (4, "D", 3, b"1\tbb", b""),
    ]


def test_an_unchanged_value_is_marked() -> None:
    found = decode_in_transaction(pgoutput.update(KEYED_OID, [(), b"1", b"d", b"b"]))
    assert found == [(0, "u", 3, b"1\tb", b"1\tb\t\\u\td\n")]


def test_a_moved_key_is_a_removal_and_a_new_row() -> None:
    found = decode_in_transaction(
        pgoutput.update(KEYED_OID, [b"c", b"2", b"d", b"b"], key=[None, b"1", None, b"b"]),
        # A value that the update left unchanged is found under the old key, so the removal names the new key.
        pgoutput.update(KEYED_OID, [b"c", b"3", (), b"b"], key=[None, b"2", None, b"b"]),
    )
    assert found == [
        (0, "D", 3, b"1\tb", b""),
        (1, "U", 3, b"2\tb", b"2\tb\tc\td\n"),
        (2, "D", 3, b"2\tb", b"3\tb\n"),
        (3, "u", 3, b"3\tb", b"3\tb\tc\t\\u\n"),
    ]


def test_a_key_sent_only_because_it_is_toasted_did_not_move() -> None:
    wide = b"w" * 5000
    found = decode_in_transaction(pgoutput.update(KEYED_OID, [b"c", b"1", b"d", ()], key=[None, b"1", None, wide]))
    assert found == [(1, "U", 3, b"1\t" + wide, b"1\t" + wide + b"\tc\td\n")]


def test_a_group_without_a_key_is_a_multiset_of_lines() -> None:
    found = decode_in_transaction(
        pgoutput.insert(FULL_OID, [b"x", None]),
        pgoutput.update(FULL_OID, [(), b"y"], old=[b"x", None]),
        pgoutput.delete(FULL_OID, old=[b"x", b"y"]),
    )
    assert found == [
        (0, "I", 5, b"", b"x\t\\N\n"),
        (2, "D", 5, b"", b"x\t\\N\n"),
        (3, "I", 5, b"", b"x\ty\n"),
        (4, "D", 5, b"", b"x\ty\n"),
    ]


def test_the_partition_is_that_of_the_key_or_of_the_line() -> None:
    decoded = decode(
        pgoutput.begin(100, 7),
        pgoutput.insert(KEYED_OID, [b"c", b"1", b"d", b"b"]),
        pgoutput.insert(FULL_OID, [b"x", b"y"]),
        pgoutput.truncate(KEYED_OID, OTHER_OID, FULL_OID),
        pgoutput.commit(100, 150),
    )
    rows = decoded.changes.sort_by([("seq", "ascending"), ("group", "ascending")]).to_pylist()
    expected = [xxhash.xxh64_intdigest(b"1\tb", 42) % 4, xxhash.xxh64_intdigest(b"x\ty\n", 42) % 2]
    assert [row["partition"] for row in rows] == [*expected, EVERY_PARTITION, EVERY_PARTITION]
    assert [(chr(row["op"]), row["group"], row["seq"]) for row in rows[2:]] == [("T", 3, 4), ("T", 5, 4)]
    assert decoded.ignored == 1


def test_rows_of_other_tables_are_counted_and_numbered() -> None:
    decoded = decode(
        pgoutput.begin(100, 7),
        pgoutput.insert(OTHER_OID, [b"1"]),
        pgoutput.insert(FULL_OID, [b"x", b"y"]),
        pgoutput.commit(100, 150),
    )
    assert decoded.ignored == 1
    assert [row[0] for row in list_changes(decoded)] == [2]


def test_every_event_has_the_begin_and_end_of_its_record() -> None:
    decoded = decode(
        pgoutput.begin(100, 7), pgoutput.origin(5, "elsewhere"), pgoutput.type_(99, "s", "mood"),
        pgoutput.commit(100, 150),
        pgoutput.begin_prepare(200, 260, 8, "g1"), pgoutput.insert(FULL_OID, [b"x", b"y"]),
        pgoutput.prepare(200, 260, 8, "g1"),
        pgoutput.message(300, "cutline", b"content"), pgoutput.message(310, "cutlines", b"content"),
        pgoutput.message(320, "cut", b""), pgoutput.message(330, "cutline", b""),
        pgoutput.commit_prepared(340, 380, 8, "g1"), pgoutput.rollback_prepared(280, 420, 9, "g0"),
        pgoutput.message(430, "others", b"cutline"),
    )  # fmt: skip
    rows = decoded.events.to_pylist()
    # The commit of a transaction from elsewhere has the time of its own server.
    assert [row["seq"] == pgoutput.MICROSECONDS for row in rows] == [False, True, False, False, True, True]
    assert rows[0]["seq"] == UNKNOWN_TIME
    found = [(chr(r["op"]), r["lsn"], r["end_lsn"], r["xid"], r["global_id"], r["row"], r["group"]) for r in rows]
    assert found == [
        ("C", 100, 150, 7, None, b"", NO_GROUP),
        ("P", 200, 260, 8, "g1", b"", NO_GROUP),
        ("M", 300, 300, 0, None, b"content", NO_GROUP),
        ("M", 330, 330, 0, None, b"", NO_GROUP),
        ("K", 340, 380, 8, "g1", b"", NO_GROUP),
        ("R", 280, 420, 9, "g0", b"", NO_GROUP),
    ]
    assert decoded.events.schema == SEGMENT_SCHEMA
    assert decoded.through == 430
    (row,) = decoded.changes.to_pylist()
    assert (row["lsn"], row["xid"], row["global_id"]) == (200, 8, "g1")


@given(st.sets(st.integers(1, len(ALL_MESSAGES) - 1)))
def test_batch_boundaries_do_not_change_the_result(cuts: set[int]) -> None:
    expected = new_decoder().feed(from_list(ALL_MESSAGES))
    decoder = new_decoder()
    parts = []
    for low, high in zip([0, *sorted(cuts)], [*sorted(cuts), len(ALL_MESSAGES)], strict=True):
        parts.append(decoder.feed(from_list(ALL_MESSAGES[low:high])))
    order = [("lsn", "ascending"), ("seq", "ascending")]
    changes = pa.concat_tables([part.changes for part in parts])
    assert changes.sort_by(order).to_pylist() == expected.changes.sort_by(order).to_pylist()
    events = pa.concat_tables([part.events for part in parts])
    assert events.to_pylist() == expected.events.to_pylist()
    assert max(part.through for part in parts) == expected.through == 450
    assert sum(part.ignored for part in parts) == expected.ignored == 1
    assert parts[-1].open is None


def test_a_transaction_left_open_is_named_with_the_rows_it_sent() -> None:
    decoder = new_decoder()
    rows = [pgoutput.insert(FULL_OID, [b"1", None])] * 3
    first = decoder.feed(from_list([*RELATIONS, pgoutput.begin_prepare(200, 260, 8, "g1"), *rows]))
    assert first.open is not None
    assert (first.open.lsn, first.open.xid, first.open.global_id, first.open.sent) == (200, 8, "g1", 3)
    assert first.through == 0
    second = decoder.feed(from_list(rows))
    assert second.open is not None
    assert second.open.sent == 6
    assert [row[0] for row in list_changes(second)] == [6, 8, 10]
    assert decoder.feed(from_list([])).open == second.open
    assert decoder.feed(from_list([pgoutput.prepare(200, 260, 8, "g1")])).open is None


@pytest.mark.parametrize(
    "relation",
    [
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", KEYED_COLUMNS[:3]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", [*KEYED_COLUMNS, (False, "e", 25, -1)]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", [(False, "c", 1043, -1), *KEYED_COLUMNS[1:]]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", [(False, "c", 25, 14), *KEYED_COLUMNS[1:]]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", [(False, "z", 25, -1), *KEYED_COLUMNS[1:]]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "i", [(True, "c", 25, -1), *KEYED_COLUMNS[1:]]),
        pgoutput.relation(KEYED_OID, "public", "keyed", "f", KEYED_COLUMNS),
        pgoutput.relation(FULL_OID, "s", "full", "d", [(True, "x", 25, -1), (True, "y", 25, -1)]),
    ],
)
def test_a_redefined_table_is_named(relation: bytes) -> None:
    oid = int.from_bytes(relation[1:5], "big")
    with pytest.raises(SchemaMovedError, match=r"node n1: table (public\.keyed|s\.full)") as raised:
        new_decoder().feed(from_list([pgoutput.begin(1, 2), relation, pgoutput.truncate(oid)]))
    assert raised.value.details["oid"] == oid


@pytest.mark.parametrize(
    "message",
    [
        pgoutput.insert(999, [b"1"]),
        pgoutput.truncate(999),
        pgoutput.insert(KEYED_OID, [b"1"]),
        pgoutput.update(FULL_OID, [b"1", b"2"]),
        pgoutput.update(FULL_OID, [b"1", ()], old=[b"1", ()]),
        pgoutput.insert(FULL_OID, [b"1", ()]),
    ],
)
def test_a_message_that_violates_the_protocol_is_refused(message: bytes) -> None:
    with pytest.raises(DecodingError):
        decode_in_transaction(message)
