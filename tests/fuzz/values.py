"""Types and their values: for every family fixed extreme values and a strategy for others.

A value is an SQL expression with a cast to its type. A few values are drawn once per column, its pool, and every
statement takes from that: so keys collide, deleted rows return, and values are overwritten by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

NULL = "NULL"
POOL_SIZE_MAX = 5
KEY_POOL_SIZE = 6

CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
TEXTS = [
    "", "\\N", "\\u", "\\.", "\\", "\\\\N", "\t", "\n", "a\tb\nc\rd\be\ff\vg", "NULL", '"', "'", "{}",
    "ü€𝄞\u200f\ufeff", " ", "x ", "\x7f\x1f", "a,b;c|d", "".join(map(chr, range(1, 128))), "\\\n.", "\\t",
]  # fmt: skip
TEXT = st.text(CHARACTERS, max_size=12)
INTS = {"smallint": 15, "integer": 31, "bigint": 63}


@dataclass(frozen=True, slots=True)
class Family:
    """A type as SQL names it, its extreme values, and a strategy for others; `sorts` admits it as a key."""

    type: str
    edges: tuple[str, ...]
    others: st.SearchStrategy[str] | None = None
    sorts: bool = True


def literal(text: str, type_: str = "") -> str:
    """The text as an SQL string, cast to a type."""
    return "'" + text.replace("'", "''") + "'" + (f"::{type_}" if type_ else "")


def wide(word: str, length: int | str) -> str:
    """SQL for a text of a length that hardly compresses, the same in every run."""
    of = f"SELECT string_agg(md5(i || {literal(word)}), '' ORDER BY i) FROM generate_series(1, {length} / 32 + 1) AS i"
    return f"left(({of}), {length})"


def family(type_: str, *edges: str, others: st.SearchStrategy[str] | None = None, sorts: bool = True) -> Family:
    """A family whose values are given as texts."""
    found = None if others is None else others.map(lambda text: literal(text, type_))
    return Family(type_, tuple(literal(text, type_) for text in edges), found, sorts)


def _integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(1 << bits), (1 << bits) - 1).map(str)


def _digits(count: int) -> st.SearchStrategy[str]:
    return st.builds(
        lambda sign, whole, part: f"{sign}{whole}{'.' if part else ''}{part}",
        st.sampled_from(["", "-"]),
        st.integers(0, 10**count).map(str),
        st.sampled_from(["", "0", "10", "000000001", "5" * 40]),
    )


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
).map(lambda value: json.dumps(value, ensure_ascii=False).replace("\\u0000", ""))
SINGLE = st.floats(width=32).map(repr)
DOUBLE = st.floats().map(repr)
TIMES = st.times().map(lambda time: time.isoformat())
MOMENTS = st.datetimes().map(lambda moment: f"{moment.year:04}-{moment:%m-%d %H:%M:%S.%f}")
DATES = st.dates().map(lambda day: f"{day.year:04}-{day:%m-%d}")
BYTES = st.binary(max_size=9).map(lambda found: "\\x" + found.hex())
BITS = st.text("01", max_size=9)

FAMILIES = (
    family("integer", "-2147483648", "2147483647", "0", others=_integers(31)),
    family("text", *TEXTS, others=TEXT),
    family("smallint", "-32768", "32767", others=_integers(15)),
    family("bigint", "-9223372036854775808", "9223372036854775807", others=_integers(63)),
    family("numeric", "NaN", "Infinity", "-Infinity", "0.000", "0", "-1e-200", "1e200", "1.0", "1.00", "9" * 1000,
           others=_digits(30)),
    family("numeric(12,4)", "12345678.1234", "-0.0001", others=_digits(6)),
    family("numeric(3,-2)", "12300", "0"),
    family("real", "NaN", "Infinity", "-0", "0", "1e-45", "3.4028235e38", "16777217", others=SINGLE),
    family("double precision", "NaN", "-Infinity", "-0", "0", "5e-324", "1.7976931348623157e308", "0.1", others=DOUBLE),
    family("money", "-92233720368547758.08", "0.01"),
    family("boolean", "t", "f"),
    family("varchar(40)", "", "\\N", "ü" * 40, "\t", others=TEXT),
    family("char(10)", "", "a\\", "ü", " x", others=st.text(CHARACTERS, max_size=10)),
    family("bpchar", "", "a ", "ü\\"),
    family('"char"', "a", "", "\\", "\t", "\\377"),
    family("name", "", "a\\b\tc", "x" * 63, others=TEXT),
    family("bytea", "\\x", "\\x00", "\\x5c5c0a09ff00", "\\x" + bytes(range(256)).hex(), others=BYTES),
    family("date", "infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", others=DATES),
    family("time", "00:00", "24:00:00", others=TIMES),
    family("time(2)", "23:59:59.999", others=TIMES),
    family("timetz", "00:00:00-15:59", "12:34:56.789+05:30:15", others=TIMES.map(lambda time: f"{time}+01")),
    family("timestamp", "infinity", "4713-01-01 00:00 BC", "294276-12-31 23:59:59.999999", others=MOMENTS),
    family("timestamptz", "-infinity", "2024-03-31 02:30:00+02", "0044-03-15 12:00:00+00 BC",
           others=MOMENTS.map(lambda moment: f"{moment}+00")),
    family("interval", "infinity", "-infinity", "-1 year 2 mons -3 days 04:05:06.789", "0", "-00:00:00.000001",
           "178000000 years", "1 mon -1 day", "30 days", "1 mon"),
    family("interval day to second", "1 day 02:03:04.5"),
    family("interval year to month", "-1 year 2 mons"),
    family("timestamp(3)", "1999-12-31 23:59:59.9996", others=MOMENTS),
    family("uuid", "00000000-0000-0000-0000-000000000000", others=st.uuids().map(str)),
    family("json", '{"a" :  1, "a": "\\u00e9\\n"}', "null", '"\\\\"', others=JSONS, sorts=False),
    family("jsonb", '{"a": 1e400, "b": ["\\t", null, "\\\\u"]}', "[]", "1.00", "1", others=JSONS),
    family("jsonpath", '$."a b"[*] ? (@ > 1)', "strict $", sorts=False),
    family("xml", '<a b="1">&lt;\t</a>', "text", "", sorts=False),
    family("inet", "::1/128", "10.0.0.1/8", "fe80::/10", others=st.ip_addresses().map(str)),
    family("cidr", "10.0.0.0/8", "::/0"),
    family("macaddr", "08:00:2b:01:02:03"),
    family("macaddr8", "08:00:2b:01:02:03:04:05"),
    family("bit(5)", "10101", "00000"),
    family("varbit", "", "1", others=BITS),
    family("varbit(3)", "", "101"),
    family("tsvector", "'a\\b':1A 'fat''s':2B", ""),
    family("tsquery", "'fat' & ( 'rat' | !'cat':AB )", ""),
    family("point", "(1e-300,-0)", "(NaN,Infinity)", sorts=False),
    family("line", "{1,-1,0.1}", sorts=False),
    family("lseg", "[(0,0),(1e10,0.1)]", sorts=False),
    family("box", "(2,2),(0,0)", sorts=False),
    family("path", "[(0,0),(1,1)]", "((0,0),(1,1),(2,0))", sorts=False),
    family("polygon", "((0,0),(1,1),(2,0))", sorts=False),
    family("circle", "<(0,0),0.1>", sorts=False),
    family("oid", "4294967295", "0"),
    family("xid", "4294967295", sorts=False),
    family("xid8", "18446744073709551615"),
    family("cid", "7", sorts=False),
    family("tid", "(4294967295,65535)", "(0,1)"),
    family("pg_lsn", "FFFFFFFF/FFFFFFFF", "0/0"),
    family("pg_snapshot", "10:20:10,14,15", sorts=False),
    family("int2vector", "1 2 -3", "", sorts=False),
    family("oidvector", "1 2 3", ""),
    family("regtype", "integer", "-"),
    family("regnamespace", "pg_catalog", "-"),
    family("regproc", "pg_catalog.now", "-"),
    family("regclass", "pg_class", "-"),
    family("aclitem", "=r/postgres", sorts=False),
    family("int4range", "empty", "[1,10)", "(,)"),
    family("numrange", "[0.1,)", "(-Infinity,NaN]"),
    family("tstzrange", '["2024-01-01 00:00+00",infinity)'),
    family("daterange", "[2024-01-01,2024-01-01]", "(,infinity]"),
    family("int8multirange", "{}", "{[1,3),[5,9)}"),
    family("datemultirange", "{[2024-01-01,2024-02-01)}"),
    family("public.hstore", '"a"=>"1", "b c"=>NULL, "\\""=>"\\\\"', "", others=TEXT.map(
        lambda text: '"k"=>"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')),
    family("public.citext", "Abc", "aBC", "", "É", others=TEXT),
    family("public.ltree", "Top.Science.a_1", ""),
    family("public.cube", "(1,2),(3,-4.5)", "(0)"),
)  # fmt: skip
# Some of these values are stored out of line, and left out of the WAL while they are unchanged.
LENGTH = "…length…"
_A, _B = wide("a", LENGTH), wide("b", LENGTH)
WIDE = (
    Family("text", (_A, _B, literal("short"), "repeat('c', 20000)")),
    Family("bytea", (f"convert_to({_A}, 'UTF8')", f"convert_to({_B}, 'UTF8')", "'\\x00'::bytea")),
    Family("jsonb", (f"to_jsonb({_A})", f"jsonb_build_object('k', {_B})", "'1.00'::jsonb")),
    Family(
        "text[]", (f"ARRAY[{_A}, NULL, {_B}]", f"ARRAY[{_B}]", "'{}'::text[]", "array_fill('d'::text, ARRAY[3000])")
    ),
)
EXTENSIONS = ("hstore", "citext", "ltree", "cube")
KEY_FAMILIES = tuple(one for one in FAMILIES if one.sorts)


@st.composite
def pools(draw: st.DrawFn, of: Family, *, nulls: bool, size_max: int = POOL_SIZE_MAX) -> tuple[str, ...]:
    """The values of one column: some extreme, some others, NULL among them if `nulls`."""
    values = st.sampled_from(of.edges)
    found = draw(st.lists(values if of.others is None else values | of.others, min_size=2, max_size=size_max))
    return tuple(dict.fromkeys([*found, NULL] if nulls else found))


@st.composite
def key_pools(draw: st.DrawFn, of: Family) -> tuple[str, ...]:
    """Values for a key: consecutive integers, so that keys are many and collide; texts may be wide."""
    if of.type in INTS:
        first = draw(st.integers(-3, (1 << INTS[of.type]) - KEY_POOL_SIZE))
        return tuple(f"({number})::{of.type}" for number in range(first, first + KEY_POOL_SIZE))
    found = draw(pools(of, nulls=False, size_max=KEY_POOL_SIZE))
    if of.type == "text" and draw(st.booleans()):
        found += (wide("one", 2400), wide("two", 2300))
    return found


def arrays(of: Family) -> Family:
    """The arrays of a type: empty, nested, with bounds, with NULL."""
    first, last = of.edges[0], of.edges[-1]
    several = ", ".join([*of.edges[:4], NULL])
    type_ = f"{of.type}[]"
    values = (
        "'{}'", f"ARRAY[{several}]", f"ARRAY[[{first}, NULL], [NULL, {last}]]",
        f"array_fill({last}, ARRAY[2], ARRAY[-1])",
    )  # fmt: skip
    return Family(type_, tuple(f"{value}::{type_}" for value in values), None, of.sorts)


def composites(name: str, parts: Sequence[Family]) -> Family:
    """A composite type of some others, whose fields may all be NULL."""
    rows = [f"ROW({', '.join(part.edges[place % len(part.edges)] for part in parts)})" for place in range(4)]
    rows.append(f"ROW({', '.join([NULL] * len(parts))})")
    return Family(name, tuple(f"{row}::{name}" for row in rows), None, all(part.sorts for part in parts))


def ranges(name: str, multi: str, of: Family) -> tuple[Family, Family]:
    """A range type of that subtype, and its multiranges."""
    first, last = of.edges[0], of.edges[-1]
    ordered = f"least({first}, {last}), greatest({first}, {last})"
    bounds = [f"{ordered}, '[]'", ordered, f"{first}, NULL", "NULL, NULL"]
    values = ["'empty'", *(f"{name}({found})" for found in bounds)]
    several = ["'{}'", *(f"{multi}({value})" for value in values[1:])]
    return (
        Family(name, tuple(f"{value}::{name}" for value in values)),
        Family(multi, tuple(f"{value}::{multi}" for value in several)),
    )
