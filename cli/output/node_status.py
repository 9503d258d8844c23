"""The nodes' part of `status --nodes`: holders of the fleet's lock, positions, and the lag of slots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cutline.cli.output.tables import Enumeration, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.fleet.lsn import Lsn
from cutline.nodes.lock import LockAnswer, ask_lock_holders
from cutline.snapshots.listing.metrics import PRIMARY, STANDBY
from cutline.snapshots.listing.metrics_gathering import archived_positions, chains_by_cut, read_entries
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import LagsQuery, NodeLags


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node's answer. `lock` is None for a standby; `archived` is the position up to which its WAL is in the store."""

    node: str
    role: str
    lock: LockAnswer | None
    lags: NodeLags
    archived: Lsn | None

    @property
    def problem(self) -> str:
        """The reason why an answer is missing; "" if no answer is missing."""
        return self.lags.problem or (self.lock.problem if self.lock else "")

    @property
    def lock_state(self) -> str | None:
        """Whether the fleet's lock is free or held on the node; None if the node was not asked or did not answer."""
        if self.lock is None or self.lock.problem:
            return None
        return "held" if self.lock.holder else "free"

    def to_json(self) -> dict[str, Any]:
        """Return the node's status as JSON; unknown values are null."""
        holder, lags = self.lock.holder if self.lock else None, self.lags
        return {
            "node": self.node,
            "role": self.role,
            "lock": self.lock_state,
            "holder": holder.details() if holder else None,
            "watch": self.lock.watch.details() if self.lock and self.lock.watch else None,
            "problem": self.problem or None,
            "position": str(lags.position) if lags.position is not None else None,
            "slots": [asdict(slot) for slot in lags.slots],
            "archive_lag_bytes": lags.behind(self.archived),
            "replay_lag_bytes": lags.replay.size_bytes if lags.replay else None,
            "replay_lag_seconds": lags.replay.seconds if lags.replay else None,
        }

    @property
    def text(self) -> Enumeration:
        """The node's line in the human-readable output."""
        head = f"node {self.node}"
        if self.lags.problem and (self.lock is None or self.lock.problem):
            return Enumeration(head, (self.lock.problem if self.lock else self.lags.problem,))
        parts = [_lock_text(self.lock)] if self.lock else []
        if self.lock and self.lock.watch:
            parts.append(f"watch lock held by {self.lock.watch.text()}")
        if self.lags.problem:
            parts.append(f"WAL positions unknown: {self.lags.problem}")
        else:
            parts += [f"at {self.lags.position}" if self.lags.position is not None else "position unknown"]
            for slot in self.lags.slots:
                parts += [
                    f"slot {slot.slot} {size_text(slot.lag_bytes)} behind",
                    f"retains {size_text(slot.retained_bytes)}",
                ]
        if (behind := self.lags.behind(self.archived)) is not None:
            parts.append(f"archive {size_text(behind)} behind")
        if (replay := self.lags.replay) is not None:
            late = "" if replay.seconds is None else f", {seconds_text(replay.seconds)}"
            parts.append(f"replay {size_text(replay.size_bytes)}{late} behind")
        return Enumeration(head, parts)


def _lock_text(lock: LockAnswer) -> str:
    if lock.problem:
        return f"fleet lock unknown: {lock.problem}"
    return f"fleet lock held by {lock.holder.text()}" if lock.holder else "fleet lock free"


def read_nodes(fleet: Fleet, store: ObjectStore) -> list[NodeStatus]:
    """Ask the nodes, in the order they appear in fleet.toml, and read from the store how far their WAL is archived."""
    query = LagsQuery(fleet.nodes)
    locks = {ask_lock_holder.node: ask_lock_holder for ask_lock_holder in ask_lock_holders(fleet)}
    archived = archived_positions(chains_by_cut(read_entries(store, fleet)))
    lags = query.lags()
    return [
        NodeStatus(
            node.id, STANDBY if node.backup_of else PRIMARY, locks.get(node.id), lags[node.id], archived.get(node.id)
        )
        for node in fleet.nodes
    ]
