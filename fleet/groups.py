"""Groups: the tables that are copied and followed, and how each one's rows are keyed.

A group's *key* is its replica identity: what an UPDATE or DELETE in the WAL names a row by. A row is stored
as PostgreSQL's COPY text line with the key columns first, so the key is a prefix of the line. Groups with
identity FULL, and append-only ones, have no key columns: such a table is a multiset of lines.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fleet.config import GroupRules
from storage.errors import RefusedError

if TYPE_CHECKING:
    import psycopg

# Ordinary permanent tables (leaf partitions among them) that no extension owns.
TABLES_QUERY = """
SELECT c.oid::bigint, n.nspname, c.relname, c.relreplident::text, greatest(c.reltuples, 0)::bigint,
       pg_relation_size(c.oid), has_table_privilege(c.oid, 'SELECT'),
       EXISTS (SELECT FROM pg_index p WHERE p.indrelid = c.oid AND p.indisprimary),
       EXISTS (SELECT FROM pg_attribute a
                 LEFT JOIN pg_index i ON i.indrelid = c.oid
                      AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
                WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped
                  AND (c.relreplident = 'f' OR a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])))
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
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
       coalesce(a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]), false)
  FROM pg_attribute a
  JOIN pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
       AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
 WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 ORDER BY a.attrelid, a.attnum
"""


class SchemaChangedError(RefusedError):
    """A table is no longer as it was at the full snapshot."""


@dataclass(frozen=True, slots=True)
class Column:
    """One stored column; `position` is its place among the columns that WAL carries, from 0."""

    name: str
    type: str
    type_oid: int
    type_modifier: int
    position: int


@dataclass(frozen=True, slots=True)
class Group:
    """One table of one shard, as stored: `columns` in stored order, the first `key_width` are the key.

    `number` stands for `name` in every object of a chain and is the same on all shards where it has a key, and on
    all where it has none. `partitions` is a power of two. `identity` is default, index, full or append_only; the
    last two have no key.
    """

    number: int
    schema: str
    table: str
    identity: str
    key_width: int
    columns: tuple[Column, ...]
    partitions: int = 1

    @property
    def name(self) -> str:
        """`schema.table`, as patterns and reports use it."""
        return f"{self.schema}.{self.table}"

    @property
    def is_multiset(self) -> bool:
        """Whether rows are told apart only by their whole line."""
        return self.key_width == 0

    def to_json(self) -> dict[str, Any]:
        """The group's entry in a commit."""
        return asdict(self)

    def definition(self) -> dict[str, Any]:
        """What must not change between increments: all but its number and partitioning."""
        return {key: value for key, value in asdict(self).items() if key not in ("number", "partitions")}


@dataclass(frozen=True, slots=True)
class Table:
    """A table found in a database: its group, and what admitting and copying it needs to know."""

    oid: int
    group: Group
    rows_estimate: int
    size_bytes: int
    readable: bool
    has_primary_key: bool
    identity_is_generated: bool = False

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
        name = qualified(self.group)
        if self.identity_is_generated:
            return f"ALTER TABLE {name} REPLICA IDENTITY USING INDEX …  -- a unique one, without generated columns"
        if self.has_primary_key:
            return f"ALTER TABLE {name} REPLICA IDENTITY DEFAULT"
        return f"ALTER TABLE {name} ADD PRIMARY KEY (…)  -- or: ALTER TABLE {name} REPLICA IDENTITY FULL"


def group_from_json(entry: dict[str, Any]) -> Group:
    """Read what `Group.to_json` wrote."""
    return Group(**(entry | {"columns": tuple(Column(**column) for column in entry["columns"])}))


def read_tables(connection: psycopg.Connection[Any], rules: GroupRules) -> list[Table]:
    """Every table of the connection's database that `rules` admit, by name; groups numbered 0 for now."""
    found = [row for row in connection.execute(TABLES_QUERY) if included(f"{row[1]}.{row[2]}", rules)]
    columns: dict[int, list[tuple[Any, ...]]] = {row[0]: [] for row in found}
    for row in connection.execute(COLUMNS_QUERY, ([row[0] for row in found],)):
        columns[row[0]].append(row[1:])
    return [_table(row, columns[row[0]], rules) for row in found]


def _table(row: tuple[Any, ...], columns: list[tuple[Any, ...]], rules: GroupRules) -> Table:
    oid, schema, name, replica_identity, rows_estimate, size_bytes, readable, *facts = row
    identity = {"d": "default", "i": "index", "f": "full", "n": "nothing"}[replica_identity]
    keyed = identity in ("default", "index") and any(column[4] for column in columns)
    if not keyed and identity != "full" and matches(f"{schema}.{name}", rules.append_only):
        identity = "append_only"
    stored = [
        (bool(is_key) and keyed, Column(column, type_, oid_, modifier, position))
        for position, (column, type_, oid_, modifier, is_key) in enumerate(columns)
    ]
    ordered = [column for is_key, column in stored if is_key] + [column for is_key, column in stored if not is_key]
    key_width = sum(is_key for is_key, _ in stored)
    group = Group(0, schema, name, identity, key_width, tuple(ordered))
    return Table(oid, group, rows_estimate, size_bytes, readable, *facts)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether `schema.table` fits one of the patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def included(name: str, rules: GroupRules) -> bool:
    """Whether the rules make `schema.table` a group."""
    return matches(name, rules.include) and not matches(name, rules.exclude)


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
        group = replace(table.group, number=number, partitions=partitions)
        return replace(table, group=group)

    return {shard: [numbered(table) for table in found] for shard, found in tables.items()}


def quoted(name: str) -> str:
    """The name as a quoted identifier (PostgreSQL manual, "Identifiers and Key Words")."""
    return '"' + name.replace('"', '""') + '"'


def qualified(group: Group) -> str:
    """The table's quoted name for SQL."""
    return f"{quoted(group.schema)}.{quoted(group.table)}"


def column_list(group: Group) -> str:
    """The stored columns, quoted, in stored order, for COPY and SELECT."""
    return ", ".join(quoted(column.name) for column in group.columns)
