"""The databases that a case runs in: created before it, dropped after it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import psycopg
from psycopg import sql

from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from tests.fuzz.names import ROLES
from tests.fuzz.servers import ORIGIN
from tests.fuzz.state import judge_dsn

SOURCE, TARGET = "fuzz", "fuzz_back"
REPLAY_SECONDS_MAX = 60.0
DROP_SLOTS_QUERY = """
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
 WHERE slot_name LIKE 'cutline%%' AND database = %s
"""


def in_database(fleet: Fleet, name: str) -> Fleet:
    return replace(fleet, nodes=tuple(with_database(node, name) for node in fleet.nodes))


def create_roles(dsn: str) -> None:
    """Create the roles that own objects of cases, and the replication origin that their changes may have."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for role in ROLES:
            connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(role)))
        connection.execute("SELECT pg_replication_origin_create(%s)", (ORIGIN,))


def create_database(dsn: str, options: Mapping[str, str]) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        encoding = options.get("encoding", "UTF8")
        connection.execute(f"CREATE DATABASE {SOURCE} TEMPLATE template0 ENCODING '{encoding}'".encode())
        for name, value in options.items():
            if name.startswith("set "):
                setting = name.removeprefix("set ")
                connection.execute(f"ALTER DATABASE {SOURCE} SET {setting} = {value}".encode())


def await_database(dsn: str) -> None:
    """Wait for the database: a standby has it a moment later."""
    deadline = time.monotonic() + REPLAY_SECONDS_MAX
    while True:
        try:
            psycopg.connect(dsn).close()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def drop_slots(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(DROP_SLOTS_QUERY, (SOURCE,))


def drop_databases(dsn: str, source: str | None) -> None:
    """Drop the restored databases, and the `source` (if not None) with its prepared transactions."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        found = [row[0] for row in connection.execute("SELECT datname FROM pg_database WHERE datname LIKE 'fuzz%'")]
        for name in found:
            if name == SOURCE and source is None:
                continue
            if name == SOURCE:
                with psycopg.connect(judge_dsn(str(source)), autocommit=True) as inside:
                    query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                    for (gid,) in inside.execute(query).fetchall():
                        inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(gid))
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))
