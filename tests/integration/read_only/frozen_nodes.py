"""Settings of a database that tests make read-only, and whether it accepts writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.nodes.connections import connect
from cutline.nodes.other_sessions import SessionFilter, other_sessions
from tests.faults.awaited import await_none

FLEET_ID = "ab12cd34"
WRITE = "UPDATE public.account SET balance = balance WHERE id = 1"
# Every setting in or for the database, including the comment on the fleet's own publication.
STATE = """
SELECT coalesce(d.datname, ''), coalesce(r.rolname, ''), setting FROM pg_db_role_setting g
  CROSS JOIN unnest(g.setconfig) AS setting LEFT JOIN pg_database d ON d.oid = g.setdatabase
  LEFT JOIN pg_roles r ON r.oid = g.setrole
UNION ALL SELECT pubname, 'comment', coalesce(obj_description(oid, 'pg_publication'), '') FROM pg_publication
ORDER BY 1, 2, 3
"""


def read_settings(node: Node) -> list[Any]:
    with connect(node) as connection:
        return connection.execute(STATE).fetchall()


def execute(node: Node, *statements: str) -> None:
    with connect(node) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def await_closed(node: Node, connection: psycopg.Connection[Any], *kept: psycopg.Connection[Any]) -> None:
    """Wait until the database has no sessions but these: the process of a closed session ends a moment later.

    The first one is asked, because a session of our own would also be open for a moment after this function.
    """
    pids = {one.info.backend_pid for one in kept}
    await_none(lambda: [one for one in other_sessions(node.id, connection, SessionFilter()) if one.pid not in pids])


@contextmanager
def role(node: Node, name: str, *grants: str) -> Iterator[str]:
    """Create a role with these grants on the node; yield its connection string."""
    execute(node, f"CREATE ROLE {name} LOGIN", f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}", *grants)
    try:
        yield psycopg.conninfo.make_conninfo(node.dsn, user=name)
    finally:
        execute(node, f"REASSIGN OWNED BY {name} TO postgres", f"DROP OWNED BY {name} CASCADE", f"DROP ROLE {name}")


def may_write(dsn: str, **options: Any) -> bool:
    """Return whether a session that begins now may write."""
    with psycopg.connect(dsn, application_name="tests", **options) as connection:
        try:
            connection.execute(WRITE)
        except psycopg.errors.ReadOnlySqlTransaction:
            return False
        return True
