"""Find the parts of a database that a snapshot leaves out or a restore could not load; every create reports them.

A restore brings back a database's DDL and the rows of its groups. Everything else is found here, by one query that
reads only the catalogs.

Tables whose indexes or statistics call user-defined code are found here, too. The planner evaluates parts of such
expressions for every query that reads the table, as the session's role, even if the query does not use the index. So a
query would run the owner's code as our role, and fail if the code names other functions without a schema. COPY of a
whole table is not planned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import psycopg

from cutline.fleet.config import GroupRules, Node
from cutline.fleet.record import Count, Record
from cutline.fleet.table_names import ANY, TABLE_NAME, is_included, is_matching
from cutline.nodes.encodings import fetch_texts
from cutline.nodes.groups import Group
from cutline.nodes.sessions import in_parallel

if TYPE_CHECKING:
    from cutline.nodes.baseline import NodeIdentity

# Objects with lower oids come with the server (transam.h, FirstNormalObjectId).
CODE_QUERY = """
WITH parts (relid, classid, objid) AS (
    SELECT indrelid, 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = ANY (%(tables)s::oid[])
    UNION ALL
    SELECT stxrelid, 'pg_statistic_ext'::regclass, oid FROM pg_statistic_ext WHERE stxrelid = ANY (%(tables)s::oid[]))
SELECT DISTINCT p.relid::bigint
  FROM parts p JOIN pg_depend d ON d.classid = p.classid AND d.objid = p.objid
 WHERE d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass) AND d.refobjid >= 16384
"""


def find_planned_code(connection: psycopg.Connection[Any], oids: Collection[int]) -> frozenset[int]:
    """Return the oids of the tables whose indexes or statistics call user-defined functions or operators."""
    if not oids:
        return frozenset()
    return frozenset(oid for (oid,) in connection.execute(CODE_QUERY, {"tables": list(oids)}))


class LeftOutKind(StrEnum):
    """The kind of a left-out part, as written in JSON."""

    UNLOGGED_TABLE = "unlogged_table"
    FOREIGN_TABLE = "foreign_table"
    TEMPORARY_TABLES = "temporary_tables"
    LARGE_OBJECTS = "large_objects"
    LARGE_OBJECTS_OF_FULL = "large_objects_of_full"
    EXCLUDED_TABLE = "excluded_table"
    EXTENSION_TABLE = "extension_table"
    EXTENSION_ROWS = "extension_rows"
    UNLOGGED_SEQUENCE = "unlogged_sequence"
    SUBSCRIPTION = "subscription"
    USER_MAPPING = "user_mapping"
    PENDING_DETACH = "pending_detach"
    APPEND_ONLY_TABLE = "append_only_table"
    UNCOUNTED_TABLE = "uncounted_table"
    STANDBY_COPY = "standby_copy"
    ABSENT_COPY = "absent_copy"


# The reason for leaving a part out, and the effect on a restore; {} is the extension, foreign server, position or
# version. Commits store these texts.
WHY: Mapping[LeftOutKind, str] = {
    LeftOutKind.UNLOGGED_TABLE: "its rows are not in the WAL: it is restored empty",
    LeftOutKind.FOREIGN_TABLE: "its rows are on foreign server {}: only its definition is restored",
    LeftOutKind.TEMPORARY_TABLES: "they belong to sessions: they are not restored",
    LeftOutKind.LARGE_OBJECTS_OF_FULL: "restored as they were at the full snapshot ({}): increments do not capture"
    " their changes",
    LeftOutKind.LARGE_OBJECTS: "logical decoding does not include them: they are not restored",
    LeftOutKind.EXTENSION_TABLE: "extension {} creates it again: rows that were added to it are not restored",
    LeftOutKind.EXTENSION_ROWS: "its rows were not read ({}): it is restored as its extension creates it",
    LeftOutKind.UNLOGGED_SEQUENCE: "its value is not in the WAL: it is restored with its start value",
    LeftOutKind.SUBSCRIPTION: "a copy of the database must not subscribe as well: it is not restored",
    LeftOutKind.USER_MAPPING: "PostgreSQL shows its options, if any, only to superusers: it is restored without them",
    LeftOutKind.PENDING_DETACH: "DETACH PARTITION CONCURRENTLY was interrupted: it is restored attached. To finish it:"
    " {};",
    LeftOutKind.APPEND_ONLY_TABLE: "no replica identity: its updates and deletes are not captured. If you give it one"
    " (ALTER TABLE … REPLICA IDENTITY FULL, or a primary key), the next increment copies it again and captures them",
    LeftOutKind.UNCOUNTED_TABLE: "PostgreSQL's counters were reset or are off, so rows may have been updated or deleted"
    " unnoticed. If you give it a replica identity (ALTER TABLE … REPLICA IDENTITY FULL, or a primary key), the next"
    " increment copies it again",
    LeftOutKind.STANDBY_COPY: "PostgreSQL {} can't decode WAL on a standby (16 and later can), so check has no copy"
    " of it",
    LeftOutKind.ABSENT_COPY: "its copy is left out{}",
}
# Parts that a restore may bring back with different contents: every output warns about them.
WARNED = frozenset(
    {
        LeftOutKind.APPEND_ONLY_TABLE,
        LeftOutKind.UNCOUNTED_TABLE,
        LeftOutKind.LARGE_OBJECTS_OF_FULL,
        LeftOutKind.STANDBY_COPY,
        LeftOutKind.ABSENT_COPY,
        LeftOutKind.EXTENSION_ROWS,
        LeftOutKind.PENDING_DETACH,
    }
)
# Parts that are counted rather than named.
COUNTED = frozenset({LeftOutKind.TEMPORARY_TABLES, LeftOutKind.LARGE_OBJECTS, LeftOutKind.LARGE_OBJECTS_OF_FULL})
# Ordinary tables and extensions' configuration tables have the kind '': the rules decide whether they are left out.
FOUND = f"""
SELECT CASE WHEN c.relkind = 'S' THEN 'unlogged_sequence'
            WHEN c.oid = ANY (e.extconfig) AND c.relkind = 'r' THEN ''
            WHEN e.extname IS NOT NULL THEN 'extension_table'
            WHEN c.relkind = 'f' THEN 'foreign_table'
            WHEN c.relpersistence = 'u' THEN 'unlogged_table'
            ELSE '' END,
       {TABLE_NAME}, coalesce(e.extname, s.srvname, '')::text, 1::bigint
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  LEFT JOIN pg_depend d ON d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.objsubid = 0
       AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
  LEFT JOIN pg_extension e ON e.oid = d.refobjid
  LEFT JOIN pg_foreign_table f ON f.ftrelid = c.oid
  LEFT JOIN pg_foreign_server s ON s.oid = f.ftserver
 WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
   AND (c.relkind IN ('r', 'f') OR (c.relkind = 'S' AND c.relpersistence = 'u'))
UNION ALL SELECT 'temporary_tables', 'pg_temp', '', count(*) FROM pg_class
 WHERE relpersistence = 't' AND relkind IN ('r', 'p') HAVING count(*) > 0
UNION ALL SELECT 'large_objects', 'pg_largeobject', '', count(*) FROM pg_largeobject_metadata HAVING count(*) > 0
UNION ALL SELECT 'subscription', subname, '', 1 FROM pg_subscription
 WHERE subdbid = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION ALL SELECT 'pending_detach', {TABLE_NAME},
       format('ALTER TABLE %s DETACH PARTITION %s FINALIZE', h.inhparent::regclass, h.inhrelid::regclass), 1
  FROM pg_inherits h JOIN pg_class c ON c.oid = h.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE h.inhdetachpending
UNION ALL SELECT 'user_mapping', format('%s on server %s', usename, srvname), '', 1 FROM pg_user_mappings
 WHERE umoptions IS NULL AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
"""
LEFT_OUT_QUERY, LEFT_OUT_BY_KIND_QUERY = (
    f"SELECT * FROM ({FOUND}) AS found (kind, name, of, count) {condition} ORDER BY kind, name"
    for condition in ("", "WHERE kind <> ''")
)


class LeftOut(Record, frozen=True):
    """A part of a primary's database that the snapshot does not contain, or contains incompletely.

    `name` is `schema.table` for a relation. `count` is 1 unless the kind is one of COUNTED.
    """

    node: str
    kind: LeftOutKind
    name: str
    why: str
    count: Count = 1


def read_left_out(
    primaries: Mapping[str, psycopg.Connection[Any]],
    rules: GroupRules,
    groups: Mapping[str, Iterable[Group]],
) -> tuple[LeftOut, ...]:
    """Find the parts that a snapshot of `groups`, the groups that the rules include, leaves out."""
    # If the rules include all tables, they leave out none of the thousands that there may be.
    query = LEFT_OUT_QUERY if rules.exclude or ANY not in rules.include else LEFT_OUT_BY_KIND_QUERY
    found = in_parallel(lambda connection: fetch_texts(connection, query), primaries.values())
    left_out: list[LeftOut] = []
    for node, rows in zip(primaries, found, strict=True):
        for kind, name, of, count in rows:
            if kind:
                left_out.append(LeftOut(node, LeftOutKind(kind), name, WHY[LeftOutKind(kind)].format(of), count))
            elif not is_included(name, rules):
                left_out.append(LeftOut(node, LeftOutKind.EXCLUDED_TABLE, name, _exclusion_reason(name, rules, of)))
    return (*left_out, *append_only_of(groups))


def mark_large_objects(left_out: Iterable[LeftOut], stored: Mapping[str, tuple[int, str]]) -> tuple[LeftOut, ...]:
    """Adapt `left_out` to a full snapshot with large objects; `stored` is their number and position, keyed by node."""
    kind = LeftOutKind.LARGE_OBJECTS_OF_FULL
    replaced = {(LeftOutKind.LARGE_OBJECTS, node) for node in stored}
    of_full = [
        LeftOut(node, kind, "pg_largeobject", WHY[kind].format(position), count)
        for node, (count, position) in stored.items()
    ]
    others = [out for out in left_out if out.kind != kind and (out.kind, out.node) not in replaced]
    return (*others, *of_full)


def select_warnings(left_out: Iterable[LeftOut]) -> tuple[LeftOut, ...]:
    """Select the entries that every command warns about, including list and check."""
    return tuple(out for out in left_out if out.kind in WARNED)


def standby_copies(standbys: Iterable[Node], identities: Mapping[str, NodeIdentity]) -> tuple[LeftOut, ...]:
    """List the standbys that are too old to be copied, keyed by primary; each has the same version as its primary."""
    kind = LeftOutKind.STANDBY_COPY
    return tuple(
        LeftOut(node.shard, kind, node.id, WHY[kind].format(identities[node.shard].server_version // 10000))
        for node in standbys
    )


def absent_copy(shard: str, standby: str, reason: str, since: int | None = None) -> LeftOut:
    """Return the entry for a standby that a commit does without, since this increment if the chain had a copy."""
    kind = LeftOutKind.ABSENT_COPY
    when = "" if since is None else f" since increment {since}"
    return LeftOut(shard, kind, standby, WHY[kind].format(f"{when}: {reason}"))


def append_only_of(groups: Mapping[str, Iterable[Group]]) -> tuple[LeftOut, ...]:
    """List the append-only groups, whose updates and deletes are not captured."""
    kind = LeftOutKind.APPEND_ONLY_TABLE
    return tuple(
        LeftOut(node, kind, group.name, WHY[kind])
        for node, node_groups in groups.items()
        for group in node_groups
        if group.identity == "append_only"
    )


def _exclusion_reason(name: str, rules: GroupRules, extension: str) -> str:
    patterns = [pattern for pattern in rules.exclude if is_matching(name, [pattern])]
    chosen = f"excluded by {patterns[0]}" if patterns else f"not included by {', '.join(rules.include)}"
    return f"{chosen}: it is restored " + (f"as extension {extension} creates it" if extension else "empty")
