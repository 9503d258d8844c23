"""Servers of every supported version print only values that a check accepts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import psycopg
import pyarrow as pa

from cutline.check.own_types import CompositeType, DomainType, OwnType
from cutline.check.stored_rows import FIXED_SIZE, BaseChecks
from cutline.check.table_forms import TYPE_NAMES, TableForms
from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.bytes_column import from_list, partition_of, xxhash64
from cutline.nodes.connections import connect, with_database
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from tests.commands.snapshot_runs import configure_fleet
from tests.integration.refusing import execute
from tests.tables.typed_tables import create_typed

if TYPE_CHECKING:
    from pathlib import Path

    from cutline.embedded.fleet import EmbeddedFleet
    from cutline.fleet.config import Node

NAME = "printed"
# Queries of many values each; the check must accept what COPY prints for them.
QUERIES = (
    # Every leap day, first and last day of a month, and days all over the range.
    "SELECT d, d::timestamp + '23:59:59.9'::interval FROM generate_series(1, 2499) y, make_date(y, 3, 1) m,"
    " LATERAL (VALUES (m), (m - 1), (make_date(-y, 3, 1) - 1), (make_date(y, 12, 31))) AS v (d)",
    "SELECT date '4713-11-24 BC' + i, (date '4713-11-24 BC' + i)::timestamptz FROM generate_series(0, 2147483, 9973) i",
    "SELECT date '5874897-12-31' - i, '294276-12-31 23:59:59.999999+00'::timestamptz - i * interval '11 days 0.07 s'"
    " FROM generate_series(0, 5000) i",
    "SELECT timestamptz '2026-01-02 03:04:05' + i * interval '1 hour 0.100001 s', time '00:00' + i * interval '7.01 s',"
    " (time '00:00' + i * interval '7.01 s')::text::timetz FROM generate_series(0, 5000) i",
    # Numbers of every magnitude.
    "SELECT ((random() - 0.5) * 10.0 ^ (i % 600 - 300))::float8, ((random() - 0.5) * 10.0 ^ (i % 70 - 35))::float4"
    " FROM generate_series(1, 5000) i",
    "SELECT (random() * 10 ^ (i % 90 - 40))::numeric, round((random() * 10 ^ (i % 9))::numeric, i % 7)"
    " FROM generate_series(1, 5000) i",
    "SELECT repeat('9', 1000)::numeric, ('0.' || repeat('1', 1000))::numeric, '1e-16383'::numeric, '9e131071'::numeric",
    # Intervals of all combinations of signs and units.
    "SELECT make_interval(y, m, 0, d, h, 0, s) FROM unnest('{-2,-1,0,1,2}'::int[]) y, unnest('{-2,-1,0,1}'::int[]) m,"
    " unnest('{-1,0,1,2}'::int[]) d, unnest('{-100,-1,0,1}'::int[]) h, unnest('{-1.5,0,0.000001,59.9}'::float8[]) s",
    # Documents, arrays and ranges.
    "SELECT jsonb_build_object(t, ARRAY[t, NULL, t], 'n', i * 1.1) FROM generate_series(1, 127) i, chr(i) t",
    "SELECT (repeat('[', 200) || repeat(']', 200))::jsonb, (repeat('[', 6000) || repeat(']', 6000))::json,"
    " E'\"\\\\ud800\"'::json, E' { \"a\" :\\n[1 ,2]\\r\\t} '::json",
    "SELECT ARRAY[[chr(i), NULL], ['', chr(i) || chr(i)]], ARRAY[ARRAY[[i]], ARRAY[[-i]]], ARRAY[i::numeric / 7, 'NaN']"
    " FROM generate_series(1, 127) i",
    "SELECT array_fill(i, ARRAY[2, 1, 2, 1, 1, 2], ARRAY[-1, 0, 5, 1, 2, 3]), '{}'::float8[], ARRAY[random()]"
    " FROM generate_series(-3, 3) i",
    "SELECT numrange(i - 0.5, i), daterange(date '0001-01-01' - i, NULL), tsrange(NULL, now()::timestamp + i *"
    " '1 s'::interval) FROM generate_series(1, 100) i",
    # Ranges next to each other, whose bounds are of every length.
    "SELECT int8range((i % 9 * 10.0 ^ (i % 18))::bigint, NULL), int4range(i, i + 1), numrange(-i - 0.5, i * 10.0 ^"
    " (i % 30)), daterange(date '0990-01-01' + i * 40, date '0990-01-01' + i * 50) FROM generate_series(1, 500) i",
    "SELECT tstzrange('2026-01-01'::timestamptz + i * interval '0.1 s', '2026-01-01'::timestamptz + i * interval"
    " '0.11 s'), tsrange('9999-12-30'::timestamp + i * interval '1 h', '9999-12-30'::timestamp + i * interval '2 h')"
    " FROM generate_series(1, 500) i",
    "SELECT '3.4028235e38'::float4, '1e-45'::float4, '1.7976931348623157e308'::float8, '5e-324'::float8, i::float8 *"
    " 10.0 ^ i, i::float4 * 10.0 ^ i FROM generate_series(1, 25) i",
    "SELECT ROW(i, 'a ' || i, i * 1.5, i % 2 = 0, now(), ARRAY[i, NULL], NULL, i::text || '\"')::public.held,"
    " (i * 0.01)::public.share, chr(i + 64)::public.letter FROM generate_series(1, 60) i",
    "SELECT decode(repeat(lpad(to_hex(i), 2, '0'), i), 'hex') FROM generate_series(0, 255) i",
    "SELECT ('10.' || i || '.0.255')::inet, set_masklen('1::f'::inet, i % 129), network(set_masklen('::1:0:0:2'::inet,"
    " i % 129)), ('::ffff:' || i || '.1.2.3')::inet, ('::' || i || '.1.2.3')::inet FROM generate_series(0, 255) i",
)
CREATED = (
    "CREATE TYPE public.held AS (a int, b text, c numeric(6,2), d bool, e timestamptz(3), f int[], g date, h char(9))",
    "CREATE DOMAIN public.share AS numeric(5,2) CHECK (VALUE < 100)",
    "CREATE DOMAIN public.letter AS varchar(1)",
)
DECLARED = (
    ("numeric(6,2)", ("0", "-9999.99", "NaN", "12.3")),
    ("numeric(2,-3)", ("99000", "-1499", "0", "NaN")),
    ("numeric(3,5)", ("0.00999", "-0.00001", "0")),
    ("numeric(1000,1000)", ("0." + "9" * 1000,)),
)


@contextmanager
def own_session(node: Node) -> Iterator[psycopg.Connection[Any]]:
    execute(with_database(node, "postgres").dsn, f"CREATE DATABASE {NAME}")
    try:
        with connect(with_database(node, NAME)) as connection:
            yield connection
    finally:
        execute(with_database(node, "postgres").dsn, f"DROP DATABASE {NAME} WITH (FORCE)")


def check_table(connection: psycopg.Connection[Any], table: str) -> int:
    """Check all rows of a table as those of a base copy; return their number."""
    found = connection.execute(
        "SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.atttypid::bigint, a.atttypmod,"
        "       (SELECT array_agg(format_type(f.atttypid, f.atttypmod) ORDER BY f.attnum) FROM pg_attribute f"
        "         WHERE f.attrelid = t.typrelid AND f.attnum > 0 AND NOT attisdropped),"
        "       CASE t.typtype WHEN 'd' THEN t.typbasetype::bigint END, t.typtypmod"
        "  FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " WHERE a.attrelid = %s::regclass AND a.attnum > 0 ORDER BY a.attnum",
        (table,),
    ).fetchall()
    columns = tuple(Column(*row[:4], place) for place, row in enumerate(found))
    own: dict[int, OwnType] = {
        place: CompositeType(frozenset({tuple(row[4])})) for place, row in enumerate(found) if row[4]
    }
    own |= {place: DomainType(row[5], row[6]) for place, row in enumerate(found) if row[5]}
    group = Group(7, "public", table, "full", 0, columns)
    with connection.cursor().copy(f"COPY {table} TO STDOUT".encode()) as copy:
        lines = [bytes(line) for line in copy]
    rows = from_list(lines)
    keys = [b""] * len(lines)
    arrays = [to_arrow(np.full(len(lines), 7, np.int32)), to_arrow(partition_of(rows, 1)), pa.array(keys, pa.binary())]
    batch = pa.RecordBatch.from_arrays([*arrays, pa.array(lines, pa.binary())], schema=BASE_SCHEMA)
    BaseChecks(TableForms.of([group], {7: own})).add(batch, xxhash64(from_list(keys)))
    return len(lines)


def of_composites(connection: psycopg.Connection[Any], table: str, number: int) -> str:
    """Make a table of the same values as fields of composite values; return its name."""
    columns = connection.execute(
        "SELECT quote_ident(attname), format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (table,),
    ).fetchall()
    fields = ", ".join(f"f{place} {type_}" for place, (_, type_) in enumerate(columns))
    values = ", ".join(name for name, _ in columns)
    connection.execute(f"CREATE TYPE public.row{number} AS ({fields})".encode())
    made = f"public.composites{number}"
    connection.execute(f"CREATE TABLE {made} AS SELECT ROW({values})::public.row{number} AS v FROM {table}".encode())
    return made


def test_a_check_accepts_what_servers_of_all_versions_print(mixed_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    fleet = configure_fleet(mixed_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for node in fleet.primaries:
        with own_session(node) as connection:
            # It looks at all types of the database.
            typed = create_typed(connection)
            for statement in CREATED:
                connection.execute(statement.encode())
            for number, query in enumerate(QUERIES):
                width = len(connection.execute(f"{query} LIMIT 0".encode()).description or ())
                names = ", ".join(f"c{place}" for place in range(width))
                connection.execute(f"CREATE TABLE public.q{number} ({names}) AS {query}".encode())
            for number, (type_, values) in enumerate(DECLARED):
                connection.execute(f"CREATE TABLE public.d{number} (v {type_})".encode())
                for value in values:
                    connection.execute(f"INSERT INTO public.d{number} VALUES (%s)".encode(), (value,))
            tables = [f"public.q{number}" for number in range(len(QUERIES))]
            tables += [f"public.d{number}" for number in range(len(DECLARED))]
            tables += [table.name for table in typed]
            tables += [of_composites(connection, table, number) for number, table in enumerate(tables)]
            assert all(check_table(connection, table) for table in tables)


def test_types_of_a_fixed_size_are_those_of_the_server(mixed_fleet: EmbeddedFleet) -> None:
    """Only values of other types are stored outside of their rows, and left out of an UPDATE."""
    for node in mixed_fleet.primaries:
        with psycopg.connect(node.dsn()) as connection:
            query = "SELECT oid::bigint FROM pg_type WHERE typlen > 0 AND oid = ANY (%s)"
            assert {oid for (oid,) in connection.execute(query, (list(TYPE_NAMES),))} == FIXED_SIZE
