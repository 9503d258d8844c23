"""Check that nodes have enough free connections for a command, and limit how many of them its tasks use at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct

from cutline.fleet.config import CONNECTIONS_MIN, Node
from cutline.fleet.messages import list_some
from cutline.nodes.connections import raise_limit, raising_unreachable
from cutline.nodes.encodings import database_of
from cutline.nodes.sessions import in_parallel
from cutline.storage.errors import RefusedError

# The most sessions that a command needs in addition to its tasks' sessions. A create needs its own session, the
# watch's, pg_dump's, and a session that watches for locks that block pg_dump. A restore needs its own, the watch's,
# and a session that queries its progress. Its DDL runs in no more sessions than tasks may open, which all targets on a
# server share; while tasks run, it takes one of their sessions. One session is spare, for occasional queries.
COMMAND_SESSIONS = CONNECTIONS_MIN - 1
# How many sessions a command still has to open after the check, plus one for a task.
STILL_NEEDED = 3
SHOWN_MAX = 10
# Some roles can't see the backend_type of other roles' sessions. Reserved connections are not counted as free, even for
# superusers.
FREE_QUERY = """
SELECT current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
       - coalesce(current_setting('reserved_connections', true)::int, 0) - a.used,
       CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit - a.ours END,
       CASE WHEN d.datconnlimit >= 0 AND NOT r.rolsuper THEN d.datconnlimit - a.here END,
       extract(epoch FROM pg_postmaster_start_time())::text || ' ' || current_setting('port')
  FROM (SELECT count(*) AS used, count(*) FILTER (WHERE usename = current_user) AS ours,
               count(*) FILTER (WHERE datname = current_database()) AS here
          FROM pg_stat_activity
         WHERE usesysid IS NOT NULL AND coalesce(backend_type, 'client backend') = 'client backend') AS a,
       pg_roles AS r, pg_database AS d
 WHERE r.rolname = current_user AND d.datname = current_database()
"""


class TooFewConnectionsError(RefusedError):
    """Nodes have fewer free connections than a command needs."""


class _Free(NamedTuple):
    """How many connections a server, a role and a database have free (None: unlimited), and the server's identity."""

    of_server: int
    of_role: int | None
    of_database: int | None
    server: str

    @property
    def connections(self) -> int:
        """How many connections are free."""
        return min(free for free in (self.of_server, self.of_role, self.of_database) if free is not None)

    def remedy(self, node: Node, connection: psycopg.Connection[Any]) -> str:
        """Return what raises the limit that leaves the fewest connections."""
        if self.of_role == self.connections:
            return raise_limit("role", connection.info.user)
        if self.of_database == self.connections:
            return raise_limit("database", database_of(connection))
        return f"raise max_connections of node {node.id}"


class TooFew(Struct, frozen=True):
    """A node with fewer `free` connections than are `needed`; `remedy` raises the limit."""

    node: Node
    free: int
    needed: int
    remedy: str

    @property
    def text(self) -> str:
        """How many connections are free and needed, after the node's name."""
        return f"has {max(self.free, 0)} of the {self.needed} needed"


def find_too_few(nodes: Mapping[Node, psycopg.Connection[Any]]) -> list[TooFew]:
    """Return the nodes with too few free connections for a command; raise NodeUnreachableError."""
    asked = _ask(nodes)
    sharing = Counter(free.server for free in asked.values())
    found = (
        TooFew(node, free.connections, STILL_NEEDED * sharing[free.server], free.remedy(node, nodes[node]))
        for node, free in asked.items()
    )
    return [one for one in found if one.free < one.needed]


def refuse_too_few(lacking: Sequence[TooFew]) -> None:
    """Raise TooFewConnectionsError if there are such nodes."""
    if lacking:
        lines = [f"node {one.node.id} {one.text}" for one in lacking]
        raise TooFewConnectionsError(
            f"too few connections are free for the role of the dsn: {list_some(lines, SHOWN_MAX)}",
            hint=[
                "end other clients' sessions, or raise the limit, then repeat the command:",
                *list(dict.fromkeys(one.remedy for one in lacking))[:SHOWN_MAX],
            ],
            details={
                "nodes": [one.node.id for one in lacking],
                "free": {one.node.id: one.free for one in lacking},
            },
        )


def check_free_connections(nodes: Mapping[Node, psycopg.Connection[Any]]) -> None:
    """Raise TooFewConnectionsError if a node has too few free connections for a command, or NodeUnreachableError."""
    refuse_too_few(find_too_few(nodes))


def task_sessions(nodes: Mapping[Node, psycopg.Connection[Any]]) -> dict[str, int]:
    """Return how many sessions tasks may open at a time, at least 1, keyed by node.

    The limit is `connections_max` minus the command's own sessions, if so many connections are free. Without that
    setting, it is half of the free connections. Nodes that are databases on the same server share what is free equally.
    Raises NodeUnreachableError.
    """
    asked = _ask(nodes)
    sharing = Counter(free.server for free in asked.values())
    sessions: dict[str, int] = {}
    for node, free in asked.items():
        tasks = free.connections // 2 // sharing[free.server]
        if node.connections_max is not None:
            tasks = min(node.connections_max - COMMAND_SESSIONS, free.connections // sharing[free.server])
        sessions[node.id] = max(tasks, 1)
    return sessions


def _ask(nodes: Mapping[Node, psycopg.Connection[Any]]) -> dict[Node, _Free]:
    def ask(node: Node) -> _Free:
        with raising_unreachable(node):
            row = nodes[node].execute(FREE_QUERY).fetchone()
        return _Free(*row) if row else _Free(0, None, None, "")

    return dict(zip(nodes, in_parallel(ask, nodes), strict=True))
