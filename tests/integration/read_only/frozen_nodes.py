"""What is set in a database that tests make read-only, and what is seen of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import connect

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
