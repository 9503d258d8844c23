"""A fleet of a module's own whose databases a test makes read-only, and what it sets and sees on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from fleet.config import Fleet, Node
from fleet.nodes.connections import connect
from fleet.tables.publications import ensure_publications
from tests.snapshot_runs import described

FLEET_ID = "ab12cd34"
WRITE = "UPDATE public.account SET balance = balance WHERE id = 1"
# All that is set in or for the database, the fleet's own comment included.
STATE = """
SELECT coalesce(d.datname, ''), coalesce(r.rolname, ''), setting FROM pg_db_role_setting g
  CROSS JOIN unnest(g.setconfig) AS setting LEFT JOIN pg_database d ON d.oid = g.setdatabase
  LEFT JOIN pg_roles r ON r.oid = g.setrole
UNION ALL SELECT pubname, 'comment', coalesce(obj_description(oid, 'pg_publication'), '') FROM pg_publication
ORDER BY 1, 2, 3
"""


@contextmanager
def running_shards(directory: Path, shards: int) -> Iterator[EmbeddedFleet]:
    """Servers for one module alone: sessions are ended on them."""
    try:
        yield start_fleet(directory, shards=shards, backups=0)
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture
def fleet(servers: EmbeddedFleet, tmp_path: Path) -> Fleet:
    """The servers as a fleet whose publications are there, as `init` leaves them."""
    found = described(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for one in found.primaries:
        with connect(one) as connection:
            ensure_publications(connection, FLEET_ID, [])
    return found


@pytest.fixture
def node(fleet: Fleet) -> Node:
    return fleet.primaries[0]


def state(node: Node) -> list[Any]:
    with connect(node) as connection:
        return connection.execute(STATE).fetchall()


def execute(node: Node, *statements: str) -> None:
    with connect(node) as connection:
        for statement in statements:
            connection.execute(statement.encode())


@contextmanager
def role(node: Node, name: str, *grants: str) -> Iterator[str]:
    """A role of the node that may do what `grants` say; its connection string."""
    execute(node, f"CREATE ROLE {name} LOGIN", f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}", *grants)
    try:
        yield psycopg.conninfo.make_conninfo(node.dsn, user=name)
    finally:
        execute(node, f"REASSIGN OWNED BY {name} TO postgres", f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def may_write(dsn: str, **options: Any) -> bool:
    """Whether a session that begins now may write."""
    with psycopg.connect(dsn, application_name="tests", **options) as connection:
        try:
            connection.execute(WRITE)
        except psycopg.errors.ReadOnlySqlTransaction:
            return False
        return True
