"""Groups: the tables that are copied and followed, and how each one's rows are keyed.

A group's *key* is its replica identity: what an UPDATE or DELETE in the WAL names a row by. A row is stored
as PostgreSQL's COPY text line with the key columns first, so the key is a prefix of the line. Groups with
identity FULL, and append-only ones, have no key columns: such a table is a multiset of lines.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from fleet.config import GroupRules
from fleet.nodes.encodings import raw_text
from fleet.record import Count, Integer, Record, fields_of
from fleet.tables.column_types import NOTHING_TOLD, Contained, read_contained
from storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

# Ordinary permanent tables (leaf partitions among them) that no extension owns. The size of one that somebody has, or
# wants, for himself is not asked for but taken from the catalog: asking would wait, perhaps for ever. A table that was
# dropped since the query began has neither size nor privileges.
TABLES_QUERY = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relreplident::text, greatest(c.reltuples, 0)::bigint,
       CASE WHEN l.relation IS NULL THEN coalesce(pg_relation_size(c.oid), 0)
            ELSE c.relpages * current_setting('block_size')::bigint END,
       coalesce(has_table_privilege(c.oid, 'SELECT'), true),
       (SELECT p.indimmediate FROM pg_index p WHERE p.indrelid = c.oid AND p.indisprimary),
       EXISTS (SELECT FROM pg_attribute a
                 LEFT JOIN pg_index i ON i.indrelid = c.oid
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
                WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped
                  AND (c.relreplident = 'f' OR a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))),
       row_security_active(c.oid),
       EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
                WHERE r.prrelid = c.oid AND p.pubname ^@ 'cutline_' AND (p.pubupdate OR p.pubdelete)),
       EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN (SELECT DISTINCT relation FROM pg_locks WHERE mode = 'AccessExclusiveLock'
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())) l ON l.relation = c.oid
 WHERE c.relkind = 'r' AND c.relpersistence = 'p'
   AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                      AND e.objid = c.oid AND e.deptype = 'e')
 ORDER BY 2, 3
"""
# A key counts only where WAL carries it: the immediate primary key for DEFAULT, the chosen index for INDEX, and of
# both not what the index merely INCLUDEs.
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
# The same text as `table_name` gives for n.nspname and c.relname.
TABLE_NAME = """
(SELECT string_agg(CASE WHEN part ~ '[."]' THEN '"' || replace(part, '"', '""') || '"' ELSE part END, '.'
                   ORDER BY place)
   FROM unnest(ARRAY[n.nspname, c.relname]::text[]) WITH ORDINALITY AS parts (part, place))
"""
QUOTED_PART = re.compile(r'"((?:[^"]|"")*)"')
COPY_ESCAPES = str.maketrans(
    {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\v": "\\v", "\f": "\\f", "\r": "\\r", "\\": "\\\\"}
    # COPY reads these too, and never writes them: bytes that are no UTF-8, as raw text has them.
    | {chr(0xDC00 + byte): f"\\x{byte:02x}" for byte in range(0x80, 0x100)}
)
ESCAPED_BYTE = re.compile(rb"\\(?:\\|x([0-9a-f]{2}))")


class SchemaChangedError(RefusedError):
    """A table has changed in a way that no increment can carry."""


class Column(Record, frozen=True):
    """One stored column; `position` is its place among the columns that WAL carries, from 0.

    `number` is the attribute's own and never another's, whatever the column is called. `missing` is the value, as
    `copy_text` has it, of rows that are older than the column; None: NULL.
    """

    name: str
    type: str
    type_oid: Count
    type_modifier: Integer
    position: Count
    number: Count = 0
    missing: str | None = None


class Group(Record, frozen=True):
    """One definition of a table of one shard, as stored: `columns` in stored order, the first `key_width` are the key.

    `number` stands for the definition in every object of a chain; a table that changes gets another. At the full
    snapshot it is the same on all shards where the table has a key, and on all where it has none. `partitions` is a
    power of two. `identity` is default, index, full or append_only; the last two have no key.
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
        """`schema.table`, as patterns and reports use it, and no other table's."""
        return table_name(self.schema, self.table)

    @property
    def is_multiset(self) -> bool:
        """Whether rows are told apart only by their whole line."""
        return self.key_width == 0

    @property
    def signature(self) -> tuple[Any, ...]:
        """What a relation message of decoding tells of a definition: names, types and which columns are the key."""
        ordered = sorted(self.columns, key=lambda column: column.position)
        columns = tuple((column.name, column.type_oid, column.type_modifier) for column in ordered)
        key = frozenset(column.name for column in self.columns[: self.key_width])
        return self.schema, self.table, columns, key, self.identity == "full"

    def definition(self) -> dict[str, Any]:
        """What makes it this definition and no other: all but its number and partitioning.

        Nor what rows older than a column have there: a rewrite writes that into them, and forgets it.
        """
        found = {key: value for key, value in fields_of(self).items() if key not in ("number", "partitions")}
        return found | {"columns": [column | {"missing": None} for column in found["columns"]]}


@dataclass(frozen=True, slots=True)
class Table:
    """A table found in a database: its group, and what admitting and copying it needs to know.

    `key_is_immediate` is None without a primary key, and False where that is deferrable, which makes it no identity.
    `hides_rows`: policies decide which of its rows our role may read. `is_published`: its updates are, by Cutline.
    `has_generated`: it has generated columns, which no identity may have. `contained` is what is told of its columns'
    types.
    """

    oid: int
    group: Group
    rows_estimate: int
    size_bytes: int
    readable: bool
    key_is_immediate: bool | None
    identity_is_generated: bool = False
    hides_rows: bool = False
    is_published: bool = False
    has_generated: bool = False
    contained: Contained = NOTHING_TOLD

    @property
    def is_admissible(self) -> bool:
        """Whether publishing its updates can't make them fail (PostgreSQL manual, "Replica Identity").

        From 18 on an UPDATE fails too where a generated column is part of the identity, and before that WAL lacks it.
        """
        if self.identity_is_generated and self.group.identity != "append_only":
            return False
        return self.group.key_width > 0 or self.group.identity in ("full", "append_only")

    @property
    def remedy(self) -> str:
        """The statement that would make this table admissible."""
        name = qualify(self.group)
        by_index = f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …  -- a unique one"
        if self.identity_is_generated:
            return f"{by_index}, without generated columns"
        if self.key_is_immediate:
            return f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
        full = f"ALTER TABLE {name} REPLICA IDENTITY FULL"
        if self.key_is_immediate is False:
            deferrable = "a deferrable primary key is no identity"
            return f"{by_index}: {deferrable}" if self.has_generated else f"{full}  -- {deferrable}"
        # FULL is no way out with generated columns: updates would fail.
        return f"ALTER TABLE {name} ADD PRIMARY KEY (…)" + ("" if self.has_generated else f"  -- or: {full}")


def read_tables(connection: psycopg.Connection[Any], rules: GroupRules) -> list[Table]:
    """Every table of the connection's database that `rules` admit, by name; groups numbered 0 for now."""
    found = [row for row in connection.execute(TABLES_QUERY) if is_included(table_name(row[1], row[2]), rules)]
    columns: dict[int, list[tuple[Any, ...]]] = {row[0]: [] for row in found}
    for row in connection.execute(COLUMNS_QUERY, (list(columns),)):
        columns[row[0]].append(row[1:])
    contained = read_contained(connection, list(columns))
    tables = (_table(row, columns[row[0]], rules) for row in found)
    return [replace(table, contained=contained.get(table.oid, table.contained)) for table in tables]


def _table(row: tuple[Any, ...], columns: list[tuple[Any, ...]], rules: GroupRules) -> Table:
    oid, schema, name, replica_identity, rows_estimate, size_bytes, readable, *facts = row
    _, is_generated, *_ = facts
    identity = {"d": "default", "i": "index", "f": "full", "n": "nothing"}[replica_identity]
    keyed = identity in ("default", "index") and any(column[-1] for column in columns)
    # An identity that PostgreSQL can't publish is as good as none.
    if (is_generated or (not keyed and identity != "full")) and is_matching(
        table_name(schema, name), rules.append_only
    ):
        keyed, identity = False, "append_only"
    stored = [
        (bool(is_key) and keyed, Column(column, type_, oid_, modifier, position, number, copy_text(missing)))
        for position, (column, type_, oid_, modifier, number, missing, is_key) in enumerate(columns)
    ]
    ordered = [column for is_key, column in stored if is_key] + [column for is_key, column in stored if not is_key]
    key_width = sum(is_key for is_key, _ in stored)
    group = Group(0, schema, name, identity, key_width, tuple(ordered))
    return Table(oid, group, rows_estimate, size_bytes, readable, *facts)


def copy_text(value: bytes | None) -> str | None:
    """A value as COPY's text format writes it (PostgreSQL manual, COPY, "Text Format"); NULL stays None.

    What is no UTF-8 is escaped by byte, so that it is text in every encoding.
    """
    return None if value is None else raw_text(value).translate(COPY_ESCAPES)


def copy_line(text: str) -> bytes:
    """What COPY itself writes for a value that is not NULL, in the server's encoding, given by `copy_text`."""
    return ESCAPED_BYTE.sub(lambda found: bytes.fromhex(found[1].decode()) if found[1] else found[0], text.encode())


def table_name(schema: str, table: str) -> str:
    """`schema.table`. A part that has a dot or a quote is quoted: no two tables have one name."""
    return ".".join(quote_identifier(part) if "." in part or '"' in part else part for part in (schema, table))


def is_matching(name: str, patterns: Iterable[str]) -> bool:
    """Whether a table's name, as it is or without quotes, fits one of the patterns."""
    plain = QUOTED_PART.sub(lambda part: part[1].replace('""', '"'), name)
    return any(fnmatch.fnmatchcase(one, pattern) for pattern in patterns for one in (name, plain))


def is_included(name: str, rules: GroupRules) -> bool:
    """Whether the rules make `schema.table` a group."""
    return is_matching(name, rules.include) and not is_matching(name, rules.exclude)


def number_groups(tables: dict[str, list[Table]], partition_rows: int) -> dict[str, list[Table]]:
    """Number the groups of all shards by name, and give each the partitions its largest copy needs.

    A partition is to hold about `partition_rows` rows; 1 to 1,024 partitions, a power of two. A table that has a
    key on one shard and none on another has two numbers: the jobs fold the two kinds of groups by number.
    """
    largest: dict[str, int] = {}
    for found in tables.values():
        for table in found:
            rows = max(table.rows_estimate, table.size_bytes // 256)
            largest[table.group.name] = max(largest.get(table.group.name, 0), rows)
    kinds = {(table.group.name, table.group.is_multiset) for found in tables.values() for table in found}
    numbers = {kind: number for number, kind in enumerate(sorted(kinds), start=1)}

    def numbered(table: Table) -> Table:
        wanted = -(-largest[table.group.name] // partition_rows)
        partitions = min(1024, 1 << max(0, wanted - 1).bit_length())
        number = numbers[table.group.name, table.group.is_multiset]
        group = structs.replace(table.group, number=number, partitions=partitions)
        return replace(table, group=group)

    return {shard: [numbered(table) for table in found] for shard, found in tables.items()}


def quote_identifier(name: str) -> str:
    """The name as a quoted identifier (PostgreSQL manual, "Identifiers and Key Words")."""
    return '"' + name.replace('"', '""') + '"'


def qualify(group: Group) -> str:
    """The table's quoted name for SQL."""
    return f"{quote_identifier(group.schema)}.{quote_identifier(group.table)}"


def column_list(group: Group) -> str:
    """The stored columns, quoted, in stored order, for COPY and SELECT."""
    return ", ".join(quote_identifier(column.name) for column in group.columns)
