"""The counts that a commit carries."""

from __future__ import annotations

from collections.abc import Iterable

from fleet.config import Node
from snapshots.create.make_cut import MadeCut
from snapshots.records.commit import BASE, StoredObject


def counts_of(nodes: Iterable[Node], made: MadeCut, objects: Iterable[StoredObject] = ()) -> dict[str, int]:
    """Rows, changes and transactions of the primaries; objects and bytes of all nodes.

    A transaction over several shards counts once. Changes are those archived, whatever the cut takes in.
    """
    stored = list(objects)
    primaries = {node.id for node in nodes if node.backup_of is None}
    segments = [(node, segment) for node, found in made.segments.items() for segment in found]
    ours = [segment for node, segment in segments if node in primaries]
    cut = made.record
    return {
        "rows": sum(sum(one.rows.values()) for one in stored if one.node in primaries and one.kind == BASE),
        "changes": sum(segment.changes for segment in ours),
        "transactions": sum(node.local_transactions for node in cut.nodes) + cut.global_transactions,
        "ignored": made.ignored,
        "objects": len(stored) + len(segments),
        "bytes": sum(one.size for one in stored) + sum(segment.size for _, segment in segments),
    }
