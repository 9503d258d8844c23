"""Report databases whose collation version has changed in the server's library since the database was created.

Indexes over text may then be in a different order than the server expects, so queries may return wrong results. Copies
do not depend on that order. The server warns every session; Cutline warns at `init` and with a full snapshot.

A standby replicates its primary's indexes, including a REINDEX. So the only thing that may need fixing on a standby is
a library that differs from its primary's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.progress import Progress
from cutline.nodes.problems import quote
from cutline.nodes.sessions import Sessions, in_parallel

# Some libraries (musl) have no collation versions, and some collations (C) have none in any library.
NONE = "none"
VERSIONS_QUERY = f"""
SELECT datname, coalesce(recorded, '{NONE}'), coalesce(actual, '{NONE}')
  FROM (SELECT datname, datcollversion AS recorded, pg_database_collation_actual_version(oid) AS actual
          FROM pg_database WHERE datname = current_database()) AS versions
 WHERE recorded IS NOT NULL OR actual IS NOT NULL
"""


class CollationVersions(NamedTuple):
    """A database's collation version: the one recorded at its creation, and the one in its server's library."""

    database: str
    recorded: str
    actual: str


def note_collation_versions(sessions: Sessions, progress: Progress) -> None:
    """Warn about each node whose library has a different collation version than its database, and name the remedy."""
    answers = in_parallel(lambda node: _read(sessions.connections[node.id]), sessions.nodes)
    versions = {node.id: answer for node, answer in zip(sessions.nodes, answers, strict=True) if answer is not None}
    for node in sessions.nodes:
        if text := difference_text(node, versions):
            progress.note(text)


def _read(connection: psycopg.Connection[Any]) -> CollationVersions | None:
    row = connection.execute(VERSIONS_QUERY).fetchone()
    return CollationVersions(*row) if row else None


def difference_text(node: Node, versions: Mapping[str, CollationVersions]) -> str:
    """Describe the difference and its repair, or return ""; `versions` omits nodes whose collation has no version."""
    own, primary = versions.get(node.id), versions.get(node.shard)
    if own is None or primary is None:
        return ""
    if node.backup_of is not None:
        if own.actual == primary.actual:
            return ""
        return (
            f"node {node.id}: its library provides collation version {own.actual}, but its primary's provides"
            f" {primary.actual}: queries on text may find different rows; install the primary's"
            " version of the library on this standby"
        )
    if own.recorded == own.actual:
        return ""
    name = quote(own.database)
    refresh = f"ALTER DATABASE {name} REFRESH COLLATION VERSION;"
    if NONE in (own.recorded, own.actual):
        # The server refuses REFRESH COLLATION VERSION (dbcommands.c, AlterDatabaseRefreshColl).
        refresh = (
            "as a superuser: UPDATE pg_database SET datcollversion = pg_database_collation_actual_version(oid)"
            " WHERE datname = current_database();"
        )
    return (
        f"node {node.id}: database {own.database} was created with collation version {own.recorded}, but its server's"
        f" library provides {own.actual}: indexes on text may be in the wrong order; in that database, run: REINDEX"
        f" DATABASE {name}; {refresh}"
    )
