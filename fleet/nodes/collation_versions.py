"""Say where a database was made with another version of its collation than the server's library has now.

Indexes over text may then be in another order than the one that the server looks for. What is copied does not depend on
it; queries do. The server says so to every session; Cutline once, at `init` and with a full snapshot.
"""

from __future__ import annotations

from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.privileges import quote
from fleet.nodes.sessions import Sessions, in_parallel
from fleet.progress import Progress

# A collation that has no versions has none recorded, either.
VERSIONS_QUERY = """
SELECT datname, datcollversion, coalesce(pg_database_collation_actual_version(oid), 'none') FROM pg_database
 WHERE datname = current_database() AND datcollversion <> coalesce(pg_database_collation_actual_version(oid), 'none')
"""


def note_collation_versions(sessions: Sessions, progress: Progress) -> None:
    """Note the nodes whose database has another collation version than their library, and what mends it."""
    for text in in_parallel(lambda node: _difference(node, sessions.connections[node.id]), sessions.nodes):
        if text:
            progress.note(text)


def _difference(node: Node, connection: psycopg.Connection[Any]) -> str:
    row = connection.execute(VERSIONS_QUERY).fetchone()
    if row is None:
        return ""
    database, recorded, actual = row
    what = (
        f"node {node.id}: database {database} was made with collation version {recorded}, its server's library has"
        f" {actual}: indexes over text may be in another order"
    )
    if node.backup_of is not None:
        return f"{what}; let this standby have the library of its primary"
    name = quote(database)
    return f"{what}; in that database: REINDEX DATABASE {name}; ALTER DATABASE {name} REFRESH COLLATION VERSION;"
