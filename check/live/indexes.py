"""Check the B-tree indexes of running databases with the extension amcheck, where it is installed.

`bt_index_check` reads an index and then its table, with locks that block no reads or writes, also on a standby
(PostgreSQL manual, "amcheck"). It finds entries in the wrong order, which a new version of a collation causes, and rows
that an index lacks. It runs as the table's owner, so that an index's functions gain no power.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import psycopg
from msgspec import Struct

from cutline.check.live.report import INDEX, UNREADABLE, LiveConflict, LiveReport
from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.relation_locks import LOCK_SECONDS_MAX
from cutline.nodes.server_errors import shorten_message

# The schema of the function, and whether our role may call it.
FUNCTION_QUERY = """
SELECT n.nspname, has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE')
  FROM pg_extension e JOIN pg_depend d ON d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
  JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND p.oid = d.objid
  JOIN pg_namespace n ON n.oid = p.pronamespace
 WHERE e.extname = 'amcheck' AND d.deptype = 'e' AND p.proname = 'bt_index_check'
   AND p.proargtypes = '2205 16'::oidvector
"""
# The valid B-tree indexes of the tables and of their TOAST tables. A constraint's index may be checked like any other.
INDEXES_QUERY = """
SELECT i.indexrelid::bigint, r.oid::bigint, n.nspname, c.relname,
       c.relpages * current_setting('block_size')::bigint,
       pg_relation_filepath(i.indexrelid), pg_relation_filepath(r.oid)
  FROM pg_class r JOIN pg_index i ON i.indrelid IN (r.oid, r.reltoastrelid)
  JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_am a ON a.oid = c.relam
 WHERE r.oid = ANY (%s) AND a.amname = 'btree' AND i.indisvalid AND i.indisready AND i.indislive
 ORDER BY 5, 1
"""
CORRUPTED = ("XX001", "XX002")
# A query on a standby is cancelled if replay can't wait for it any longer.
CONFLICT = "40001"
TRIES = 3
# A file of a relation in a server's message; servers translate the text around it.
RELATION_FILE = re.compile(r"(?:base|global|pg_tblspc)/[\w./]*\w")
FORK_OR_SEGMENT = re.compile(r"(?:_(?:fsm|vm|init))?(?:\.\d+)?$")
NUMBER = re.compile(r"\b\d+\b")


class IndexOf(Struct, frozen=True):
    """A B-tree index of the table `table`, or of its TOAST table; `name` is quoted for SQL, `bare_name` is not.

    `file` and `table_file` are the paths of the index and of the table in the data directory.
    """

    oid: int
    table: int
    name: str
    bare_name: str
    size_bytes: int
    file: str
    table_file: str


class OtherDamage(Struct, frozen=True):
    """Damage of another relation than the index: `page` of the table itself, if it is known."""

    what: str
    page: int | None = None


def other_damage(index: IndexOf, text: str, *, is_unreadable: bool = False) -> OtherDamage | None:
    """Return the damage of another relation than the index that the server's message names; None if there is none.

    amcheck's own messages name the index, and a message about a page names a file. `is_unreadable`: it is known that
    pages of the table can't be read.
    """
    named = RELATION_FILE.search(text)
    if named is None:
        return (
            OtherDamage(f"its table can't be read: {text}") if is_unreadable and index.bare_name not in text else None
        )
    path = FORK_OR_SEGMENT.sub("", named[0])
    if path == index.file:
        return None
    number = NUMBER.search(text.replace(named[0], ""))
    if named[0] != index.table_file or number is None:
        return OtherDamage(f"{'its table' if path == index.table_file else f'file {named[0]}'} can't be read")
    return OtherDamage(f"page {number[0]} of its table can't be read", int(number[0]))


def check_indexes(
    node: Node,
    connection: psycopg.Connection[Any],
    tables: dict[int, str],
    report: LiveReport,
    progress: Progress,
    bytes_per_second: int | None = None,
) -> int:
    """Check the indexes of these tables (names by oid), one at a time; return how many were checked.

    Damaged indexes become conflicts, and indexes that could not be checked are noted as skipped. If a page of the table
    can't be read, the index could not be checked, and the page becomes a conflict, unless the comparison of rows has
    found it. Raises NodeUnreachableError.
    """
    with raising_unreachable(node):
        found = connection.execute(FUNCTION_QUERY).fetchone()
        if found is None or not found[1]:
            report.skip(f"indexes on {node.id}", _remedy(found, connection.info.user))
            return 0
        rows = connection.execute(INDEXES_QUERY, (list(tables),)).fetchall()
        indexes = [
            IndexOf(oid, table, f"{quote_identifier(schema)}.{quote_identifier(name)}", name, size, *files)
            for oid, table, schema, name, size, *files in rows
        ]
        checked = 0
        for index in indexes:
            began = time.monotonic()
            checked += _check(node, connection, str(found[0]), index, tables[index.table], report)
            progress.advance(1)
            if bytes_per_second:
                time.sleep(max(index.size_bytes / bytes_per_second - (time.monotonic() - began), 0))
    return checked


def _remedy(found: Sequence[Any] | None, role: str) -> str:
    if found is None:
        return "the extension amcheck is not installed: as a superuser on the primary: CREATE EXTENSION amcheck;"
    schema = quote_identifier(str(found[0]))
    return (
        "our role may not call amcheck: as a superuser on the primary: GRANT EXECUTE ON FUNCTION"
        f" {schema}.bt_index_check(regclass, boolean) TO {quote_identifier(role)};"
    )


def _check(
    node: Node, connection: psycopg.Connection[Any], schema: str, index: IndexOf, table: str, report: LiveReport
) -> bool:
    """Check an index; return whether the server could read it to a result."""
    query = f"SELECT {quote_identifier(schema)}.bt_index_check({index.oid}::regclass, true)".encode()
    problem = ""
    for _ in range(TRIES):
        try:
            with connection.transaction():
                connection.execute(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS_MAX * 1000)}".encode())
                connection.execute(query)
        except psycopg.Error as error:
            if connection.broken:
                raise
            problem, state = shorten_message(error), error.sqlstate or ""
            if state in CORRUPTED:
                is_known = any(
                    (one.kind, one.node, one.group) == (UNREADABLE, node.id, table) for one in report.conflicts
                )
                if (other := other_damage(index, problem, is_unreadable=is_known)) is not None:
                    report.skip(f"index {index.name} on {node.id}", f"could not be checked: {other.what}")
                    if not is_known:
                        pages = () if other.page is None else (other.page,)
                        report.conflicts.append(LiveConflict(UNREADABLE, problem, node.id, group=table, pages=pages))
                    return False
                detail = f"index {index.name}: {problem}"
                report.conflicts.append(LiveConflict(INDEX, detail, node.id, group=table, index=index.name))
                return True
            if state == CONFLICT:
                continue
            if isinstance(error, psycopg.errors.UndefinedObject | psycopg.errors.UndefinedTable):
                # It was dropped after it was listed.
                return False
        else:
            return True
        break
    report.skip(f"index {index.name} on {node.id}", problem)
    return False
