"""The ledger of a database that is being loaded: how many rows of each group each task has loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
from psycopg import sql

from fleet.tables.groups import Group, qualify
from storage.errors import RefusedError

LEDGER_SCHEMA = "cutline_restore"
LEDGER = f"{LEDGER_SCHEMA}.ledger"
# A query locks every table that it counts.
COUNTED_AT_ONCE = 100


class LoadError(RefusedError):
    """A target node refused rows, or holds another number of rows than were loaded; the restore drops its database."""


def create_ledger(connection: psycopg.Connection[Any]) -> None:
    """Create the ledger in the database."""
    connection.execute(f"CREATE SCHEMA {LEDGER_SCHEMA}")
    connection.execute(
        f"CREATE TABLE {LEDGER} (task text, groupno int, rows bigint NOT NULL, PRIMARY KEY (task, groupno))"
    )


def check_counts(
    connection: psycopg.Connection[Any], node: str, groups: Sequence[Group], roots: Mapping[int, str]
) -> int:
    """Count the rows of all tables and return their sum; raise LoadError if the ledger has another number.

    Groups that are loaded through a root (`roots`, by group number) are counted together, in the root: their rows may
    be in any of its partitions.
    """
    loaded = dict(connection.execute(f"SELECT groupno, sum(rows)::bigint FROM {LEDGER} GROUP BY groupno").fetchall())
    expected: dict[str, int] = {}
    names: dict[str, str] = {}
    for group in groups:
        root = roots.get(group.number)
        table = root or f"ONLY {qualify(group)}"
        names[table] = root or group.name
        expected[table] = expected.get(table, 0) + loaded.get(group.number, 0)
    tables = list(expected)
    for start in range(0, len(tables), COUNTED_AT_ONCE):
        some = tables[start : start + COUNTED_AT_ONCE]
        counts = (f"SELECT {number}, count(*) FROM {table}" for number, table in enumerate(some))
        for number, found in connection.execute(sql.SQL(" UNION ALL ".join(counts))).fetchall():
            if found != expected[some[number]]:
                name = names[some[number]]
                raise LoadError(
                    f"node {node}: table {name} has {found} rows, but {expected[some[number]]} were loaded",
                    hint="see whether something else writes to the restored database, then repeat the command",
                    details={"node": node, "group": name},
                )
    return sum(expected.values())
