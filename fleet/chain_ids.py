"""The ids by which a chain knows the nodes of a fleet, after fleet.toml has given them others.

A chain keeps the ids that its nodes had when their copies began: object keys, segments and commits contain them. If
fleet.toml renames a node, the commits record its new id, and a command on the chain translates the fleet first. A node
keeps its id of fleet.toml as `listed_as`, for what refers to the file: locks, operations and messages.

A new id is never one that another node of the chain has or had. So an id means at most one node, whichever of the two
it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cutline.fleet.config import Fleet, Node
from cutline.storage.errors import SnapshotError


def with_chain_ids(fleet: Fleet, renamed: Mapping[str, str]) -> Fleet:
    """Return the fleet with the ids of a chain; `renamed` has the ids in fleet.toml, by the chain's ids.

    A node that the file lists under the chain's id keeps it.
    """
    listed = {node.id for node in (*fleet.nodes, *fleet.retired_nodes)} | {*fleet.retired}
    ids = {new: known for known, new in renamed.items() if known not in listed and new in listed}
    if not ids:
        return fleet
    return replace(
        fleet,
        nodes=tuple(_renamed(node, ids) for node in fleet.nodes),
        retired=tuple(ids.get(shard, shard) for shard in fleet.retired),
        retired_nodes=tuple(_renamed(node, ids) for node in fleet.retired_nodes),
    )


def _renamed(node: Node, ids: Mapping[str, str]) -> Node:
    backup_of = ids.get(node.backup_of, node.backup_of) if node.backup_of else None
    if node.id not in ids:
        return replace(node, backup_of=backup_of)
    known_as = (*node.known_as, node.id) if backup_of is None else node.known_as
    return replace(node, id=ids[node.id], backup_of=backup_of, known_as=known_as, listed_as=node.id)


def renamed_nodes(fleet: Fleet) -> dict[str, str]:
    """Return the ids in fleet.toml of the nodes that a chain knows by others, by the chain's ids."""
    return {node.id: node.listed_as for node in fleet.nodes if node.listed_as}


def in_listed_ids(fleet: Fleet) -> dict[str, Node]:
    """Return the nodes by their ids in fleet.toml."""
    return {node.listed_id: node for node in fleet.nodes}


@contextmanager
def naming_listed_ids(fleet: Fleet) -> Iterator[None]:
    """Add to the hint of an error about a renamed node the id that it has in fleet.toml."""
    try:
        yield
    except SnapshotError as error:
        for known, listed in renamed_nodes(fleet).items():
            if error.details.get("node") == known:
                error.hint += f"\nin this chain, {listed} has the id {known}, as in fleet.toml when it was copied"
        raise
