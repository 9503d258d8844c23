"""What tells whether a table's changes came through WAL whole, and in which form: its state, at every commit.

Stored in commits and compared by the next increment (snapshots/ddl/table_plan.py), before and after its cut.
`fleet.tables.groups` tells what a row looks like; this is what else decides whether older rows and later changes go
together:

- which table it is, and that it was published without a break. A table that leaves a publication and comes back
  has another pg_publication_rel row; an altered publication has its pg_publication row under another xmin
  (freezing and rewriting a catalog keep xmin). PostgreSQL makes no published table unlogged, so that shows here too;
- that no ALTER TABLE rewrote its rows (`ALTER COLUMN … TYPE … USING`): logical decoding does not show that. It gives
  the table another file and the column another pg_attribute row. VACUUM FULL, CLUSTER and TRUNCATE do only the first;
- how many attributes it ever had: a column that was added and dropped again leaves no other trace;
- that the types whose values print names (enum labels, composites' fields) print what they printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fleet.nodes.encodings import readable
from fleet.record import Count, Record
from fleet.tables.append_only import Counters, read_counters
from fleet.tables.column_types import WITHIN
from fleet.tables.groups import Table
from fleet.tables.publications import NOWHERE, check_published

if TYPE_CHECKING:
    import psycopg

FILES_QUERY = """
SELECT c.oid::bigint, pg_relation_filenode(c.oid)::bigint, c.relnatts,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class c WHERE c.oid = ANY (%s)
"""
# A row of pg_enum has another xmin once its label or its place was changed.
# Types like regclass are printed as names, and aclitem with those of roles: a hash of all that there are stamps them.
TYPES_QUERY = f"""
WITH RECURSIVE used (relid, typid) AS (
    SELECT a.attrelid, a.atttypid FROM pg_attribute a
     WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped
    UNION
    SELECT u.relid, part.oid
      FROM used u {WITHIN}
)
SELECT u.relid::bigint, format('enum %%s %%s %%s.%%s', t.oid, e.oid, e.enumlabel, e.xmin)
  FROM used u JOIN pg_type t ON t.oid = u.typid JOIN pg_enum e ON e.enumtypid = t.oid
UNION ALL
SELECT u.relid::bigint, format('fields %%s %%s', t.oid,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = t.typrelid AND a.attnum > 0))
  FROM used u JOIN pg_type t ON t.oid = u.typid WHERE t.typtype = 'c'
UNION ALL
SELECT u.relid::bigint, 'names ' || named.hash
  FROM (SELECT DISTINCT relid FROM used WHERE typid IN (
              'regclass'::regtype, 'regtype'::regtype, 'regproc'::regtype, 'regprocedure'::regtype, 'regoper'::regtype,
              'regoperator'::regtype, 'regnamespace'::regtype, 'regrole'::regtype, 'regconfig'::regtype,
              'regdictionary'::regtype, 'regcollation'::regtype, 'aclitem'::regtype)) u
 CROSS JOIN LATERAL (
       SELECT md5(string_agg(concat_ws(' ', kind, o.oid, o.name, n.nspname), ',' ORDER BY kind, o.oid)) AS hash
         FROM (SELECT 1 AS kind, oid, relname AS name, relnamespace AS place FROM pg_class
               UNION ALL SELECT 2, oid, typname, typnamespace FROM pg_type
               UNION ALL SELECT 3, oid, proname, pronamespace FROM pg_proc
               UNION ALL SELECT 4, oid, oprname, oprnamespace FROM pg_operator
               UNION ALL SELECT 5, oid, cfgname, cfgnamespace FROM pg_ts_config
               UNION ALL SELECT 6, oid, dictname, dictnamespace FROM pg_ts_dict
               UNION ALL SELECT 7, oid, collname, collnamespace FROM pg_collation
               UNION ALL SELECT 8, oid, nspname, oid FROM pg_namespace
               UNION ALL SELECT 9, oid, rolname, 11 FROM pg_roles) AS o
         JOIN pg_namespace n ON n.oid = o.place AND n.nspname !~ '^pg_(toast|temp)' AND u.relid > 0
        WHERE o.oid >= 16384) AS named
"""
# A label may have any bytes of the database's encoding.
READABLE_TYPES_QUERY = f"SELECT relid, {readable('stamp')} FROM ({TYPES_QUERY}) AS stamps (relid, stamp)"
XML_STAMP = "xml "


class TableState(Record, frozen=True):
    """One table as a commit found it.

    `publication` and `membership` stamp the rows of pg_publication and pg_publication_rel, `columns` those of
    pg_attribute, `types` those that say how values are printed, and which columns have XML in them (`xml_columns`);
    `file` is where its rows are; `attributes` is how many columns it ever had. `counted` is what PostgreSQL has counted
    of an append-only one, None of all others.
    """

    table: str
    oid: Count
    publication: str
    membership: str
    file: Count
    attributes: Count
    columns: str
    types: tuple[str, ...]
    counted: Counters | None = None

    @property
    def printed(self) -> frozenset[str]:
        """The stamps of how values are printed."""
        return frozenset(stamp for stamp in self.types if not stamp.startswith(XML_STAMP))

    @property
    def xml_columns(self) -> frozenset[int]:
        """The numbers of the columns that have XML in them, however deep; older commits do not say."""
        return frozenset(int(stamp.removeprefix(XML_STAMP)) for stamp in self.types if stamp.startswith(XML_STAMP))


def read_table_states(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    tables: Iterable[Table],
    *,
    unpublished_too: bool = False,
) -> dict[str, TableState]:
    """The state of the node's `tables`, by name; raise PublicationChangedError if their changes are not published.

    With `unpublished_too` one that is in no publication of Cutline's is there too, with an empty membership.
    """
    tables = list(tables)
    groups = [table.group for table in tables]
    published = check_published(connection, node, fleet_id, groups, unpublished_too=unpublished_too)
    names = {table.oid: table.group.name for table in tables}
    contained = {table.oid: table.contained for table in tables}
    oids = list(names)
    types: dict[int, list[str]] = {oid: [] for oid in oids}
    for oid, stamp in connection.execute(READABLE_TYPES_QUERY, (oids,)):
        types[oid].append(stamp)
    counted = read_counters(connection, [table.oid for table in tables if table.group.identity == "append_only"])
    return {
        names[oid]: TableState(
            names[oid],
            oid,
            published.get(names[oid], NOWHERE).publication,
            published.get(names[oid], NOWHERE).membership,
            file,
            attributes,
            columns or "",
            tuple(sorted(types[oid])) + tuple(f"{XML_STAMP}{number}" for number in contained[oid].xml),
            counted.get(oid),
        )
        for oid, file, attributes, columns in connection.execute(FILES_QUERY, (oids,))
    }
