"""The counts in a commit."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.config import Node
from snapshots.create.make_cut import ArchivedCut
from snapshots.records.commit import BASE, StoredObject


def counts_of(nodes: Iterable[Node], cut: ArchivedCut, objects: Iterable[StoredObject] = ()) -> dict[str, int]:
    """Rows, changes and transactions of the primaries; objects and bytes of all nodes.

    A transaction on several shards counts once. Changes are all that were archived, also those after the cut.
    """
    stored = list(objects)
    primaries = {node.id for node in nodes if node.backup_of is None}
    segments = [(node, segment) for node, listed in cut.segments.items() for segment in listed]
    on_primaries = [segment for node, segment in segments if node in primaries]
    record = cut.record
    return {
        "rows": sum(sum(one.rows.values()) for one in stored if one.node in primaries and one.kind == BASE),
        "changes": sum(segment.changes for segment in on_primaries),
        "transactions": sum(node.local_transactions for node in record.nodes) + record.global_transactions,
        "ignored": cut.ignored,
        "objects": len(stored) + len(segments),
        "bytes": sum(one.size for one in stored) + sum(segment.size for _, segment in segments),
    }
