"""Tables of all kinds and types, and random statements on them, for comparing decoding with PostgreSQL."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.lsn import Lsn

ASCII = "".join(map(chr, range(1, 128)))
TEXTS = [
    "", "\\N", "\\u", "\\.", "\\", "\\\\N", "\t", "\n", "a\tb\nc\rd\be\ff\vg", ASCII, "NULL", '"', "'", "{}",
    "ü€𝄞\u200f\ufeff", "é" * 30, " ", "\x7f\x1f", "a,b;c|d",
]  # fmt: skip
POOLS: dict[str, list[str]] = {
    "smallint": ["-32768", "32767", "0"],
    "integer": ["-2147483648", "2147483647", "7"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "numeric": ["NaN", "Infinity", "-Infinity", "0.000", "-1e-200", "1e200", "3.14159265358979323846264338"],
    "numeric(12,4)": ["12345678.1234", "-0.0001"],
    "real": ["NaN", "Infinity", "-0", "1e-45", "3.4028235e38", "0.1", "16777217"],
    "double precision": ["NaN", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1", "0.30000000000000004"],
    "money": ["-92233720368547758.08", "0.01"],
    "boolean": ["t", "f"],
    "text": TEXTS,
    "varchar(40)": ["", "\\N", "ü" * 40, "\t"],
    "char(10)": ["", "a\\", "ü"],
    '"char"': ["a", "", "\\", "\t", "ÿ"],
    "name": ["", "a\\b\tc", "x" * 63],
    "bytea": ["\\x", "\\x00", "\\x5c5c0a09ff00", "\\x" + bytes(range(256)).hex()],
    "date": ["infinity", "-infinity", "4713-01-01 BC", "5874897-12-31", "2024-02-29"],
    "time": ["00:00", "24:00:00", "12:34:56.789012"],
    "timetz": ["00:00:00-15:59", "12:34:56.789+05:30:15"],
    "timestamp": ["infinity", "4713-01-01 00:00 BC", "294276-12-31 23:59:59.999999", "2000-01-01 00:00:00.000001"],
    "timestamptz": ["-infinity", "2024-03-31 02:30:00+02", "0044-03-15 12:00:00+00 BC"],
    "interval": ["infinity", "-infinity", "-1 year 2 mons -3 days 04:05:06.789", "0", "-00:00:00.000001"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"a" :  1, "a": "\\u00e9\\n"}', "null", '"\\\\"'],
    "jsonb": ['{"a": 1e400, "b": ["\\t", null, "\\\\u"]}', "[]", '"ü"', "1.00"],
    "jsonpath": ['$."a b"[*] ? (@ > 1)', "strict $"],
    "inet": ["::1/128", "10.0.0.1/8", "fe80::/10"],
    "cidr": ["10.0.0.0/8", "::/0"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(5)": ["10101", "00000"],
    "varbit": ["", "1", "10101010101010101010"],
    "tsvector": ["'a\\b':1A 'fat''s':2B", ""],
    "tsquery": ["'fat' & ( 'rat' | !'cat':AB )", ""],
    "point": ["(1e-300,-0)", "(NaN,Infinity)"],
    "line": ["{1,-1,0.1}"],
    "lseg": ["[(0,0),(1e10,0.1)]"],
    "box": ["(2,2),(0,0)"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1),(2,0))"],
    "polygon": ["((0,0),(1,1),(2,0))"],
    "circle": ["<(0,0),0.1>"],
    "oid": ["4294967295"],
    "xid": ["4294967295"],
    "xid8": ["18446744073709551615"],
    "cid": ["7"],
    "tid": ["(4294967295,65535)"],
    "pg_lsn": ["FFFFFFFF/FFFFFFFF", "0/0"],
    "pg_snapshot": ["10:20:10,14,15"],
    "int2vector": ["1 2 -3", ""],
    "oidvector": ["1 2 3"],
    "regclass": ["pg_class", "public.types", '"od d"."Ta""ble"', "0"],
    "regtype": ["integer", "public.mood"],
    "regnamespace": ["pg_catalog", '"od d"'],
    "regproc": ["pg_catalog.now"],
    "aclitem": ["postgres=arwdDxt/postgres"],
    "public.mood": ["ok", 'so "so"', "tab\there"],
    "public.positive": ["1", "99999"],
    "public.pair": ['(1,"a\\\\b\t""c")', "(,)", '(-5,"")', '(1,"multi\nline")'],
    "public.pair[]": ['{"(1,\\"a\\tb\\")",NULL}', "{}"],
    "public.mood[]": ["{ok,ok,NULL}"],
    "integer[]": ["{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={5,6}"],
    "text[]": ['{"","NULL",NULL,"a\\\\b","c,d","e\\"f"}', "{\\\\\\\\N}"],
    "int4range": ["empty", "[1,10)", "(,)"],
    "numrange": ["[0.1,)", "(-Infinity,NaN]"],
    "tstzrange": ['["2024-01-01 00:00+00",infinity)'],
    "int8multirange": ["{}", "{[1,3),[5,9)}"],
    "xml": ["<a b=\"1\">&lt;\t</a>", "text"],
}  # fmt: skip

SCHEMA = r"""
CREATE TYPE public.mood AS ENUM ('ok', 'so "so"', E'tab\there');
CREATE DOMAIN public.positive AS integer CHECK (VALUE > 0);
CREATE TYPE public.pair AS (number integer, word text);
CREATE SCHEMA "od d";
CREATE TABLE "od d"."Ta""ble" ("value one" text, "B" integer, "select" text, "a" integer, PRIMARY KEY ("a", "B"));
CREATE TABLE public.wide (id integer PRIMARY KEY, n integer, big text, bytes bytea, small text);
ALTER TABLE public.wide ALTER big SET STORAGE EXTERNAL;
CREATE TABLE public.wide_key (n integer, big text, key text PRIMARY KEY);
ALTER TABLE public.wide_key ALTER key SET STORAGE EXTERNAL;
CREATE TABLE public.by_index (
    gone integer, note text, a text NOT NULL, gone_too text, b integer NOT NULL, id serial PRIMARY KEY);
CREATE UNIQUE INDEX by_index_key ON public.by_index (b, a);
ALTER TABLE public.by_index REPLICA IDENTITY USING INDEX by_index_key;
INSERT INTO public.by_index (a, b, note) SELECT 'old' || n, n % 4, 'x' FROM generate_series(1, 20) n;
ALTER TABLE public.by_index DROP COLUMN gone, DROP COLUMN gone_too;
ALTER TABLE public.by_index ADD COLUMN late text DEFAULT E'late\tdefault', ADD COLUMN later integer;
CREATE TABLE public.no_key (a integer, big text, b text);
ALTER TABLE public.no_key REPLICA IDENTITY FULL;
INSERT INTO public.no_key SELECT n % 3, NULL, 'b' FROM generate_series(1, 12) n;
ALTER TABLE public.no_key ADD COLUMN late text DEFAULT 'late';
CREATE TABLE public.append_only (at integer, note text);
CREATE TABLE public.generated (id integer PRIMARY KEY, twice integer GENERATED ALWAYS AS (n * 2) STORED,
    n integer, thrice integer GENERATED ALWAYS AS (n * 3) VIRTUAL, note text);
CREATE TABLE public.only_key (a integer, b text, PRIMARY KEY (b, a));
CREATE TABLE public.parent (id integer, n text, PRIMARY KEY (id)) PARTITION BY RANGE (id);
CREATE TABLE public.low PARTITION OF public.parent FOR VALUES FROM (0) TO (10);
CREATE TABLE public.high PARTITION OF public.parent FOR VALUES FROM (10) TO (100);
CREATE TABLE public.no_columns ();
ALTER TABLE public.no_columns REPLICA IDENTITY FULL;
"""


def wide_text(source: random.Random) -> str:
    """A text long enough for TOAST, with characters that COPY escapes."""
    return "".join(source.choices(string.printable, k=source.choice([2100, 5000, 30_000])))


@dataclass(slots=True)
class Kind:
    """A table for random statements: its SQL name, and for every column a function that draws a value."""

    name: str
    columns: dict[str, Any]
    keys: tuple[str, ...] = ()
    statements: str = "insert insert insert update update update update move delete truncate"


def create_tables(connection: psycopg.Connection[Any], source: random.Random) -> list[Kind]:
    """Create all tables, some with rows, and return their descriptions."""
    connection.execute(SCHEMA.encode())
    pools = dict(POOLS)
    try:
        connection.execute("SELECT '<a/>'::xml")
    except psycopg.errors.FeatureNotSupported:
        del pools["xml"]
    definitions = ", ".join(f"c{place} {type_}" for place, type_ in enumerate(pools))
    connection.execute(f"CREATE TABLE public.types (id integer PRIMARY KEY, {definitions})".encode())

    def any_of(values: list[str]) -> Any:
        return lambda: source.choice([*values, None])

    def number(limit: int) -> Any:
        return lambda: str(source.randrange(limit))

    text = any_of(TEXTS)
    often_wide = lambda: wide_text(source) if source.random() < 0.6 else text()  # noqa: E731  # three uses
    keys = ["".join(source.choices(string.ascii_letters, k=2400)) for _ in range(6)]
    types: dict[str, Any] = {f"c{place}": any_of(pool) for place, pool in enumerate(pools.values())}
    return [
        Kind("public.types", {"id": number(12), **types}, ("id",)),
        Kind('"od d"."Ta""ble"', {"value one": text, "B": number(4), "select": text, "a": number(4)}, ("a", "B")),
        Kind("public.wide", {"id": number(8), "n": number(99), "big": often_wide,
             "bytes": lambda: "\\x" + source.randbytes(3000).hex(), "small": text}, ("id",)),
        Kind("public.wide_key", {"n": number(99), "big": often_wide, "key": lambda: source.choice(keys)}, ("key",)),
        Kind("public.by_index", {"note": text, "a": lambda: source.choice(TEXTS), "b": number(4),
             "late": text, "later": number(9)}, ("a", "b")),
        Kind("public.no_key", {"a": number(3), "big": often_wide, "b": text}),
        Kind("public.append_only", {"at": number(99), "note": text}, (), "insert"),
        Kind("public.generated", {"id": number(9), "n": number(99), "note": text}, ("id",)),
        Kind("public.only_key", {"a": number(4), "b": lambda: source.choice(TEXTS)}, ("b", "a")),
        Kind("public.parent", {"id": number(20), "n": text}, ("id",)),
        Kind("public.no_columns", {}, (), "insert delete"),
    ]  # fmt: skip


@dataclass(slots=True)
class Done:
    """What was executed: by xid or gid, the two positions in WAL that it must be between."""

    commits: dict[int, tuple[int, int]] = field(default_factory=dict)
    prepares: dict[str, tuple[int, int]] = field(default_factory=dict)
    commits_prepared: dict[str, tuple[int, int]] = field(default_factory=dict)
    rollbacks_prepared: dict[str, tuple[int, int]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Traffic:
    """Random transactions on one connection; prepared ones stay open while the next ones run."""

    connection: psycopg.Connection[Any]
    kinds: list[Kind]
    source: random.Random
    done: Done = field(default_factory=Done)
    prepared: list[str] = field(default_factory=list)
    numbers: int = 0

    def run(self, transactions: int) -> None:
        """Run this many transactions; some stay prepared."""
        self.connection.execute("SET lock_timeout = '5ms'")
        for _ in range(transactions):
            self.transaction()
            while self.prepared and (len(self.prepared) > 3 or self.source.random() < 0.3):
                self.end_prepared(self.prepared.pop(self.source.randrange(len(self.prepared))))

    def finish(self) -> None:
        """End every prepared transaction."""
        while self.prepared:
            self.end_prepared(self.prepared.pop())

    def transaction(self) -> None:
        fate = self.source.choice(["commit"] * 5 + ["prepare"] * 3 + ["rollback"])
        self.connection.execute("BEGIN")
        changed = sum([self.statement() for _ in range(self.source.randint(1, 6))])
        xid = self.connection.execute("SELECT pg_current_xact_id()::text").fetchone()
        if fate == "prepare":
            self.numbers += 1
            gid = f"gid-{self.numbers} ü"
            before = self.position()
            self.connection.execute(sql.SQL("PREPARE TRANSACTION {}").format(gid))
            self.done.prepares[gid] = before, self.position()
            self.prepared.append(gid)
            if changed:
                self.done.changed.add(gid)
            return
        before = self.position()
        self.connection.execute("COMMIT" if fate == "commit" else "ROLLBACK")
        if fate == "commit" and changed:
            assert xid is not None
            self.done.commits[int(xid[0]) % 2**32] = before, self.position()

    def end_prepared(self, gid: str) -> None:
        is_commit = self.source.random() < 0.7
        word, where = (
            ("COMMIT", self.done.commits_prepared) if is_commit else ("ROLLBACK", self.done.rollbacks_prepared)
        )
        before = self.position()
        self.connection.execute(sql.SQL(word + " PREPARED {}").format(gid))
        where[gid] = before, self.position()

    def position(self) -> int:
        row = self.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return Lsn.parse(row[0])

    def statement(self) -> int:
        """Run a statement in a savepoint, which is sometimes rolled back; return the number of changed rows."""
        kind = self.source.choice(self.kinds)
        what = self.source.choice(kind.statements.split())
        if what == "truncate" and self.source.random() < 0.8:
            what = "insert"
        self.connection.execute("SAVEPOINT s")
        try:
            changed = self.execute(kind, what)
        except (psycopg.errors.UniqueViolation, psycopg.errors.LockNotAvailable):
            self.connection.execute("ROLLBACK TO s")
            return 0
        if self.source.random() < 0.15:
            self.connection.execute("ROLLBACK TO s")
            return 0
        self.connection.execute("RELEASE s")
        return 1 if what == "truncate" else changed

    def execute(self, kind: Kind, what: str) -> int:
        if what == "truncate":
            self.connection.execute(f"TRUNCATE {kind.name}".encode())
            if self.source.random() < 0.5:
                # Into the table's new file, which a rollback removes.
                self.insert(kind)
            return 1
        if what == "insert":
            return self.insert(kind)
        skip = self.source.randrange(4)
        rows = f"SELECT tableoid, ctid FROM {kind.name} OFFSET {skip} LIMIT {self.source.choice([1, 1, 3])}"
        where = f"WHERE (tableoid, ctid) IN ({rows})"
        if what == "delete":
            return self.connection.execute(f"DELETE FROM {kind.name} {where}".encode()).rowcount
        names = list(kind.keys) if what == "move" and kind.keys else [
            name for name in kind.columns if name not in kind.keys
        ]  # fmt: skip
        if not names:
            return 0
        names = self.source.sample(names, self.source.randint(1, min(len(names), 8)))
        if what == "move" and kind.keys:
            # Sometimes other values change with the key, sometimes none.
            others = [name for name in kind.columns if name not in kind.keys]
            names += self.source.sample(others, self.source.randint(0, min(len(others), 2)))
        values = {name: kind.columns[name]() for name in names}
        assigned = ", ".join(f"{sql.Identifier(name).as_string()} = %s" for name in names)
        query = f"UPDATE {kind.name} SET {assigned} {where}"
        return self.connection.execute(query.encode(), list(values.values())).rowcount

    def insert(self, kind: Kind) -> int:
        if not kind.columns:
            return self.connection.execute(f"INSERT INTO {kind.name} DEFAULT VALUES".encode()).rowcount
        names = ", ".join(sql.Identifier(name).as_string() for name in kind.columns)
        places = ", ".join(["%s"] * len(kind.columns))
        query = f"INSERT INTO {kind.name} ({names}) VALUES ({places}) ON CONFLICT DO NOTHING"
        return self.connection.execute(query.encode(), [make() for make in kind.columns.values()]).rowcount
