"""The fingerprint of a database's catalogs: it shows whether DDL ran between two readings.

It consists of two hashes of the key and the xmin of catalog rows, over all catalogs that pg_dump reads. No two versions
of a row have the same xmin, so even a reverted change is detected, for every object that exists at both readings. An
object that is created and dropped between two readings leaves no trace, but neither reading depends on it. In-place
updates by the server (VACUUM, ANALYZE, autovacuum, freezing) keep xmin.

- The *hash of the objects* covers what a dump shows, and decides whether two fingerprints are the same. Temporary
  objects are omitted, because busy applications create them all the time, and so are TOAST tables, because VACUUM FULL
  and CLUSTER create new ones. Cutline's own publications are omitted too: nodes/table_state.py compares them table by
  table.
- The *hash of all rows* covers these too. While it is the same, so is everything else. Its query has no joins, so it
  takes half the time, and the server can divide it among processes.

Within a session, a *moment* is cheaper still: while the same transactions are visible as then, so are the same rows. If
others have ended, but none of the visible rows is theirs, and there are as many as before, all are the same.

While a dump runs, objects may be added: a dump of an exported snapshot does not show them, and those that it shows are
the same as long as none of their rows has changed. To check this, the hash of the objects is computed over only the
rows that the snapshot shows.

Rows that were inserted and deleted again leave no trace in the hash of all rows either. So it shows that nothing has
changed since a reading, but not that everything else that was recorded since then still holds.

For pg_class, the columns are hashed instead of xmin: TRUNCATE, REINDEX, CLUSTER and VACUUM FULL give a relation a new
file without changing its dump, and so does a restart of a sequence (create/sequences.py). The properties of the
database itself (owner, comment, limits, privileges, settings) are hashed by value, too: the DDL has them, and an
increment stores the properties that its newest DDL has. The setting that makes a database read-only is omitted, because
a terminal snapshot changes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.nodes.encodings import digest_of
from cutline.nodes.publications import OWN_PUBLICATION

HIDDEN = r"""
WITH own_database AS MATERIALIZED (SELECT oid FROM pg_database WHERE datname = current_database()),
own AS MATERIALIZED (SELECT oid FROM pg_publication WHERE pubname ~ '^(OWN_PUBLICATION)$'),
-- Schemas that are not dumped: those of temporary objects and of TOAST tables.
schemas AS MATERIALIZED (SELECT oid FROM pg_namespace WHERE nspname ~ '^pg_(toast|temp)'),
types AS MATERIALIZED (SELECT oid FROM pg_type WHERE typnamespace IN (SELECT oid FROM schemas)),
relations AS MATERIALIZED (
    SELECT oid FROM pg_class
     WHERE relpersistence = 't' OR relkind = 't' OR relnamespace IN (SELECT oid FROM schemas))
""".replace("OWN_PUBLICATION", OWN_PUBLICATION)
# relhasindex, relhasrules and relhastriggers are omitted: they are not exact, and VACUUM corrects them.
RELATIONS_HASH = """
sum(hash_record_extended(ROW(c.oid, relname, relnamespace, relowner, relkind,
             relpersistence, relam, reltablespace, reloftype, relnatts, relreplident, relrowsecurity,
             relforcerowsecurity, relispartition, relispopulated, reloptions, relacl, relpartbound::text), 0))
"""
RELATIONS = """
SELECT 'pg_class', count(*), {measure} FROM pg_class c WHERE relpersistence <> 't' AND relkind <> 't'{condition}
"""
# TOAST tables have options of their own.
TOAST_HASH = "sum(hash_record_extended(ROW({relation}, t.reloptions), 0))"
TOAST_OPTIONS = """
SELECT 'pg_class of toast', count(*), {measure}
  FROM pg_class t{join} WHERE t.relkind = 't' AND t.reloptions IS NOT NULL AND t.relpersistence <> 't'{condition}
"""
DEPEND_HASH = "sum(hash_record_extended(ROW(classid, objid, objsubid, refclassid, refobjid, xmin), 0))"
# What both hashes cover.
COMMON = """
SELECT 'pg_database', count(*), sum(hash_record_extended(ROW(d.oid, datname, datdba, datconnlimit, datistemplate,
             datacl, dattablespace, shobj_description(d.oid, 'pg_database')), 0))
  FROM pg_database d WHERE datname = current_database()
UNION ALL
SELECT 'pg_db_role_setting', count(*), sum(hash_record_extended(ROW(setrole, setting), 0))
  FROM pg_db_role_setting, unnest(setconfig) AS of (setting)
 WHERE setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND NOT setting ^@ 'default_transaction_read_only='
UNION ALL
SELECT 'pg_depend', count(*), {measure} FROM pg_depend WHERE deptype IN ('e', 'x'){depend_condition}
UNION ALL
SELECT 'roles', count(*), sum(hash_record_extended(ROW(r.oid, r.rolname), 0))
  FROM pg_roles r
 WHERE r.oid = 10 OR r.oid IN (
       SELECT refobjid FROM pg_shdepend, own_database AS d
        WHERE refclassid = 'pg_authid'::regclass
          AND (dbid = d.oid OR (dbid = 0 AND classid = 'pg_database'::regclass AND objid = d.oid)){role_condition}
       UNION ALL SELECT setrole FROM pg_db_role_setting JOIN own_database AS d ON setdatabase = d.oid)
"""


class CatalogRows(Struct, frozen=True):
    """A catalog in the fingerprint: `key` lists its key columns, `condition` chooses its rows; "" are all rows.

    `hidden` is the condition that additionally applies in the hash of the objects.
    """

    name: str
    key: str = "oid"
    hidden: str = ""
    condition: str = ""


def _not_in(column: str, hidden: str, more: str = "") -> str:
    """Return the condition that an object is not `hidden`.

    It must be one of the conditions that WHERE joins by AND: within OR or NOT, the server would search all hidden
    objects for each row, once their hash table exceeds work_mem.
    """
    return f"NOT EXISTS (SELECT FROM {hidden} h WHERE h.oid = {column}{more})"


_AND_RELATION, _AND_PUBLICATION = (
    f" AND classoid = '{catalog}'::regclass" for catalog in ("pg_class", "pg_publication")
)
CATALOGS = (
    CatalogRows("pg_aggregate", "aggfnoid::oid"),
    CatalogRows("pg_am"),
    CatalogRows("pg_amop"),
    CatalogRows("pg_amproc"),
    CatalogRows("pg_attrdef", hidden=_not_in("adrelid", "relations")),
    CatalogRows("pg_attribute", "attrelid, attnum", _not_in("attrelid", "relations"), "attnum >= 0"),
    CatalogRows("pg_cast"),
    CatalogRows("pg_collation", hidden=_not_in("collnamespace", "schemas")),
    CatalogRows("pg_constraint", hidden=_not_in("connamespace", "schemas")),
    CatalogRows("pg_conversion", hidden=_not_in("connamespace", "schemas")),
    CatalogRows("pg_default_acl"),
    CatalogRows(
        "pg_description",
        "classoid, objoid, objsubid",
        f"{_not_in('objoid', 'relations', _AND_RELATION)} AND {_not_in('objoid', 'own', _AND_PUBLICATION)}",
    ),
    CatalogRows("pg_enum", hidden=_not_in("enumtypid", "types")),
    CatalogRows("pg_event_trigger"),
    CatalogRows("pg_extension"),
    CatalogRows("pg_foreign_data_wrapper"),
    CatalogRows("pg_foreign_server"),
    CatalogRows("pg_foreign_table", "ftrelid"),
    CatalogRows("pg_index", "indexrelid", _not_in("indrelid", "relations")),
    CatalogRows("pg_inherits", "inhrelid, inhseqno", _not_in("inhrelid", "relations")),
    CatalogRows("pg_init_privs", "classoid, objoid, objsubid"),
    CatalogRows("pg_language"),
    CatalogRows("pg_namespace", hidden=_not_in("pg_namespace.oid", "schemas")),
    CatalogRows("pg_opclass", hidden=_not_in("opcnamespace", "schemas")),
    CatalogRows("pg_operator", hidden=_not_in("oprnamespace", "schemas")),
    CatalogRows("pg_opfamily", hidden=_not_in("opfnamespace", "schemas")),
    CatalogRows("pg_partitioned_table", "partrelid", _not_in("partrelid", "relations")),
    CatalogRows("pg_policy", hidden=_not_in("polrelid", "relations")),
    CatalogRows("pg_proc", hidden=_not_in("pronamespace", "schemas")),
    CatalogRows("pg_publication", hidden=_not_in("pg_publication.oid", "own")),
    CatalogRows("pg_publication_namespace"),
    CatalogRows("pg_publication_rel", hidden=_not_in("prpubid", "own")),
    CatalogRows("pg_range", "rngtypid", _not_in("rngtypid", "types")),
    CatalogRows("pg_rewrite", hidden=_not_in("ev_class", "relations")),
    CatalogRows("pg_seclabel", "classoid, objoid, objsubid, provider"),
    CatalogRows("pg_sequence", "seqrelid", _not_in("seqrelid", "relations")),
    CatalogRows("pg_statistic_ext", hidden=_not_in("stxrelid", "relations")),
    CatalogRows("pg_tablespace"),
    CatalogRows("pg_transform"),
    CatalogRows("pg_trigger", hidden=_not_in("tgrelid", "relations")),
    CatalogRows("pg_ts_config", hidden=_not_in("cfgnamespace", "schemas")),
    CatalogRows("pg_ts_config_map", "mapcfg, maptokentype, mapseqno"),
    CatalogRows("pg_ts_dict", hidden=_not_in("dictnamespace", "schemas")),
    CatalogRows("pg_ts_parser", hidden=_not_in("prsnamespace", "schemas")),
    CatalogRows("pg_ts_template", hidden=_not_in("tmplnamespace", "schemas")),
    CatalogRows("pg_type", hidden=_not_in("pg_type.oid", "types")),
)
# By default, only superusers may read this catalog, because it contains passwords. pg_dump reads the view, which shows
# a role only the options that it may use. If our role may not read the catalog, hash the view, which is all that it can
# dump.
USER_MAPPINGS = CatalogRows("pg_user_mapping")
VISIBLE_USER_MAPPINGS = """
SELECT 'pg_user_mapping', count(*), sum(hash_record_extended(ROW(umid, srvid, umuser, umoptions), 0))
  FROM pg_user_mappings
"""
HASH_DIGITS = 32
ONE_SNAPSHOT = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"
# Catalogs contain the lower half of a transaction's id.
XID_MAX = (1 << 32) - 1
MOMENT_QUERY = """
SELECT pg_current_snapshot()::text, concat_ws(' ', pid, backend_start) FROM pg_stat_get_activity(pg_backend_pid())
"""
READS_USER_MAPPINGS = "SELECT has_table_privilege('pg_user_mapping', 'SELECT')"

# The catalogs that everybody may read by default.
PUBLIC_CATALOGS = (
    *(catalog.name for catalog in CATALOGS),
    "pg_class",
    "pg_database",
    "pg_depend",
    "pg_roles",
    "pg_shdepend",
    "pg_user_mappings",
)


# These are hashed by value, not by the xmin of their rows.
BY_VALUE = "('pg_database', 'pg_db_role_setting', 'roles', 'pg_user_mapping')"
# Rows in the transactions whose ids are given.
NEW_ROWS = "count(*) FILTER (WHERE {table}.xmin = ANY (%(xids)s::xid[]))"
# Rows that a snapshot shows: those of transactions before the first one that was running then, and of those that had
# ended. A snapshot has no ids of subtransactions, so some of their rows may be taken for such rows. Then the hash
# differs, as after a change.
# The ids of frozen rows stay, so 2^31 transactions later their ages are negative. The ages of rows that were written
# since the statement began are negative, too, but small.
SHOWN = """
(age({table}.xmin) < -1000000 OR age({table}.xmin) > age(%(first)s::xid)
 OR (age({table}.xmin) > age(%(end)s::xid) AND {table}.xmin <> ALL (%(running)s::xid[])))
"""
# A relation's own row may have a new version although it is the same object: the columns in the hash decide that.
SHOWN_RELATION = (
    f"({SHOWN} OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = {{table}}.oid AND {SHOWN.format(table='a')}))"
)
COUNTS = f"""
string_agg(concat_ws(' ', catalog, rows, CASE WHEN catalog IN {BY_VALUE} THEN hashes END), ',' ORDER BY catalog)
"""


HASHED = (
    "left("
    + digest_of("string_agg(format('%s %s %s', catalog, rows, hashes), ',' ORDER BY catalog)")
    + f", {HASH_DIGITS})"
)


def _part(catalog: CatalogRows, measure: str = "", *, hides: bool, more: str = "") -> str:
    # Sums are exact. With XOR, a difference that many hashes have in common would cancel out.
    measure = measure or f"sum(hash_record_extended(ROW({catalog.key}, xmin), 0))"
    where = " AND ".join(filter(None, [catalog.condition, catalog.hidden if hides else "", more]))
    rows = f"SELECT '{catalog.name}', count(*), {measure} FROM {catalog.name}"
    return rows + (f" WHERE {where}" if where else "")


def _query(result: str, parts: list[str]) -> str:
    return f"{HIDDEN} SELECT {result} FROM ({' UNION ALL '.join(parts)}) AS part (catalog, rows, hashes)"


def _objects_query(mappings: str, shown: str = "", shown_relation: str = "") -> bytes:
    """Return the query for the hash of the objects; the conditions choose rows of `{table}`."""

    def and_(condition: str, table: str) -> str:
        return f" AND {condition.format(table=table)}" if condition else ""

    parts = [
        RELATIONS.format(
            measure=RELATIONS_HASH,
            condition=" AND NOT EXISTS (SELECT FROM schemas h WHERE h.oid = relnamespace)" + and_(shown_relation, "c"),
        ),
        TOAST_OPTIONS.format(
            measure=TOAST_HASH.format(relation="c.oid"),
            join=" JOIN pg_class c ON c.reltoastrelid = t.oid",
            condition=and_(shown_relation, "t"),
        ),
        COMMON.format(
            measure=DEPEND_HASH, depend_condition=and_(shown, "pg_depend"), role_condition=and_(shown, "pg_shdepend")
        ),
        *(_part(catalog, hides=True, more=shown.format(table=catalog.name)) for catalog in CATALOGS),
        mappings,
    ]
    return _query(HASHED, parts).encode()


def _shown_objects_query(mappings: str) -> bytes:
    text = _objects_query(mappings, SHOWN, SHOWN_RELATION).decode()
    return re.sub(r"%(?!\((first|end|running)\)s)", "%%", text).encode()


def _rows_query(mappings: str) -> bytes:
    parts = [
        RELATIONS.format(measure=RELATIONS_HASH, condition=""),
        TOAST_OPTIONS.format(measure=TOAST_HASH.format(relation="t.oid"), join="", condition=""),
        COMMON.format(measure=DEPEND_HASH, depend_condition="", role_condition=""),
        *(_part(catalog, hides=False) for catalog in CATALOGS),
        mappings,
    ]
    return _query(f"{HASHED}, {COUNTS}", parts).encode()


def _new_rows_query(mappings: str) -> bytes:
    parts = [
        RELATIONS.format(measure=NEW_ROWS.format(table="c"), condition=""),
        TOAST_OPTIONS.format(measure=NEW_ROWS.format(table="t"), join="", condition=""),
        COMMON.format(measure=NEW_ROWS.format(table="pg_depend"), depend_condition="", role_condition=""),
        *(_part(catalog, NEW_ROWS.format(table=catalog.name), hides=False) for catalog in CATALOGS),
        mappings,
    ]
    text = _query(f"bool_or(hashes > 0 AND catalog NOT IN {BY_VALUE}), {COUNTS}", parts)
    return text.replace("%", "%%").replace("%%(xids)s", "%(xids)s").encode()


# The queries by whether the role may read all user mappings.
_MAPPINGS = {True: _part(USER_MAPPINGS, hides=True), False: VISIBLE_USER_MAPPINGS}
OBJECTS_QUERIES, ROWS_QUERIES, NEW_ROWS_QUERIES = (
    {reads_all: make(mappings) for reads_all, mappings in _MAPPINGS.items()}
    for make in (_objects_query, _rows_query, _new_rows_query)
)
SHOWN_OBJECTS_QUERIES = {
    True: _shown_objects_query(_part(USER_MAPPINGS, hides=True, more=SHOWN.format(table=USER_MAPPINGS.name))),
    False: _shown_objects_query(VISIBLE_USER_MAPPINGS),
}
# With more transactions since, the hash is computed.
XIDS_MAX = 5000


class Moment(Struct, frozen=True):
    """Which transactions a session's statements saw, in which of the server's processes.

    `counts` are the numbers of rows in the catalogs, and what they contain by value; "" if they were not read. After a
    crash, the ids of transactions that were lost may be used again, but no process has survived it.
    """

    visible: str
    process: str
    counts: str = ""


def read_fingerprint(connection: psycopg.Connection[Any]) -> str:
    """Return the fingerprint of the connection's database: 32 hexadecimal digits for the objects, and 32 for all rows.

    To keep it, read it in a transaction with a single snapshot.
    """
    return read_again(connection, "")


def read_again(connection: psycopg.Connection[Any], was: str, rows: str = "") -> str:
    """Do the same as `read_fingerprint`, but read only the hash of all `rows`, if needed, if it is still what it `was`.

    Both hashes must be of the same moment.
    """
    rows = rows or read_rows(connection)[0]
    if was and rows == was[HASH_DIGITS:]:
        return was
    return str(_ask(connection, OBJECTS_QUERIES)[0]) + rows


def read_rows(connection: psycopg.Connection[Any]) -> tuple[str, Moment]:
    """Return the hash of all rows, the second half of the fingerprint, and the moment.

    The session must be in a transaction with a single snapshot if the moment is to be used.
    """
    moment, (rows, counts) = read_moment(connection), _ask(connection, ROWS_QUERIES)
    return str(rows), replace(moment, counts=str(counts))


def read_moment(connection: psycopg.Connection[Any]) -> Moment:
    """Return the moment, without its counts."""
    return Moment(*connection.execute(MOMENT_QUERY).fetchone() or ("", ""))


def is_unchanged(connection: psycopg.Connection[Any], was: Moment, now: Moment) -> bool:
    """Whether it is certain that all rows of the catalogs are what they were; if not, compare the fingerprints.

    The session must be in a transaction with a single snapshot, which is that of `now`.

    While the same transactions are visible, so are the same rows. Otherwise, a row that was not visible before belongs
    to a transaction that was running or had not begun then. All of these, and their subtransactions, have ids that are
    at least the first one that was running then. If there is no such row, and no fewer rows than before, all are the
    same.
    """
    if not was.process or was.process != now.process:
        return False
    if was.visible == now.visible:
        return True
    # Of a snapshot: the first id that was running, and the first that had not begun.
    first, end = int(was.visible.split(":")[0]), int(now.visible.split(":")[1])
    if not was.counts or end - first > XIDS_MAX:
        return False
    xids = f"{{{','.join(str(xid & XID_MAX) for xid in range(first, end))}}}"
    return _ask(connection, NEW_ROWS_QUERIES, {"xids": xids}) == (False, was.counts)


def has_only_added(connection: psycopg.Connection[Any], was: str, visible: str) -> bool:
    """Whether DDL since the fingerprint `was` has only added objects.

    `visible` are the transactions that its snapshot showed (Moment), in the same run of the server.
    """
    if are_same_objects(read_again(connection, was), was):
        return True
    first, end, running = visible.split(":")
    running = ",".join(map(_xid, filter(None, running.split(","))))
    parameters = {"first": _xid(first), "end": _xid(end), "running": f"{{{running}}}"}
    return are_same_objects(str(_ask(connection, SHOWN_OBJECTS_QUERIES, parameters)[0]), was)


def _xid(transaction: str) -> str:
    return str(int(transaction) & XID_MAX)


def are_same_objects(one: str, other: str) -> bool:
    """Whether two fingerprints are those of the same objects, which pg_dump dumps in the same way."""
    return one[:HASH_DIGITS] == other[:HASH_DIGITS]


def _ask(
    connection: psycopg.Connection[Any], queries: Mapping[bool, bytes], parameters: Mapping[str, str] | None = None
) -> tuple[Any, ...]:
    reads_all = connection.execute(READS_USER_MAPPINGS).fetchone() == (True,)
    return connection.execute(queries[reads_all], parameters).fetchone() or ()
