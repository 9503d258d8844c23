"""A table's state: whether the WAL contains all of its changes, and in what form.

Every commit stores the state of its tables. The next increment compares it with the state before and after its cut
(snapshots/ddl/table_changes.py). A group's definition describes the rows; the state is everything else that determines
whether older rows and later changes fit together:

- Whether it is the same table and was published without a gap. A table that leaves a publication and comes back gets a
  new pg_publication_rel row; an altered publication gets a new xmin in its pg_publication row (freezing and rewriting a
  catalog keep xmin). A published table can't be made unlogged, so a table that was unlogged for some time is also
  noticed here.
- Whether an ALTER TABLE rewrote its rows (`ALTER COLUMN … TYPE … USING`), which logical decoding does not show. A
  rewrite gives the table a new file and the column a new pg_attribute row. VACUUM FULL, CLUSTER and TRUNCATE only give
  it a new file.
- How many attributes it has ever had: a column that was added and dropped again leaves no other trace.
- Whether types whose values are printed as names (enum labels, fields of composites) are still printed in the same way.

An append-only table's state includes PostgreSQL's counters of updates and deletes (PostgreSQL manual, "The Cumulative
Statistics System"). These count attempts, including rows of transactions that were rolled back, and changes made by
logical replication, cascades and ON CONFLICT. TRUNCATE is not counted, but it is captured. A row that moves to a
different partition counts as deleted from the old partition.

The counters lag behind: a session reports at the end of a transaction, at most once a second; an idle session reports
within 10 s, and a session in a long transaction reports when the transaction ends. A prepared transaction is reported
by the session that commits it or rolls it back. So an UPDATE before a cut may be counted after the cut; the next
increment then notices it.

The counters are lost when a server crashes, and through the pg_stat_reset functions. Both leave a trace: a crash resets
all of the server's counters, including the archiver's, and resetting a table's counters updates the reset time of its
database. After such a reset, equal counters prove nothing. This causes only a warning, because there is no evidence of
a change. With track_counts off nothing is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.record import Count, Record
from cutline.nodes.encodings import digest_of, readable
from cutline.nodes.groups import WITHIN, Table
from cutline.nodes.left_out import WHY, LeftOut, LeftOutKind
from cutline.nodes.publications import NOWHERE, check_published
from cutline.storage.errors import ChainEnd, RefusedError

if TYPE_CHECKING:
    import psycopg

# track_counts may be off for the writers' roles or database although it is on in our session.
COUNTERS_QUERY = """
SELECT t.oid::bigint, pg_stat_get_tuples_updated(t.oid), pg_stat_get_tuples_deleted(t.oid),
       CASE WHEN current_setting('track_counts')::bool AND NOT EXISTS (
                 SELECT FROM pg_db_role_setting g CROSS JOIN unnest(g.setconfig) AS setting
                  WHERE g.setdatabase IN (0, d.oid) AND setting ~* '^track_counts=(of|f|n|0)')
            THEN concat_ws(' ', a.stats_reset, pg_stat_get_db_stat_reset_time(d.oid)) ELSE '' END
  FROM unnest(%s::oid[]) AS t (oid), pg_stat_archiver AS a, pg_database AS d WHERE d.datname = current_database()
"""
SNAPSHOT_BEGAN = "this snapshot began"
IDENTITY = "ALTER TABLE … REPLICA IDENTITY FULL, or a primary key"


class AppendOnlyChangedError(RefusedError):
    """Unknown rows of an append-only table were updated or deleted."""


class Counters(Record, frozen=True):
    """How many rows in a table were updated and deleted. `since` stamps the last reset, "" if track_counts is off."""

    updated: Count
    deleted: Count
    since: str

    @property
    def rows(self) -> tuple[int, int]:
        """The numbers of rows updated and deleted."""
        return self.updated, self.deleted


def read_counters(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, Counters]:
    """Read the counters for these tables, keyed by oid."""
    rows = connection.execute(COUNTERS_QUERY, (list(oids),)).fetchall()
    return {oid: Counters(updated, deleted, since) for oid, updated, deleted, since in rows}


def has_changed(was: Counters, now: Counters) -> bool:
    """Whether rows were certainly updated or deleted between the two readings."""
    # Only the rows are compared: the stamp also changes when another table in the database is reset.
    return now.rows not in (was.rows, (0, 0))


def are_counters_unknown(was: Counters, now: Counters) -> bool:
    """Whether rows may have been updated or deleted unnoticed between the two readings."""
    return not has_changed(was, now) and (was != now or not now.since)


def check_counters(node: str, since: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> None:
    """Raise AppendOnlyChangedError naming the tables in both readings that were updated or deleted from.

    In the message, `since` describes the time of `was`: an increment, or SNAPSHOT_BEGAN.
    """
    changed = [name for name in sorted(was.keys() & now.keys()) if has_changed(was[name], now[name])]
    if not changed:
        return
    counted = "; ".join(f"{name} ({_difference_text(was[name], now[name])})" for name in changed)
    message = (
        f"node {node}: rows of append-only tables were updated or deleted since {since}, perhaps by transactions that"
        f" were rolled back, and can't be identified: {counted}"
    )
    ends_chain = ChainEnd.NO
    if since == SNAPSHOT_BEGAN:
        hint = [f"repeat the command while nothing updates them, or give each a replica identity: {IDENTITY}"]
    else:
        message += f"; {since} itself may lack the earliest of these changes, because sessions report them late"
        hint = [
            f"give each a replica identity, so that the next increment copies it again: {IDENTITY};",
            f"or {NEW_CHAIN}",
        ]
        ends_chain = ChainEnd.PERHAPS
    raise AppendOnlyChangedError(
        message,
        hint=hint,
        ends_chain=ends_chain,
        details={"node": node, "tables": changed},
    )


def _difference_text(was: Counters, now: Counters) -> str:
    before = was.rows if all(b <= n for b, n in zip(was.rows, now.rows, strict=True)) else (0, 0)
    updated, deleted = (n - b for n, b in zip(now.rows, before, strict=True))
    return f"{updated} rows updated, {deleted} deleted"


def unknown_counters_warnings(node: str, was: Mapping[str, Counters], now: Mapping[str, Counters]) -> list[LeftOut]:
    """Return a warning for every table in both readings whose rows may have been updated or deleted unnoticed."""
    kind = LeftOutKind.UNCOUNTED_TABLE
    names = [name for name in sorted(was.keys() & now.keys()) if are_counters_unknown(was[name], now[name])]
    return [LeftOut(node, kind, name, WHY[kind]) for name in names]


FILES_QUERY = """
SELECT c.oid::bigint, pg_relation_filenode(c.oid)::bigint, c.relnatts,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
  FROM pg_class c WHERE c.oid = ANY (%s)
"""
XML_STAMP, NAMES_STAMP = "xml ", "names "
NAMING_TYPES = """
'regclass'::regtype, 'regtype'::regtype, 'regproc'::regtype, 'regprocedure'::regtype, 'regoper'::regtype,
'regoperator'::regtype, 'regnamespace'::regtype, 'regrole'::regtype, 'regconfig'::regtype, 'regdictionary'::regtype,
'regcollation'::regtype, 'aclitem'::regtype
"""
# The name of a role may be invalid in the encoding of this database: it was created in one with another encoding. As in
# `readable`, it is treated as bytes.
NAME_BYTES = "encode(quote_literal(o.name)::bytea, 'hex')"
NAMES_DIGEST = digest_of(f"string_agg(concat_ws(' ', kind, o.oid, {NAME_BYTES}, n.nspname), ',' ORDER BY kind, o.oid)")
# Most columns have built-in base types that contain no other types and print no names: they are left out at once.
# A change to an enum's label or position gives its pg_enum row a new xmin. regclass and similar types are printed as
# names, and aclitem with role names: their stamp is a hash of all such names.
TYPES_QUERY = f"""
WITH RECURSIVE used (relid, typid) AS (
    SELECT a.attrelid, a.atttypid FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
     WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped
       AND (t.oid >= 16384 OR t.typtype <> 'b' OR t.typcategory = 'A' OR t.oid IN ({NAMING_TYPES}))
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
SELECT u.relid::bigint, '{NAMES_STAMP}' || named.hash
  FROM (SELECT DISTINCT relid FROM used WHERE typid IN ({NAMING_TYPES})) u
 CROSS JOIN LATERAL (
       SELECT {NAMES_DIGEST} AS hash
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
# The enum types that columns of the tables contain in values of other types: of arrays, domains, ranges, composites.
NESTED_ENUMS_QUERY = f"""
WITH RECURSIVE used (relid, root, typid) AS (
    SELECT a.attrelid, a.atttypid, a.atttypid FROM pg_attribute a
     WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped
    UNION
    SELECT u.relid, u.root, part.oid
      FROM used u {WITHIN}
)
SELECT DISTINCT u.relid::bigint, t.oid::bigint
  FROM used u JOIN pg_type t ON t.oid = u.typid WHERE t.typtype = 'e' AND u.typid <> u.root
"""
# A label may contain any bytes that the database's encoding allows.
READABLE_TYPES_QUERY = f"SELECT relid, {readable('stamp')} FROM ({TYPES_QUERY}) AS stamps (relid, stamp)"
# The stamp of an enum's label: the oids of the type and the label, the label, and the xmin of its row.
LABEL_STAMP = re.compile(r"enum (\d+) \d+ (.*)\.\d+", re.DOTALL)
# The stamp of a composite type begins with its oid.
FIELDS_STAMP = re.compile(r"fields (\d+) ")


class TableState(Record, frozen=True):
    """The state of one table at a commit.

    `publication` and `membership` stamp its rows in pg_publication and pg_publication_rel, and `columns` its rows in
    pg_attribute. `types` stamps how values are printed, and lists the columns that contain XML (`xml_columns`). `file`
    is the table's filenode, and `attributes` the number of columns that it has ever had. `counted` contains the
    counters of an append-only table; for other tables it is None.
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
        """Stamps that change if values would be printed differently."""
        return frozenset(stamp for stamp in self.types if not stamp.startswith(XML_STAMP))

    @property
    def labels(self) -> dict[int, set[str]]:
        """The labels of the enum types that occur in the table's values, by the oid of the type."""
        return _labels(self.types)

    def unchanged_labels(self, now: TableState) -> dict[int, set[str]]:
        """The labels whose rows in pg_enum are the same in the later state, by the oid of the type."""
        return _labels(set(self.types).intersection(now.types))

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the columns that the table has."""
        return frozenset(int(stamp.partition(".")[0]) for stamp in self.columns.split())

    @property
    def has_names(self) -> bool:
        """Whether values may contain names of objects; the fingerprint lacks roles to which nothing here refers."""
        return any(stamp.startswith(NAMES_STAMP) for stamp in self.types)

    @property
    def xml_columns(self) -> frozenset[int]:
        """The numbers of the columns that contain XML at any depth."""
        return frozenset(int(stamp.removeprefix(XML_STAMP)) for stamp in self.types if stamp.startswith(XML_STAMP))


def _labels(stamps: Iterable[str]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = {}
    for stamp in stamps:
        if match := LABEL_STAMP.fullmatch(stamp):
            found.setdefault(int(match[1]), set()).add(match[2])
    return found


def read_printed(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, frozenset[str]]:
    """Return stamps of the tables, keyed by oid, that change if their values would be printed differently.

    A physical standby has the stamps of its primary as soon as it has replayed the change.
    """
    listed = list(oids)
    stamps: dict[int, set[str]] = {oid: set() for oid in listed}
    for oid, stamp in connection.execute(READABLE_TYPES_QUERY, (listed,)):
        stamps[oid].add(stamp)
    return {oid: frozenset(some) for oid, some in stamps.items()}


def read_nested_enums(connection: psycopg.Connection[Any], oids: Iterable[int]) -> dict[int, frozenset[int]]:
    """Return the enum types that occur within values of other types, by the oid of the table, for tables with any."""
    nested: dict[int, set[int]] = {}
    for oid, enum in connection.execute(NESTED_ENUMS_QUERY, (list(oids),)):
        nested.setdefault(oid, set()).add(enum)
    return {oid: frozenset(enums) for oid, enums in nested.items()}


def read_table_states(
    connection: psycopg.Connection[Any],
    node: str,
    fleet_id: str,
    tables: Iterable[Table],
    *,
    accepts_altered: bool = False,
    are_few: bool = False,
) -> dict[str, TableState]:
    """Return the states of `tables`, keyed by name; raise PublicationChangedError as check_published does.

    A table that is not in any of Cutline's publications, or not with all its changes, has an empty membership. If the
    tables `are_few`, the publications' other members are not read.
    """
    tables = list(tables)
    groups = [table.group for table in tables]
    of_these = [table.oid for table in tables] if are_few else None
    published = check_published(connection, node, fleet_id, groups, accepts_altered=accepts_altered, oids=of_these)
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
