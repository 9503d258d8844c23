"""Report databases that were made with another version of their collation than the server's library has now.

Indexes over text may then be in another order than the server expects. Copies do not depend on it; queries do. The
server says so to every session; Cutline once, at `init` and with a full snapshot.

A standby has its primary's indexes, and gets them anew when the primary's are: there, only another library than the
primary's is to be mended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.nodes.problems import quote
from cutline.nodes.sessions import Sessions, in_parallel

# A collation has no versions in some libraries (musl), and some have none in any (C).
NONE = "none"
VERSIONS_QUERY = f"""
SELECT datname, coalesce(recorded, '{NONE}'), coalesce(actual, '{NONE}')
  FROM (SELECT datname, datcollversion AS recorded, pg_database_collation_actual_version(oid) AS actual
          FROM pg_database WHERE datname = current_database()) AS versions
 WHERE recorded IS NOT NULL OR actual IS NOT NULL
"""


class CollationVersions(NamedTuple):
    """The version of a database's collation: as it was when the database was made, and that of its server's library."""

    database: str
    recorded: str
    actual: str


def note_collation_versions(sessions: Sessions, progress: Progress) -> None:
    """Note the nodes whose library has another collation version than their database, and what mends it."""
    answers = in_parallel(lambda node: _read(sessions.connections[node.id]), sessions.nodes)
    versions = {node.id: answer for node, answer in zip(sessions.nodes, answers, strict=True) if answer is not None}
    for node in sessions.nodes:
        if text := difference_text(node, versions):
            progress.note(text)


def _read(connection: psycopg.Connection[Any]) -> CollationVersions | None:
    row = connection.execute(VERSIONS_QUERY).fetchone()
    return CollationVersions(*row) if row else None


def difference_text(node: Node, versions: Mapping[str, CollationVersions]) -> str:
    """The repair that the node needs, "" if none; `versions` are by node, for nodes whose collation has any."""
    own, primary = versions.get(node.id), versions.get(node.shard)
    if own is None or primary is None:
        return ""
    if node.backup_of is not None:
        if own.actual == primary.actual:
            return ""
        return (
            f"node {node.id}: its library has collation version {own.actual}, that of its primary {primary.actual}:"
            " queries over text may find other rows than there; let this standby have the library of its primary"
        )
    if own.recorded == own.actual:
        return ""
    name = quote(own.database)
    refresh = f"ALTER DATABASE {name} REFRESH COLLATION VERSION;"
    if NONE in (own.recorded, own.actual):
        # The server refuses the other statement (dbcommands.c, AlterDatabaseRefreshColl).
        refresh = (
            "as a superuser: UPDATE pg_database SET datcollversion = pg_database_collation_actual_version(oid)"
            " WHERE datname = current_database();"
        )
    return (
        f"node {node.id}: database {own.database} was made with collation version {own.recorded}, its server's"
        f" library has {own.actual}: indexes over text may be in another order; in that database: REINDEX DATABASE"
        f" {name}; {refresh}"
    )
