"""Two tables and messages of their changes, decoded: what the tests of decoding begin with."""

from __future__ import annotations

from typing import Any

from columns.bytes_column import from_list
from fleet.tables.groups import Column, Group
from tests import pgoutput_messages as made
from wal.decoding.decoder import Decoded, Decoder
from wal.segments.definitions import Definition
from wal.segments.segment_schema import SEGMENT_SCHEMA

# The key is b then a in stored order; c and d follow. In WAL the columns are c, a, d, b.
KEYED = Group(
    3, "public", "keyed", "index", 2,
    (Column("a", "int", 23, -1, 1), Column("b", "text", 25, -1, 3),
     Column("c", "text", 25, -1, 0), Column("d", "text", 25, -1, 2)), 4,
)  # fmt: skip
FULL = Group(5, "s", "full", "full", 0, (Column("x", "text", 25, -1, 0), Column("y", "text", 25, -1, 1)), 2)
KEYED_OID, FULL_OID, OTHER_OID = 16_400, 16_401, 16_402
KEYED_COLUMNS = [(False, "c", 25, -1), (True, "a", 23, -1), (False, "d", 25, -1), (True, "b", 25, -1)]
RELATIONS = [
    made.relation(KEYED_OID, "public", "keyed", "i", KEYED_COLUMNS),
    made.relation(FULL_OID, "s", "full", "f", [(True, "x", 25, -1), (True, "y", 25, -1)]),
    made.relation(OTHER_OID, "public", "other", "d", [(True, "id", 23, -1)]),
]
# A message of every kind.
WHOLE = [
    *RELATIONS,
    made.begin(100, 7), made.insert(FULL_OID, [b"1", None]), made.insert(OTHER_OID, [b"1"]),
    made.truncate(FULL_OID), made.insert(FULL_OID, [b"2", None]), made.commit(100, 150),
    made.message(160, "others", b"x"),
    made.begin_prepare(200, 260, 8, "g1"),
    made.update(KEYED_OID, [b"c", b"2", b"d", b"b"], key=[None, b"1", None, b"b"]),
    made.message(190, "others", b"x", transactional=True),
    made.delete(KEYED_OID, key=[None, b"2", None, b"b"]), made.prepare(200, 260, 8, "g1"),
    made.message(300, "cutline", b"content"), made.commit_prepared(340, 380, 8, "g1"),
    made.rollback_prepared(280, 390, 9, "g0"),
    made.begin(400, 9), made.origin(5, "elsewhere"), made.type_(99, "s", "mood"),
    made.message(390, "snapshot.gid", b"g2", transactional=True),
    made.insert(FULL_OID, [b"3", None]), made.commit(400, 450),
]  # fmt: skip
VERSIONS = (Definition(KEYED_OID, KEYED), Definition(FULL_OID, FULL))


def decoder() -> Decoder:
    return Decoder("n1", VERSIONS, "exact")


def decode(*messages: bytes) -> Decoded:
    return decoder().feed(from_list([*RELATIONS, *messages]))


def changes(decoded: Decoded) -> list[tuple[Any, ...]]:
    """(seq, op, group, key, row) in order."""
    assert decoded.changes.schema == SEGMENT_SCHEMA
    rows = [(row["seq"], chr(row["op"]), row["group"], row["key"], row["row"]) for row in decoded.changes.to_pylist()]
    return sorted(rows)


def in_transaction(*messages: bytes) -> list[tuple[Any, ...]]:
    return changes(decode(made.begin(100, 7), *messages, made.commit(100, 150)))
