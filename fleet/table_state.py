"""What must stay as it is while a chain goes on, table by table: all that would lose rows without a trace in WAL.

Read at the full snapshot, stored in its commit, and compared before and after every cut. `fleet.groups` compares
what a row looks like; this is what else decides whether changes are decoded and whether rows can be loaded again:

- which table it is, and that it was published without a break. A table that leaves a publication and comes back
  has another pg_publication_rel row; an altered publication has its pg_publication row under another xmin
  (freezing and rewriting a catalog keep xmin). PostgreSQL makes no published table unlogged, so that shows here too;
- what its rows must obey: the DDL of the full snapshot is what they will be loaded into, so a constraint that is
  dropped or an enum label that is added may make later rows impossible to load;
- that no ALTER TABLE rewrote its rows (`ALTER COLUMN … TYPE … USING`): logical decoding does not show that. It gives
  the table another file and the column another pg_attribute row. VACUUM FULL, CLUSTER and TRUNCATE do only the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fleet.groups import SchemaChangedError, Table
from fleet.hints import NEW_CHAIN
from fleet.publications import PublicationChangedError, check_published

if TYPE_CHECKING:
    import psycopg

FILES_QUERY = """
SELECT c.oid::bigint, pg_relation_filenode(c.oid)::bigint,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class c WHERE c.oid = ANY (%s)
"""
# Plain indexes, defaults, triggers and grants are not among them: no row is kept out by those. A constraint's
# validation takes nothing away either. Types below 16384 are PostgreSQL's own.
RULES_QUERY = """
WITH RECURSIVE tables AS (SELECT unnest(%s::oid[]) AS oid),
used (relid, typid) AS (
    SELECT a.attrelid, a.atttypid FROM pg_attribute a JOIN tables t ON t.oid = a.attrelid
     WHERE a.attnum > 0 AND NOT a.attisdropped
    UNION
    SELECT u.relid, part.oid
      FROM used u JOIN pg_type t ON t.oid = u.typid
     CROSS JOIN LATERAL (
           SELECT t.typelem WHERE t.typelem <> 0
           UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
           UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
           UNION ALL SELECT a.atttypid FROM pg_attribute a
                      WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped
           ) part (oid)
     WHERE u.typid >= 16384
)
SELECT a.attrelid::bigint, format('column %%I NOT NULL', a.attname)
  FROM pg_attribute a JOIN tables t ON t.oid = a.attrelid
 WHERE a.attnotnull AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT a.attrelid::bigint, format('column %%I GENERATED AS (%%s)', a.attname, pg_get_expr(d.adbin, d.adrelid))
  FROM pg_attribute a JOIN tables t ON t.oid = a.attrelid
  JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
 WHERE a.attgenerated <> '' AND NOT a.attisdropped
UNION ALL
SELECT n.conrelid::bigint,
       format('constraint %%I %%s', n.conname, regexp_replace(pg_get_constraintdef(n.oid), ' NOT VALID$', ''))
  FROM pg_constraint n JOIN tables t ON t.oid = n.conrelid WHERE n.contype IN ('c', 'p', 'u', 'x', 'f')
UNION ALL
SELECT i.indrelid::bigint, pg_get_indexdef(i.indexrelid)
  FROM pg_index i JOIN tables t ON t.oid = i.indrelid
 WHERE i.indisunique AND i.indisvalid
   AND NOT EXISTS (SELECT FROM pg_constraint n WHERE n.conindid = i.indexrelid AND n.contype IN ('p', 'u', 'x'))
UNION ALL
SELECT c.oid::bigint, format('partition of %%s %%s', h.inhparent::regclass, pg_get_expr(c.relpartbound, c.oid))
  FROM pg_class c JOIN tables t ON t.oid = c.oid JOIN pg_inherits h ON h.inhrelid = c.oid WHERE c.relispartition
UNION ALL
SELECT u.relid::bigint, format('type %%s ENUM (%%s)', format_type(u.typid, NULL),
       (SELECT string_agg(quote_literal(e.enumlabel), ', ' ORDER BY e.enumsortorder)
          FROM pg_enum e WHERE e.enumtypid = u.typid))
  FROM used u JOIN pg_type t ON t.oid = u.typid WHERE t.typtype = 'e'
UNION ALL
SELECT u.relid::bigint, format('type %%s (%%s)', format_type(u.typid, NULL),
       (SELECT string_agg(format('%%I %%s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped))
  FROM used u JOIN pg_type t ON t.oid = u.typid WHERE t.typtype = 'c'
UNION ALL
SELECT u.relid::bigint, format('domain %%s AS %%s%%s %%s', format_type(u.typid, NULL),
       format_type(t.typbasetype, t.typtypmod), CASE WHEN t.typnotnull THEN ' NOT NULL' END,
       (SELECT string_agg(regexp_replace(pg_get_constraintdef(n.oid), ' NOT VALID$', ''), ' ' ORDER BY n.conname)
          FROM pg_constraint n WHERE n.contypid = u.typid))
  FROM used u JOIN pg_type t ON t.oid = u.typid WHERE t.typtype = 'd'
"""


@dataclass(frozen=True, slots=True)
class TableState:
    """One table as a full snapshot found it.

    `publication` and `membership` stamp the rows of pg_publication and pg_publication_rel, `columns` those of
    pg_attribute; `file` is where its rows are; `rules` are what its rows must obey, as PostgreSQL prints them.
    """

    table: str
    oid: int
    publication: str
    membership: str
    file: int
    columns: str
    rules: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The table's entry in a commit."""
        return asdict(self)


def table_state_from_json(entry: dict[str, Any]) -> TableState:
    """Read what `TableState.to_json` wrote."""
    return TableState(**(entry | {"rules": tuple(entry["rules"])}))


def read_table_states(
    connection: psycopg.Connection[Any], node: str, fleet_id: str, tables: Iterable[Table]
) -> dict[str, TableState]:
    """The state of the node's `tables`, by name; raise PublicationChangedError if their changes are not published."""
    tables = list(tables)
    published = check_published(connection, node, fleet_id, [table.group for table in tables])
    names = {table.oid: table.group.name for table in tables}
    oids = list(names)
    rules: dict[int, list[str]] = {oid: [] for oid in oids}
    for oid, rule in connection.execute(RULES_QUERY, (oids,)):
        rules[oid].append(rule.strip())
    return {
        names[oid]: TableState(
            names[oid],
            oid,
            published[names[oid]].publication,
            published[names[oid]].membership,
            file,
            columns or "",
            tuple(sorted(rules[oid])),
        )
        for oid, file, columns in connection.execute(FILES_QUERY, (oids,))
    }


def check_table_states(node: str, was: Mapping[str, TableState], now: Mapping[str, TableState]) -> None:
    """Raise SchemaChangedError or PublicationChangedError for the first table that is not as it was.

    The tables of `was` that are not in `now` are not looked at: `check_schema` has found them gone.
    """
    for name in sorted(was.keys() & now.keys()):
        before, after = was[name], now[name]
        if problem := _changed(before, after):
            raise SchemaChangedError(
                f"node {node}: table {name} {problem}", hint=NEW_CHAIN, details={"node": node, "group": name}
            )
        if problem := _published_otherwise(before, after):
            raise PublicationChangedError(
                f"node {node}: table {name} {problem}: changes made in between are lost to the chain",
                hint=NEW_CHAIN,
                details={"node": node, "tables": [name]},
            )


def _changed(before: TableState, after: TableState) -> str:
    if before.oid != after.oid:
        return "is another table than at the full snapshot: it was dropped and created again, or renamed"
    if gone := sorted(set(before.rules) - set(after.rules)):
        return f"is not as it was at the full snapshot: no longer: {gone[0]}"
    if new := sorted(set(after.rules) - set(before.rules)):
        return f"is not as it was at the full snapshot: new: {new[0]}"
    if before.file != after.file and before.columns != after.columns:
        return "was rewritten since the full snapshot, and a column altered: its rows may not be what they were"
    return ""


def _published_otherwise(before: TableState, after: TableState) -> str:
    if before.membership != after.membership:
        return "was taken out of Cutline's publication since the full snapshot and put back"
    if before.publication != after.publication:
        return "is in a publication of Cutline's that was altered since the full snapshot"
    return ""
