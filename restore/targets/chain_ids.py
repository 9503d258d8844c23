"""Targets of a snapshot whose nodes have other ids in fleet.toml now: a target's file may list either id.

Everything of a restore, its records in the databases included, has the snapshot's ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet
from cutline.snapshots.records.proven_chains import read_renamed
from cutline.storage.store import ObjectStore


def in_ids_of(
    store: ObjectStore, name: str, target: Fleet, nodes: Iterable[str], known: Collection[str] | None = None
) -> tuple[Fleet, tuple[str, ...]]:
    """Return the target and the ids in `nodes` with the ids that snapshot `name` has for them.

    If the shards in `known`, which are those of the snapshot, are all there, no document is read.
    """
    nodes, listed = tuple(nodes), {node.id for node in target.primaries}
    if known is not None and {*known, *nodes} <= listed and {*nodes} <= {*known}:
        return target, nodes
    renamed = read_renamed(store, name)
    # An id that the file lists itself means that node.
    ids = {new: known for known, new in renamed.items() if known not in listed or new not in listed}
    return with_chain_ids(target, renamed), tuple(ids.get(node, node) for node in nodes)


def other_ids(store: ObjectStore, name: str, target: Fleet) -> Mapping[str, str]:
    """Return the other ids of the target's primaries: those that its file, or the snapshot's fleet.toml, has for them.

    The values are the ids of the target, which `in_ids_of` has returned. An id of the target itself means that node.
    """
    ids = {node.id for node in target.primaries}
    listed = {node.listed_id: node.id for node in target.primaries}
    today = {new: known for known, new in read_renamed(store, name).items() if known in ids}
    return {other: node for other, node in (today | listed).items() if other not in ids}
