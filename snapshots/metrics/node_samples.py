"""What nodes say of themselves: how far they are, how far slots, standbys and the archive lag behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cutline.fleet.config import Fleet, Node
from cutline.fleet.lsn import Lsn
from cutline.snapshots.metrics import catalog
from cutline.snapshots.metrics.catalog import Sample
from cutline.wal.slots.lags import NodeLags


def samples_of_nodes(fleet: Fleet, lags: Mapping[str, NodeLags], archived: Mapping[str, Lsn]) -> Iterator[Sample]:
    """All samples of the nodes; `archived` is by node, without those of which the store has no WAL."""
    for node in fleet.nodes:
        role = catalog.STANDBY if node.backup_of else catalog.PRIMARY
        found = lags[node.id]
        yield catalog.NODE_UP.of(not found.problem, node.id, role)
        yield catalog.RETAINED_LIMIT.of(node.retained_wal_bytes_max, node.id)
        if not found.problem:
            yield from _samples_of_node(node, found, archived.get(node.id))


def _samples_of_node(node: Node, found: NodeLags, archived: Lsn | None) -> Iterator[Sample]:
    yield catalog.NODE_IN_RECOVERY.of(found.is_in_recovery, node.id)
    for one in found.slots:
        yield catalog.SLOT_LAG.of(one.lag_bytes, node.id, one.slot)
        yield catalog.RETAINED.of(one.retained_bytes, node.id, one.slot)
    if (behind := found.behind(archived)) is not None:
        yield catalog.ARCHIVE_LAG.of(behind, node.id)
    if found.replay is not None:
        yield catalog.REPLAY_LAG.of(found.replay.size_bytes, node.id)
        if found.replay.seconds is not None:
            yield catalog.REPLAY_LAG_SECONDS.of(found.replay.seconds, node.id)
