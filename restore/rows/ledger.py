"""The ledger of a database that is being loaded: how many rows of each group each task has loaded."""

from __future__ import annotations

import secrets
from contextlib import nullcontext
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.tables.groups import qualify
from cutline.restore.rows.load_target import LoadTarget
from cutline.snapshots.ddl.search_path import having_path, read_search_path
from cutline.storage.errors import RefusedError

TOKEN_BYTES = 16
# A query locks every table that it counts.
COUNTED_AT_ONCE = 100

# In hints of tasks; the driver says what helps (restore/loading.py).
READS_OTHERS = "a CHECK that reads other rows, which PostgreSQL does not support, may fail until these are there"


class LoadError(RefusedError):
    """A target node refused rows, or holds another number of rows than were loaded."""


class TablesInUseError(RefusedError):
    """Sessions of others use tables that a restore fills or empties so that it can't go on; it may be resumed."""


def create_ledger(connection: psycopg.Connection[Any], schema: str | None = None) -> str:
    """Create the ledger in the database, in the new schema of this name; return the table's qualified name.

    The snapshot may have a schema of any name, so without a name one is drawn.
    """
    schema = schema or f"cutline_{secrets.token_hex(TOKEN_BYTES)}"
    connection.execute(f"CREATE SCHEMA {schema}")
    connection.execute(
        f"CREATE TABLE {schema}.ledger (task text, groupno int, rows bigint NOT NULL, PRIMARY KEY (task, groupno))"
    )
    return f"{schema}.ledger"


def has_ledger(connection: psycopg.Connection[Any], ledger: str) -> bool:
    """Whether the database has this ledger: dropping it is the last step (restore/ddl/ddl.py)."""
    row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (ledger,)).fetchone()
    return row == (True,)


def check_counts(connection: psycopg.Connection[Any], target: LoadTarget) -> int:
    """Count the rows of all tables and return their sum; raise LoadError if the ledger has another number.

    Groups that are loaded through a root are counted together, in the root: their rows may be in any of its partitions.
    """
    query = f"SELECT groupno, sum(rows)::bigint FROM {target.ledger} GROUP BY groupno"
    loaded = dict(connection.execute(query.encode()).fetchall())
    expected: dict[str, int] = {}
    names: dict[str, str] = {}
    for group in target.groups.values():
        root = target.roots.get(group.number)
        table = root or f"ONLY {qualify(group)}"
        names[table] = root or group.name
        expected[table] = expected.get(table, 0) + loaded.get(group.number, 0)
    tables, path = list(expected), read_search_path(connection) if target.is_in_use else None
    for start in range(0, len(tables), COUNTED_AT_ONCE):
        some = tables[start : start + COUNTED_AT_ONCE]
        counts = (f"SELECT {number}, pg_catalog.count(*) FROM {table}" for number, table in enumerate(some))
        with having_path(connection, path) if target.is_in_use else nullcontext():
            counted = connection.execute(sql.SQL(" UNION ALL ".join(counts))).fetchall()
        for number, found in counted:
            if found != expected[some[number]]:
                name = names[some[number]]
                raise LoadError(
                    f"node {target.node.id}: table {name} has {found} rows, but {expected[some[number]]} were loaded",
                    hint="see whether something else writes to the restored database, then repeat the command",
                    details={"node": target.node.id, "group": name},
                )
    return sum(expected.values())
