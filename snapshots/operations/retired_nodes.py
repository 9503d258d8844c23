"""The nodes of retired shards that fleet.toml still lists: commands have no sessions on them, but drop slots there."""

from __future__ import annotations

from collections.abc import Mapping

import psycopg

from cutline.fleet.config import Node
from cutline.nodes.connections import connect
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.storage.errors import SnapshotError

IDENTIFIER_QUERY = "SELECT system_identifier::text FROM pg_control_system()"
CONNECT_SECONDS_MAX = 5


def with_retired(sessions: Sessions, known: Mapping[str, str]) -> list[Node]:
    """Return all nodes that fleet.toml lists, also those of retired shards, on which to drop a chain's slot.

    `known` are the system identifiers of the chain's nodes. A retired node counts only if its server is still the known
    one, and no server of the fleet: the dsn may lead to the server of another shard by now, and slots have the same
    name on all servers. A node that can't be reached counts, because the slot may be there.
    """
    fleet = sessions.fleet
    of_fleet = {identity.system_identifier for identity in sessions.identities.values()}
    retired = [node for node in fleet.retired_nodes if node.id in known and known[node.id] not in of_fleet]
    found = in_parallel(_identifier_of, retired)
    left = [node for node, identifier in zip(retired, found, strict=True) if identifier in (None, known[node.id])]
    return [*fleet.nodes, *left]


def _identifier_of(node: Node) -> str | None:
    """Return the system identifier of the node's server; None if it can't be reached."""
    try:
        with connect(node, connect_timeout=str(CONNECT_SECONDS_MAX)) as connection:
            row = connection.execute(IDENTIFIER_QUERY).fetchone()
    except (psycopg.Error, SnapshotError):
        return None
    return row[0] if row else None
