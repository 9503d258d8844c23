"""Groups: the tables that are copied and whose changes are captured, and the keys of their rows.

A group's *key* is its replica identity, by which an UPDATE or DELETE in the WAL identifies a row. A row is stored as a
line in PostgreSQL's COPY text format with the key columns first, so the key is a prefix of the line. Groups with
identity FULL and append-only groups have no key columns: such a table is a multiset of lines.

A domain, array, composite or range contains values of other types, and can be loaded only if those types can.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.config import GroupRules
from cutline.fleet.record import Count, Integer, Record
from cutline.fleet.table_names import is_included, is_matching, quote_identifier, table_name
from cutline.nodes.encodings import raw_text
from cutline.storage.errors import RefusedError

XML = "xml"
# Types that may be internal to PostgreSQL or an extension: types of the category that the manual calls "internal-use"
# (except "char", which is usable), and types that some operator class stores but none accepts for a column.
OWN_QUERY = """
SELECT t.oid FROM pg_type t WHERE t.typtype = 'b' AND t.typcategory = 'Z' AND t.oid <> '"char"'::regtype
UNION
SELECT o.opckeytype FROM pg_opclass o
 WHERE o.opckeytype <> 0 AND NOT EXISTS (SELECT FROM pg_opclass i WHERE i.opcintype = o.opckeytype)
"""
# SQL: the types contained in the types of `u`, one level deeper. Oids below 16384 are built-in types; of these, only
# arrays contain other types.
WITHIN = """JOIN pg_type t ON t.oid = u.typid
     CROSS JOIN LATERAL (
           SELECT t.typelem WHERE t.typelem <> 0
           UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
           UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
           UNION ALL SELECT a.atttypid FROM pg_attribute a
                      WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped
           ) part (oid)
     WHERE u.typid >= 16384 OR t.typcategory = 'A'"""
# Each type is expanded once, for all columns of that type.
TYPES_QUERY = f"""
WITH RECURSIVE columns AS (
    SELECT a.attrelid, a.attnum, a.attname, a.atttypid FROM pg_attribute a
     WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''),
contained (root, typid) AS (
    SELECT DISTINCT c.atttypid, c.atttypid FROM columns c
    UNION
    SELECT u.root, part.oid
      FROM contained u {WITHIN}
),
special (oid) AS (SELECT 'xml'::regtype::oid UNION {OWN_QUERY})
SELECT c.attrelid::bigint, c.attnum, c.attname, special.oid::regtype::text
  FROM columns c JOIN contained u ON u.root = c.atttypid JOIN special ON special.oid = u.typid
 ORDER BY 1, 2, 4
"""


class SpecialColumns(Struct, frozen=True):
    """The stored columns in one table that need attention.

    `unloadable`: columns whose values PostgreSQL can print but not read back, as (column, type at fault). `xml`: the
    numbers of columns that contain XML, which only a server built with libxml can read.
    """

    unloadable: tuple[tuple[str, str], ...] = ()
    xml: tuple[int, ...] = ()


NO_SPECIAL_COLUMNS = SpecialColumns()


def read_special_columns(connection: psycopg.Connection[Any], oids: Sequence[int]) -> dict[int, SpecialColumns]:
    """Return the special columns, keyed by table oid, for the tables that have any."""
    rows = connection.execute(TYPES_QUERY, (list(oids),)).fetchall()
    refusing = {name for name in {row[3] for row in rows} - {XML} if not _has_input(connection, name)}
    by_table: dict[int, SpecialColumns] = {}
    for oid, number, column, type_ in rows:
        columns = by_table.get(oid, NO_SPECIAL_COLUMNS)
        if type_ == XML:
            by_table[oid] = SpecialColumns(columns.unloadable, (*columns.xml, number))
        elif type_ in refusing:
            by_table[oid] = SpecialColumns((*columns.unloadable, (column, type_)), columns.xml)
    return by_table


def _has_input(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether the type's input function accepts any value at all."""
    try:
        with connection.transaction():
            connection.execute(f"SELECT ''::{name}".encode())
    except (psycopg.NotSupportedError, psycopg.InternalError):
        # Some extensions' input functions raise the second error in versions before 16.
        return False
    except (psycopg.DataError, psycopg.ProgrammingError):
        pass  # the function accepts some values
    return True


# A condition on pg_class c and pg_namespace n: ordinary permanent tables and leaf partitions that no extension owns.
ORDINARY_TABLE = """
       c.relkind = 'r' AND c.relpersistence = 'p'
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                      AND e.objid = c.oid AND e.deptype = 'e')
"""
# If a session holds or awaits ACCESS EXCLUSIVE on a table, the size is estimated from the catalog: pg_relation_size
# would wait, perhaps forever. For a table that was dropped after the query started, these functions return NULL.
# Few tables have generated columns: one scan finds these, and the identities of the others need not be searched.
# The server opens every relation whose size it is asked for, which with thousands of tables takes it longer than the
# rest of the query: then what VACUUM last counted has to do for values that are stored elsewhere.
MEASURED_RELATIONS_MAX = 20_000
IS_MEASURED = f"(SELECT count(*) < {MEASURED_RELATIONS_MAX} FROM pg_class)"
TABLES_QUERY = f"""
WITH generated AS MATERIALIZED (
    SELECT DISTINCT attrelid FROM pg_attribute WHERE attgenerated <> '' AND NOT attisdropped)
SELECT c.oid::bigint, n.nspname, c.relname, c.relreplident::text, c.reltuples::bigint,
       CASE WHEN l.relation IS NULL THEN coalesce(pg_relation_size(c.oid), 0)
            ELSE c.relpages * current_setting('block_size')::bigint END,
       coalesce(has_table_privilege(c.oid, 'SELECT'), true),
       (SELECT p.indimmediate FROM pg_index p WHERE p.indrelid = c.oid AND p.indisprimary),
       c.oid IN (SELECT attrelid FROM generated) AND
       EXISTS (SELECT FROM pg_attribute a
                 LEFT JOIN pg_index i ON i.indrelid = c.oid
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
                WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped
                  AND (c.relreplident = 'f' OR a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))),
       row_security_active(c.oid),
       EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                WHERE r.prrelid = c.oid AND p.pubname ^@ 'cutline_' AND (p.pubupdate OR p.pubdelete)),
       c.oid IN (SELECT attrelid FROM generated),
       CASE WHEN l.relation IS NULL AND {IS_MEASURED}
            THEN coalesce(pg_relation_size(t.oid), 0)
            ELSE coalesce(t.relpages, 0) * current_setting('block_size')::bigint END
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
  LEFT JOIN (SELECT DISTINCT relation FROM pg_locks WHERE mode = 'AccessExclusiveLock'
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) l ON l.relation = c.oid
 WHERE {ORDINARY_TABLE}
 ORDER BY 2, 3
"""
SOME_TABLES_QUERY = TABLES_QUERY.replace(IS_MEASURED, "true").replace(
    "ORDER BY 2, 3", "AND c.oid = ANY (%s) ORDER BY 2, 3"
)
# The key columns are the ones that the WAL carries: with DEFAULT, the columns of the primary key if it is immediate;
# with INDEX, the columns of the chosen index. INCLUDE columns never belong to the key.
COLUMNS_QUERY = """
SELECT a.attrelid::bigint, a.attname, format_type(a.atttypid, a.atttypmod), a.atttypid::bigint, a.atttypmod,
       a.attnum, CASE WHEN a.atthasmissing
                 THEN convert_to(array_to_string(a.attmissingval, ''), getdatabaseencoding()) END,
       coalesce(a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]), false)
  FROM pg_attribute a
  JOIN pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
       AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
 WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 ORDER BY a.attrelid, a.attnum
"""
COPY_ESCAPES = str.maketrans(
    {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\v": "\\v", "\f": "\\f", "\r": "\\r", "\\": "\\\\"}
    # Bytes that are not UTF-8, as raw text represents them. COPY reads these escapes, but never writes them.
    | {chr(0xDC00 + byte): f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
)
ESCAPED_BYTE = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


class SchemaChangedError(RefusedError):
    """A table has changed in a way that an increment can't record."""


class Column(Record, frozen=True):
    """One stored column; `position` is where it comes among the columns in the WAL, counted from 0.

    `number` is the attribute number, which is never reused. `missing` is the column's value in rows that are older than
    the column, as `copy_text` writes it; None is NULL.
    """

    name: str
    type: str
    type_oid: Count
    type_modifier: Integer
    position: Count
    number: Count = 0
    missing: str | None = None


class ColumnSignature(NamedTuple):
    """A column as a relation message describes it, except for whether it is part of the key."""

    name: str
    type_oid: int
    type_modifier: int


class Signature(NamedTuple):
    """A table as a relation message describes it. `key` contains the names of the key columns; empty if `is_full`."""

    schema: str
    table: str
    columns: tuple[ColumnSignature, ...]
    key: frozenset[str]
    is_full: bool


class Group(Record, frozen=True):
    """A definition of a shard's table. `columns` are in stored order; the first `key_width` of them are the key.

    `number` identifies the definition in every object of a chain; a changed table gets a new number. In the full
    snapshot, all shards where the table has a key share one number, and all shards where it has none share another.
    `partitions` is a power of two. `identity` is default, index, full or append_only; the last two have no key.
    """

    number: Count
    schema: str
    table: str
    identity: str
    key_width: Count
    columns: tuple[Column, ...]
    partitions: Count = 1

    @property
    def name(self) -> str:
        """`schema.table`, as in patterns and reports; unique in the database."""
        return table_name(self.schema, self.table)

    @property
    def is_multiset(self) -> bool:
        """Whether the group has no key, so that only the whole line identifies a row."""
        return self.key_width == 0

    @property
    def signature(self) -> Signature:
        """The decoded relation message that describes this definition."""
        ordered = sorted(self.columns, key=lambda column: column.position)
        columns = tuple(ColumnSignature(column.name, column.type_oid, column.type_modifier) for column in ordered)
        key = frozenset(column.name for column in self.columns[: self.key_width])
        return Signature(self.schema, self.table, columns, key, self.identity == "full")

    def definition(self) -> Group:
        """Return what distinguishes this definition from others: the group without its number and partitions.

        The columns' `missing` values are blanked as well: a rewrite stores them in the rows and clears them.
        """
        columns = self.columns
        if any(column.missing is not None for column in columns):
            columns = tuple(structs.replace(column, missing=None) for column in columns)
        return structs.replace(self, number=0, partitions=1, columns=columns)


class Table(Struct, frozen=True):
    """A table in a database: its group, and the facts that decide whether and how it can be copied.

    `rows_estimate` is None if the table has pages, but neither VACUUM nor ANALYZE has counted its rows, and for tables
    that are taken from a commit, whose sizes are 0 (NodeTables.committed).
    `key_is_immediate` is None if there is no primary key, and False if the primary key is deferrable and so can't be
    the replica identity. `hides_rows`: row security policies limit which rows our role may read. `is_published`:
    Cutline publishes its updates. `has_generated`: the table has generated columns, which a replica identity can't
    include. `size_bytes` is without the values that are stored elsewhere (TOAST), which take about `toast_bytes`.
    """

    oid: int
    group: Group
    rows_estimate: int | None
    size_bytes: int
    readable: bool
    key_is_immediate: bool | None
    identity_is_generated: bool = False
    hides_rows: bool = False
    is_published: bool = False
    has_generated: bool = False
    toast_bytes: int = 0
    special_columns: SpecialColumns = NO_SPECIAL_COLUMNS

    @property
    def is_admissible(self) -> bool:
        """Whether updates to the table still succeed once they are published (PostgreSQL manual, "Replica Identity").

        If a generated column is part of the identity, an UPDATE fails in version 18 and later; before 18, the WAL lacks
        the column.
        """
        if self.identity_is_generated and self.group.identity != "append_only":
            return False
        return self.group.key_width > 0 or self.group.identity in ("full", "append_only")

    @property
    def remedy(self) -> str:
        """The statement that would make this table admissible; placeholders mark the user's choices."""
        name = qualify(self.group)
        by_index = f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …  -- a unique index"
        if self.identity_is_generated:
            return f"{by_index}, without generated columns"
        if self.key_is_immediate:
            return f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
        full = f"ALTER TABLE {name} REPLICA IDENTITY FULL"
        if self.key_is_immediate is False:
            deferrable = "a deferrable primary key can't be the replica identity"
            return f"{by_index}: {deferrable}" if self.has_generated else f"{full}  -- {deferrable}"
        # FULL does not help with generated columns: updates would fail.
        return f"ALTER TABLE {name} ADD PRIMARY KEY (…)" + ("" if self.has_generated else f"  -- or: {full}")

    @property
    def statement(self) -> str:
        """The statement that makes this table admissible; "" if the user must choose an index or a column."""
        if self.identity_is_generated or (self.has_generated and not self.key_is_immediate):
            return ""
        return f"ALTER TABLE {qualify(self.group)} REPLICA IDENTITY {'DEFAULT' if self.key_is_immediate else 'FULL'};"


def read_tables(
    connection: psycopg.Connection[Any], rules: GroupRules, oids: Collection[int] | None = None
) -> list[Table]:
    """Read the tables of the connection's database that `rules` include, sorted by name, with group number 0.

    With `oids`, only these tables are read.
    """
    found = connection.execute(TABLES_QUERY) if oids is None else connection.execute(SOME_TABLES_QUERY, (list(oids),))
    rows = [row for row in found if is_included(table_name(row[1], row[2]), rules)]
    columns: dict[int, list[tuple[Any, ...]]] = {row[0]: [] for row in rows}
    for row in connection.execute(COLUMNS_QUERY, (list(columns),)):
        columns[row[0]].append(row[1:])
    special = read_special_columns(connection, list(columns))
    # With a schema for each tenant, thousands of tables have the same columns: they share them.
    shared: dict[Any, _Stored] = {}
    return [_make_table(row, columns[row[0]], rules, special.get(row[0], NO_SPECIAL_COLUMNS), shared) for row in rows]


class _Stored(NamedTuple):
    """The columns of a group in stored order; the first `key_width` of them are the key."""

    columns: tuple[Column, ...]
    key_width: int


def _make_table(
    row: tuple[Any, ...],
    columns: list[tuple[Any, ...]],
    rules: GroupRules,
    special: SpecialColumns,
    shared: dict[Any, _Stored],
) -> Table:
    oid, schema, name, replica_identity, rows, size_bytes, readable, key_is_immediate, is_generated, *facts = row
    hides_rows, is_published, has_generated, toast_bytes = facts
    identity = {"d": "default", "i": "index", "f": "full", "n": "nothing"}[replica_identity]
    keyed = identity in ("default", "index") and any(column[-1] for column in columns)
    # An identity that PostgreSQL can't publish counts as no identity.
    if (is_generated or (not keyed and identity != "full")) and is_matching(
        table_name(schema, name), rules.append_only
    ):
        keyed, identity = False, "append_only"
    alike = (keyed, *columns)
    if (stored := shared.get(alike)) is None:
        stored = shared[alike] = _store_columns(columns, keyed=keyed)
    group = Group(0, schema, name, identity, stored.key_width, stored.columns)
    rows_estimate = None if rows < 0 and size_bytes else max(rows, 0)
    return Table(
        oid,
        group,
        rows_estimate,
        size_bytes,
        readable,
        key_is_immediate,
        is_generated,
        hides_rows,
        is_published,
        has_generated,
        toast_bytes,
        special,
    )


def _store_columns(columns: list[tuple[Any, ...]], *, keyed: bool) -> _Stored:
    read = [
        (bool(is_key) and keyed, Column(column, type_, oid, modifier, position, number, copy_text(missing)))
        for position, (column, type_, oid, modifier, number, missing, is_key) in enumerate(columns)
    ]
    ordered = [column for is_key, column in read if is_key] + [column for is_key, column in read if not is_key]
    return _Stored(tuple(ordered), sum(is_key for is_key, _ in read))


def copy_text(value: bytes | None) -> str | None:
    """Write a value in COPY's text format (PostgreSQL manual, COPY, "Text Format"); None is NULL.

    Bytes that are not UTF-8 are escaped, so that the text is valid in every encoding.
    """
    return None if value is None else raw_text(value).translate(COPY_ESCAPES)


def copy_line(text: str) -> bytes:
    """Convert a result of `copy_text` other than None to the bytes that COPY writes in the server's encoding."""
    return ESCAPED_BYTE.sub(lambda match: bytes.fromhex(match[1].decode()) if match[1] else match[0], text.encode())


def number_groups(tables: dict[str, list[Table]], partition_rows: int) -> dict[str, list[Table]]:
    """Number the groups on all shards by name, and base each group's number of partitions on its largest shard.

    The number of partitions is a power of two from 1 to 1,024, chosen to put about `partition_rows` rows in each. A
    table with a key on one shard and none on another gets two numbers, because folding treats the two kinds of groups
    differently.
    """
    largest: dict[str, int] = {}
    kinds: set[tuple[str, bool]] = set()
    named = {shard: [(table.group.name, table) for table in some] for shard, some in tables.items()}
    for some in named.values():
        for name, table in some:
            rows = max(table.rows_estimate or 0, table.size_bytes // 256)
            largest[name] = max(largest.get(name, 0), rows)
            kinds.add((name, table.group.is_multiset))
    numbers = {kind: number for number, kind in enumerate(sorted(kinds), start=1)}

    def number_table(name: str, table: Table) -> Table:
        wanted = -(-largest[name] // partition_rows)
        partitions = min(1024, 1 << max(0, wanted - 1).bit_length())
        number = numbers[name, table.group.is_multiset]
        group = structs.replace(table.group, number=number, partitions=partitions)
        return replace(table, group=group)

    return {shard: [number_table(name, table) for name, table in some] for shard, some in named.items()}


def list_names(groups: Iterable[Group]) -> list[str]:
    """Return the `name` of each group, in a fraction of the time that it takes to ask each of many thousands."""
    groups = list(groups)
    names = [f"{group.schema}.{group.table}" for group in groups]
    text = "".join(names)
    is_plain = text.count(".") == len(names) and '"' not in text
    return names if is_plain else [group.name for group in groups]


def qualify(group: Group) -> str:
    """Return the table's quoted name for SQL."""
    return f"{quote_identifier(group.schema)}.{quote_identifier(group.table)}"


def column_list(group: Group) -> str:
    """Return the quoted names of the stored columns, in stored order, for COPY and SELECT."""
    return ", ".join(quote_identifier(column.name) for column in group.columns)
