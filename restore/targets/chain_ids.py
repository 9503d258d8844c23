"""Targets of a snapshot whose nodes have other ids in fleet.toml now: a target's file may list either id.

Everything of a restore, its records in the databases included, has the snapshot's ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet
from cutline.snapshots.records.proven_chains import read_renamed
from cutline.storage.store import ObjectStore


def in_ids_of(
    store: ObjectStore, name: str, target: Fleet, nodes: Iterable[str] = (), known: Collection[str] | None = None
) -> tuple[Fleet, tuple[str, ...]]:
    """Return the target and the ids in `nodes` with the ids that snapshot `name` has for them.

    If the shards in `known`, which are those of the snapshot, are all there, no document is read.
    """
    nodes, listed = tuple(nodes), {node.id for node in target.primaries}
    if known is not None and {*known, *nodes} <= listed and {*nodes} <= {*known}:
        return target, nodes
    renamed = read_renamed(store, name)
    # An id that the file lists itself means that node.
    ids = {new: known for known, new in renamed.items() if known not in listed}
    return with_chain_ids(target, renamed), tuple(ids.get(node, node) for node in nodes)
