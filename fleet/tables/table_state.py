"""A table's state: whether the WAL has all of its changes, and in which form.

Every commit stores it, and the next increment compares it before and after its cut (snapshots/ddl/table_plan.py). A
group's definition describes the rows; the state is everything else that decides whether older rows and later changes
fit together:

- that it is the same table, and was published without a gap. A table that leaves a publication and comes back has a new
  pg_publication_rel row; an altered publication has a new xmin in its pg_publication row (freezing and rewriting a
  catalog keep xmin). A published table can't be made unlogged, so that shows here, too;
- that no ALTER TABLE rewrote its rows (`ALTER COLUMN … TYPE … USING`), which logical decoding does not show. A rewrite
  gives the table a new file and the column a new pg_attribute row. VACUUM FULL, CLUSTER and TRUNCATE do only the first;
- how many attributes it ever had: a column that was added and dropped again leaves no other trace;
- that types whose values are printed as names (enum labels, fields of composites) are still printed the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cutline.fleet.nodes.encodings import readable
from cutline.fleet.record import Count, Record
from cutline.fleet.tables.append_only import Counters, read_counters
from cutline.fleet.tables.column_types import WITHIN
from cutline.fleet.tables.groups import Table
from cutline.fleet.tables.publications import NOWHERE, check_published

if TYPE_CHECKING:
    import psycopg

FILES_QUERY = """
SELECT c.oid::bigint, pg_relation_filenode(c.oid)::bigint, c.relnatts,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class c WHERE c.oid = ANY (%s)
"""
# A pg_enum row has a new xmin after its label or its position was changed. regclass and similar types are printed as
# names, and aclitem with role names: their stamp is a hash of all such names.
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
# A label may contain any bytes of the database's encoding.
READABLE_TYPES_QUERY = f"SELECT relid, {readable('stamp')} FROM ({TYPES_QUERY}) AS stamps (relid, stamp)"
XML_STAMP = "xml "


class TableState(Record, frozen=True):
    """One table at a commit.

    `publication` and `membership` stamp its rows in pg_publication and pg_publication_rel, and `columns` those in
    pg_attribute. `types` stamps how values are printed, and lists the columns that contain XML (`xml_columns`). `file`
    is its filenode, and `attributes` the number of columns that it ever had. `counted` has the counters of an
    append-only table; None for all others.
    """

    table: str
    oid: Count
    publication: str
    membership: str
    file: Count
    attributes: Count
    columns: str
    types: tuple[str, ...]
    counted: Counters | None

    @property
    def printed(self) -> frozenset[str]:
        """The stamps of how values are printed."""
        return frozenset(stamp for stamp in self.types if not stamp.startswith(XML_STAMP))

    @property
    def xml_columns(self) -> frozenset[int]:
        """The numbers of the columns that contain XML at any depth; empty in commits of older versions."""
        return frozenset(int(stamp.removeprefix(XML_STAMP)) for stamp in self.types if stamp.startswith(XML_STAMP))


def read_table_states(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    tables: Iterable[Table],
    *,
    unpublished_too: bool = False,
) -> dict[str, TableState]:
    """The states of the node's `tables`, by name; raise PublicationChangedError if their changes are not published.

    With `unpublished_too`, a table that is in none of Cutline's publications has a state with an empty membership.
    """
    tables = list(tables)
    groups = [table.group for table in tables]
    published = check_published(connection, node, fleet_id, groups, unpublished_too=unpublished_too)
    names = {table.oid: table.group.name for table in tables}
    special = {table.oid: table.special_columns for table in tables}
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
            tuple(sorted(types[oid])) + tuple(f"{XML_STAMP}{number}" for number in special[oid].xml),
            counted.get(oid),
        )
        for oid, file, attributes, columns in connection.execute(FILES_QUERY, (oids,))
    }
