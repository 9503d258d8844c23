"""Compute stored generated columns again whose functions may have run before the rows that they read were loaded.

PostgreSQL requires that such an expression is immutable, but believes what a function says of itself. A function that
fails while rows are missing makes its table refuse the rows, which are then loaded again (restore/rows/rounds.py). One
that returns something else instead, such as NULL, leaves a wrong value behind. So when all rows are loaded, such
columns are compared with what their expressions return then. Only functions in SQL and PL/pgSQL are trusted whose text
neither reads rows nor names another function that is not PostgreSQL's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import connect, raising_unreachable, refuse_views
from cutline.nodes.encodings import RAW
from cutline.nodes.groups import Group, qualify
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import ending
from cutline.restore.ddl.session_settings import set_settings
from cutline.restore.ddl.statements import NOT_FOUND
from cutline.restore.rows.load import LoadTarget, load_error

# The generated columns whose expressions may read rows: schema and name of the table, its oid, the column's number and
# name, and the number and name of a column that the expression reads and that an UPDATE may set, or NULL.
COLUMNS_QUERY = r"""
WITH functions AS MATERIALIZED (
    SELECT p.oid, p.proname, l.lanname, coalesce(pg_get_function_sqlbody(p.oid), p.prosrc) AS body
      FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
     WHERE p.oid >= 16384 AND l.lanname NOT IN ('c', 'internal')),
called AS (
    SELECT d.objid AS expression, coalesce(o.oprcode::oid, d.refobjid) AS oid
      FROM pg_depend d
      LEFT JOIN pg_operator o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
     WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass)),
reading AS (
    SELECT DISTINCT c.expression FROM called c JOIN functions f ON f.oid = c.oid
     WHERE f.lanname NOT IN ('sql', 'plpgsql')
        OR f.body ~* '\m(from|join|table|execute|lo_get|loread|\w*_to_xml\w*)\M'
        OR EXISTS (SELECT FROM functions other WHERE other.oid <> f.oid AND position(other.proname IN f.body) > 0))
SELECT n.nspname, c.relname, c.oid::bigint, g.attnum, g.attname, a.attnum, a.attname
  FROM reading r JOIN pg_attrdef e ON e.oid = r.expression
  JOIN pg_class c ON c.oid = e.adrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute g ON g.attrelid = e.adrelid AND g.attnum = e.adnum
  LEFT JOIN LATERAL (
       SELECT a.attnum, a.attname FROM pg_depend d
         JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
        WHERE d.classid = 'pg_attrdef'::regclass AND d.objid = e.oid AND d.refclassid = 'pg_class'::regclass
          AND d.refobjid = g.attrelid AND a.attgenerated = '' AND a.attidentity <> 'a'
        ORDER BY 1 LIMIT 1) AS a ON true
 WHERE g.attgenerated = 's' AND c.relkind = 'r'
 ORDER BY 1, 2, 4
"""
# Read under the search_path under which the expression is evaluated, so that its names have the same meaning. Under it,
# other roles' functions and operators may come before PostgreSQL's. A cast to the column's type is not printed if it is
# implicit.
PARTS_QUERY = """
SELECT pg_catalog.textsend(e.adrelid::pg_catalog.regclass::pg_catalog.text),
       pg_catalog.textsend(pg_catalog.quote_ident(g.attname)),
       pg_catalog.textsend(pg_catalog.format('(%%s)::%%s', pg_catalog.pg_get_expr(e.adbin, e.adrelid),
                                             pg_catalog.format_type(g.atttypid, g.atttypmod))),
       coalesce(pg_catalog.textsend(pg_catalog.quote_ident(a.attname)), '')
  FROM pg_catalog.pg_attrdef e
  JOIN pg_catalog.pg_attribute g
    ON g.attrelid OPERATOR(pg_catalog.=) e.adrelid AND g.attnum OPERATOR(pg_catalog.=) e.adnum
  LEFT JOIN pg_catalog.pg_attribute a
    ON a.attrelid OPERATOR(pg_catalog.=) e.adrelid AND a.attnum OPERATOR(pg_catalog.=) %s::pg_catalog.int2
 WHERE e.adrelid OPERATOR(pg_catalog.=) %s::pg_catalog.oid AND e.adnum OPERATOR(pg_catalog.=) %s::pg_catalog.int2
"""
# Values are compared as they are stored, because a type may have no equality. A value that differs with each evaluation
# can't be restored, so it is left alone.
DIFFERS = (
    b"pg_catalog.record_image_ne(ROW(%(column)b), ROW(%(value)b))"
    b" AND NOT pg_catalog.record_image_ne(ROW(%(value)b), ROW(%(value)b))"
)
COUNT = b"SELECT pg_catalog.count(*) FROM ONLY %(table)b WHERE " + DIFFERS
# PostgreSQL computes a column again only if the UPDATE sets a column that the expression reads.
RECOMPUTE = b"UPDATE ONLY %(table)b SET %(read)b = %(read)b WHERE " + DIFFERS
SET_PATH = "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), true)"
# An expression may read values that another one computes, also of its own table. Each round completes at least one
# level of them.
ROUNDS_MAX = 100


class _GeneratedColumn(Struct, frozen=True):
    """A generated column of a group's table (its oid); `read` is the column that an UPDATE sets to compute it again.

    Columns have a number and a name.
    """

    group: Group
    table: int
    number: int
    name: str
    read: int | None
    read_name: str

    @property
    def label(self) -> str:
        return f"generated column {self.name} of {self.group.name}"


def _again(column: _GeneratedColumn) -> str:
    """Return the end of a line that says how to compute the column again, if an UPDATE can."""
    if column.read is None:
        return ""
    name = quote_identifier(column.read_name)
    return f"; to compute them again: UPDATE ONLY {qualify(column.group)} SET {name} = {name}"


class Recomputed(Struct):
    """Lines about columns that were computed again, and about columns that may have wrong values."""

    changed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def recompute_generated(target: LoadTarget, watch: Watch) -> Recomputed:
    """Compute the generated columns again that may have been computed before all rows were loaded.

    In tables that others use, they are only compared. Raises NodeUnreachableError, NodeDisruptedError and LoadError.
    """
    node = target.node
    with raising_unreachable(node), connect(node) as connection, ending(watch, connection):
        columns = _find_columns(connection, target)
        if not columns:
            return Recomputed()
        set_settings(connection, target.settings)
        # Expressions may have bytes that the database's encoding does not define.
        connection.execute(f"SET client_encoding = '{RAW}'".encode())
        comparison = _Recomputation(connection, target)
        # In one transaction, an expression that depends on the time has one value.
        with connection.transaction():
            if target.is_in_use:
                # A table's schema may be renamed, and a view have the name then.
                refuse_views(connection)
            may_set = [column for column in columns if column.read is not None and not target.is_in_use]
            comparison.recompute(may_set)
            comparison.compare([column for column in columns if column not in may_set], may_set)
        return comparison.found


def _find_columns(connection: psycopg.Connection[Any], target: LoadTarget) -> list[_GeneratedColumn]:
    if not (rows := connection.execute(COLUMNS_QUERY.encode()).fetchall()):
        return []
    groups = {(group.schema, group.table): group for group in target.groups.values()}
    return [
        _GeneratedColumn(groups[schema, table], *column) for schema, table, *column in rows if (schema, table) in groups
    ]


class _Recomputation:
    """Compares columns with their expressions in one session; `found` has the results."""

    def __init__(self, connection: psycopg.Connection[Any], target: LoadTarget) -> None:
        self.found = Recomputed()
        self._connection, self._target, self._failed = connection, target, set[_GeneratedColumn]()

    def recompute(self, columns: Sequence[_GeneratedColumn]) -> None:
        """Compute the columns again until no value changes."""
        changed, node = Counter[_GeneratedColumn](), self._target.node.id
        counts: dict[_GeneratedColumn, int] = {}
        for _ in range(ROUNDS_MAX):
            counts = {column: self._count(column, RECOMPUTE) for column in columns}
            changed.update(counts)
            if not any(counts.values()):
                break
        self.found.changed += [
            f"node {node}: {column.label}: {count} values were computed again after all rows were loaded, because its"
            " expression calls a function that reads rows"
            for column, count in changed.items()
            if count
        ]
        self.found.wrong += [
            f"node {node}: {column.label}: its expression has another value each time that it is computed again"
            for column, count in counts.items()
            if count
        ]

    def compare(self, columns: Sequence[_GeneratedColumn], others: Iterable[_GeneratedColumn]) -> None:
        """Report the columns with values that their expressions do not return now; the `others` may have read them."""
        node = self._target.node.id
        counts = {column: self._count(column, COUNT) for column in columns}
        self.found.wrong += [
            f"node {node}: {column.label}: {count} values differ from what its expression returns now, because it"
            f" calls a function that reads rows{_again(column)}"
            for column, count in counts.items()
            if count
        ]
        if any(counts.values()):
            self.found.wrong += [
                f"node {node}: {column.label} may have been computed from such values{_again(column)}"
                for column in (*others, *columns)
                if not counts.get(column) and column not in self._failed
            ]

    def _count(self, column: _GeneratedColumn, statement: bytes) -> int:
        """Run the statement for a column and return the number of rows; 0 if it fails, also earlier."""
        number = column.group.number
        paths = [self._target.search_paths.get(number, ""), self._target.wider_paths.get(number, "")]
        for path in dict.fromkeys(paths) if column not in self._failed else ():
            try:
                with self._connection.transaction():
                    return self._run(column, statement, path)
            except psycopg.Error as error:
                if self._connection.broken or remedy_of(error):
                    raise load_error(self._target.node, error) from error
                if path == paths[0] and paths[1] and NOT_FOUND.fullmatch(error.diag.sqlstate or ""):
                    continue
                self._failed.add(column)
                self.found.wrong.append(
                    f"node {self._target.node.id}: {column.label} may have values that were computed before all rows"
                    f" were loaded: its expression can't be evaluated: {shorten_message(error)}"
                )
        return 0

    def _run(self, column: _GeneratedColumn, statement: bytes, path: str) -> int:
        self._connection.execute(SET_PATH, (path.encode(),))
        (row,) = self._connection.execute(PARTS_QUERY, (column.read, column.table, column.number)).fetchall()
        table, name, value, read = map(bytes, row)
        parts = {b"table": table, b"column": name, b"value": value, b"read": read}
        done = self._connection.execute(statement % parts)
        return int(done.fetchall()[0][0]) if statement is COUNT else done.rowcount
