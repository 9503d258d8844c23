"""Two tables, pgoutput messages of changes to them, and decoders of these messages."""

from __future__ import annotations

from typing import Any

from cutline.columns.bytes_column import from_list
from cutline.nodes.groups import Column, Group
from cutline.wal.decoding.decoder import Decoded, Decoder
from cutline.wal.segments.archive import Definition
from cutline.wal.segments.segments import SEGMENT_SCHEMA
from tests.wal import pgoutput_messages as pgoutput

# The stored order is a, b (the key), c, d. The order in WAL is c, a, d, b.
KEYED = Group(
    3, "public", "keyed", "index", 2,
    (Column("a", "int", 23, -1, 1), Column("b", "text", 25, -1, 3),
     Column("c", "text", 25, -1, 0), Column("d", "text", 25, -1, 2)), 4,
)  # fmt: skip
FULL = Group(5, "s", "full", "full", 0, (Column("x", "text", 25, -1, 0), Column("y", "text", 25, -1, 1)), 2)
KEYED_OID, FULL_OID, OTHER_OID = 16_400, 16_401, 16_402
KEYED_COLUMNS = [(False, "c", 25, -1), (True, "a", 23, -1), (False, "d", 25, -1), (True, "b", 25, -1)]
RELATIONS = [
    pgoutput.relation(KEYED_OID, "public", "keyed", "i", KEYED_COLUMNS),
    pgoutput.relation(FULL_OID, "s", "full", "f", [(True, "x", 25, -1), (True, "y", 25, -1)]),
    pgoutput.relation(OTHER_OID, "public", "other", "d", [(True, "id", 23, -1)]),
]
# Messages of every kind.
ALL_MESSAGES = [
    *RELATIONS,
    pgoutput.begin(100, 7), pgoutput.insert(FULL_OID, [b"1", None]), pgoutput.insert(OTHER_OID, [b"1"]),
    pgoutput.truncate(FULL_OID), pgoutput.insert(FULL_OID, [b"2", None]), pgoutput.commit(100, 150),
    pgoutput.message(160, "others", b"x"),
    pgoutput.begin_prepare(200, 260, 8, "g1"),
    pgoutput.update(KEYED_OID, [b"c", b"2", b"d", b"b"], key=[None, b"1", None, b"b"]),
    pgoutput.message(190, "others", b"x", transactional=True),
    pgoutput.delete(KEYED_OID, key=[None, b"2", None, b"b"]), pgoutput.prepare(200, 260, 8, "g1"),
    pgoutput.message(300, "cutline", b"content"), pgoutput.commit_prepared(340, 380, 8, "g1"),
    pgoutput.rollback_prepared(280, 390, 9, "g0"),
    pgoutput.begin(400, 9), pgoutput.origin(5, "elsewhere"), pgoutput.type_(99, "s", "mood"),
    pgoutput.message(390, "snapshot.gid", b"g2", transactional=True),
    pgoutput.insert(FULL_OID, [b"3", None]), pgoutput.commit(400, 450),
]  # fmt: skip
VERSIONS = (Definition(KEYED_OID, KEYED), Definition(FULL_OID, FULL))


def new_decoder() -> Decoder:
    return Decoder("n1", VERSIONS, "exact")


def decode(*messages: bytes) -> Decoded:
    return new_decoder().feed(from_list([*RELATIONS, *messages]))


def list_changes(decoded: Decoded) -> list[tuple[Any, ...]]:
    """The changes as (seq, op, group, key, row), sorted."""
    assert decoded.changes.schema == SEGMENT_SCHEMA
    rows = [(row["seq"], chr(row["op"]), row["group"], row["key"], row["row"]) for row in decoded.changes.to_pylist()]
    return sorted(rows)


def decode_in_transaction(*messages: bytes) -> list[tuple[Any, ...]]:
    return list_changes(decode(pgoutput.begin(100, 7), *messages, pgoutput.commit(100, 150)))
