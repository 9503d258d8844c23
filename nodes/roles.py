"""Which server of each shard is the primary now.

fleet.toml lists a shard's servers; a node is a role in its shard. After a failover, a server of a standby has the role
of the primary, and fleet.toml need not be edited. Every command finds the roles by the rule of `find_promoted`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import psycopg
from msgspec import Struct

from cutline.fleet.config import Fleet, Node
from cutline.nodes.watch import NodeAnswers, NodesQuery

Answer = TypeVar("Answer")
ASKING_SECONDS_MAX = 5.0
SERVER_QUERY = "SELECT pg_is_in_recovery(), (pg_control_system()).system_identifier::text"


class ServerState(Struct, frozen=True):
    """Whether a server is a standby, and the system identifier that it shares with the other servers of its shard."""

    is_in_recovery: bool
    system_identifier: str


def read_server(connection: psycopg.Connection[Any]) -> ServerState:
    """Read the state of the server."""
    return ServerState(*(connection.execute(SERVER_QUERY).fetchone() or (False, "")))


def find_promoted(
    fleet: Fleet,
    servers: Mapping[str, ServerState | None],
    identifiers: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return the standbys of fleet.toml whose servers have taken their primaries' places, by primary.

    `servers` are the states by the nodes of fleet.toml, None for a server that can't be reached; shards whose primary
    is missing there are ignored. A primary is replaced if it can't be reached or is a standby, and exactly one of its
    standbys accepts writes. `identifiers` are the system identifiers of primaries, as far as they are known: a server
    of another cluster takes no place.
    """
    promoted: dict[str, str] = {}
    for primary in fleet.primaries:
        own = servers.get(primary.id)
        if primary.id not in servers or (own is not None and not own.is_in_recovery):
            continue
        writable = [
            (node.id, state)
            for node in fleet.nodes
            if node.backup_of == primary.id and (state := servers.get(node.id)) and not state.is_in_recovery
        ]
        expected = own.system_identifier if own else identifiers.get(primary.id)
        if len(writable) == 1 and expected in (None, writable[0][1].system_identifier):
            promoted[primary.id] = writable[0][0]
    return promoted


def servers_by_role(promoted: Mapping[str, str]) -> dict[str, str]:
    """Return the server of each node that has another one than in fleet.toml: `promoted` and the other way round."""
    return {**promoted, **{standby: primary for primary, standby in promoted.items()}}


def with_exchanged(fleet: Fleet, promoted: Mapping[str, str]) -> Fleet:
    """Return the fleet with each promoted standby's server in its primary's place, and the other way round."""
    servers = servers_by_role(promoted)
    nodes = {node.id: node for node in fleet.nodes}
    return replace(
        fleet, nodes=tuple(_at(node, nodes[servers[node.id]]) if node.id in servers else node for node in fleet.nodes)
    )


def _at(node: Node, other: Node) -> Node:
    """Return the node with the server of the other node."""
    return replace(
        node,
        dsn=other.dsn,
        retained_wal_bytes_max=other.retained_wal_bytes_max,
        connections_max=other.connections_max,
        server=None,
    )


class CurrentRoles(Struct, Generic[Answer], frozen=True):
    """The fleet with promoted standbys in their primaries' places, these standbys by primary, and the answers by node.

    Each answer is that of the server that has the node's role now.
    """

    fleet: Fleet
    promoted: Mapping[str, str]
    answers: NodeAnswers[Answer]


def in_current_roles(
    fleet: Fleet, asked: NodeAnswers[Answer], server_of: Callable[[Answer], ServerState]
) -> CurrentRoles[Answer]:
    """Find the roles from the answers of all servers in fleet.toml; `server_of` returns the state in an answer."""
    promoted = find_promoted(
        fleet, {node.id: server_of(asked.found[node.id]) if node.id in asked.found else None for node in fleet.nodes}
    )
    servers = servers_by_role(promoted)
    by_role = {node.id: servers.get(node.id, node.id) for node in fleet.nodes}
    answers = NodeAnswers(
        {node: asked.found[server] for node, server in by_role.items() if server in asked.found},
        {node: asked.problems[server] for node, server in by_role.items() if server in asked.problems},
    )
    return CurrentRoles(with_exchanged(fleet, promoted), promoted, answers)


def find_roles(fleet: Fleet) -> dict[str, str]:
    """Ask all servers, within ASKING_SECONDS_MAX, and return the promoted standbys as find_promoted does."""
    found = NodesQuery(fleet.nodes, lambda _, connection: read_server(connection), ASKING_SECONDS_MAX).answers().found
    return find_promoted(fleet, {node.id: found.get(node.id) for node in fleet.nodes})
