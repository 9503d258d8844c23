"""The types that users have created, from the DDL: a domain is as the type under it."""

from __future__ import annotations

from cutline.check.own_types import CompositeType, DomainType, EnumType, joined, types_of
from cutline.snapshots.ddl.described_ddl import Description

MOOD, PAIR = EnumType(frozenset({b"ok", rb"a\\b"})), CompositeType(frozenset({("integer", "text")}))


def test_a_domain_is_as_the_type_under_it() -> None:
    bases = {
        1: "numeric(5,2)", 2: "m.one", 3: "m.mood", 4: "m.pair", 5: "character varying(3)",
        6: "timestamp with time zone", 7: "m.unknown", 8: "m.two", 9: "m.nine", 10: "integer[]",
    }  # fmt: skip
    types = {"m.one": 1, "m.two": 2, "m.mood": 20, "m.pair": 21, "m.nine": 9}
    described = Description(bases=bases, types=types, enums={20: ("ok", "a\\b")}, fields={21: ("integer", "text")})
    number = DomainType(1700, (5 << 16 | 2) + 4)
    assert types_of(described) == {
        20: MOOD, 21: PAIR, 1: number, 2: number, 8: number, 3: MOOD, 4: PAIR, 5: DomainType(1043, 7),
        6: DomainType(1184, -1), 10: DomainType(1007, -1),
    }  # fmt: skip


def test_a_type_keeps_what_it_has_had() -> None:
    assert joined(MOOD, EnumType(frozenset({b"new"}))) == EnumType(MOOD.labels | {b"new"})
    assert joined(PAIR, CompositeType(frozenset({("date",)}))) == CompositeType(PAIR.versions | {("date",)})
    # Its oid was that of another type before.
    assert joined(MOOD, PAIR) == PAIR
