"""The nodes' part of `status --nodes`: holders of the fleet's lock, positions, and the nodes' slots with their chains.

A node is shown in the role that its server has now; after a failover, the server is named as in fleet.toml.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from cutline.cli.output.renewed import copy_document
from cutline.cli.output.tables import Enumeration, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.nodes.lock import LockAnswer, ask_lock_holders
from cutline.nodes.publications import other_publications_texts
from cutline.snapshots.listing.listing import Entry, with_slots
from cutline.snapshots.listing.metrics import PRIMARY, STANDBY
from cutline.snapshots.listing.metrics_gathering import archived_positions, chains_by_cut, read_entries
from cutline.snapshots.listing.slot_owners import UNKNOWN, UNKNOWN_OWNER, SlotOwner, read_owners
from cutline.snapshots.records.commit import BackgroundCopy
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import LagsQuery, NodeLags, SlotLag


class NodeStatus(Struct, frozen=True):
    """A node's answer. `lock` is None for a standby; `archived` is the position up to which its WAL is in the store.

    `server` is the node of fleet.toml whose server has the role of `node`, "" if it is its own. `owners` are the chains
    that the node's slots belong to, by slot. `copies` are the copies of a standby that are made in the background, by
    snapshot.
    """

    node: str
    role: str
    lock: LockAnswer | None
    lags: NodeLags
    archived: Lsn | None
    server: str = ""
    owners: Mapping[str, SlotOwner] = field(default_factory=dict)
    copies: Mapping[str, BackgroundCopy] = field(default_factory=dict)

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
            "server": self.server or self.node,
            "lock": self.lock_state,
            "holder": holder.details() if holder else None,
            "watch": self.lock.watch.details() if self.lock and self.lock.watch else None,
            "problem": self.problem or None,
            "position": str(lags.position) if lags.position is not None else None,
            "slots": [asdict(slot) | self._owner_of(slot.slot).to_json() for slot in lags.slots],
            "copying": [{"snapshot": name, **copy_document(copy)} for name, copy in self.copies.items()],
            "archive_lag_bytes": lags.behind(self.archived),
            "replay_lag_bytes": lags.replay.size_bytes if lags.replay else None,
            "replay_lag_seconds": lags.replay.seconds if lags.replay else None,
        }

    @property
    def text(self) -> Enumeration:
        """The node's line in the human-readable output."""
        head = f"node {self.node}" + (f" (server {self.server})" if self.server else "")
        if self.lags.problem and (self.lock is None or self.lock.problem):
            return Enumeration(head, (self.lock.problem if self.lock else self.lags.problem,))
        parts = [_lock_text(self.lock)] if self.lock else []
        if self.lock and self.lock.watch:
            parts.append(f"watch lock held by {self.lock.watch.text()}")
        if self.lags.problem:
            parts.append(f"WAL positions unknown: {self.lags.problem}")
        else:
            parts += [f"at {self.lags.position}" if self.lags.position is not None else "position unknown"]
            parts += [self._slot_text(slot) for slot in self.lags.slots]
        parts += [f"being copied for snapshot {name}: {_copied_text(copy)}" for name, copy in self.copies.items()]
        if (behind := self.lags.behind(self.archived)) is not None:
            parts.append(f"archive {size_text(behind)} behind")
        if (replay := self.lags.replay) is not None:
            late = "" if replay.seconds is None else f", {seconds_text(replay.seconds)}"
            parts.append(f"replay {size_text(replay.size_bytes)}{late} behind")
        return Enumeration(head, parts)

    def _owner_of(self, slot: str) -> SlotOwner:
        return self.owners.get(slot, UNKNOWN_OWNER)

    def _slot_text(self, slot: SlotLag) -> str:
        behind = "is being created" if slot.lag_bytes is None else f"{size_text(slot.lag_bytes)} behind"
        state = f"unusable ({slot.wal_status or 'invalid'})" if slot.problem else behind
        return f"slot {slot.slot} {state}, retains {size_text(slot.retained_bytes)}, {self._owner_of(slot.slot).text}"


def unknown_texts(nodes: Iterable[NodeStatus], fleet_id: str | None) -> list[str]:
    """Return what to do about slots and publications of Cutline that are not of this store, whose store may be gone."""
    slots: dict[str, list[str]] = {}
    listed = list(nodes)
    for node in listed:
        for slot in node.lags.slots:
            owner = node.owners.get(slot.slot, UNKNOWN_OWNER)
            if owner.state == UNKNOWN and not owner.operation:
                slots.setdefault(slot.slot, []).append(node.node)
    return [
        f"slot {slot} on {list_some(found, NODES_NAMED_MAX)}: not of this store; if the store that made it is gone, run"
        f" there: SELECT pg_drop_replication_slot('{slot}')"
        for slot, found in sorted(slots.items())
    ] + other_publications_texts({node.node: node.lags.publications for node in listed}, fleet_id)


def _copied_text(copy: BackgroundCopy) -> str:
    from cutline.snapshots.create.background_copies import progress_text

    return progress_text(copy)


def _lock_text(lock: LockAnswer) -> str:
    if lock.problem:
        return f"fleet lock unknown: {lock.problem}"
    return f"fleet lock held by {lock.holder.text()}" if lock.holder else "fleet lock free"


def read_nodes(fleet: Fleet, store: ObjectStore) -> list[NodeStatus]:
    """Ask the nodes, in the order they appear in fleet.toml, and read from the store how far their WAL is archived."""
    query = LagsQuery(fleet)
    locks = {answer.node: answer for answer in ask_lock_holders(fleet)}
    entries, lags = read_entries(store, fleet), query.lags()
    archived, copies = archived_positions(chains_by_cut(entries)), _read_copies(store, entries)
    entries = tuple(with_slots(entry, lags.slots) for entry in entries)
    owners = read_owners(store, entries, {slot.slot for found in lags.nodes.values() for slot in found.slots})
    return [
        NodeStatus(
            node.id,
            STANDBY if node.backup_of else PRIMARY,
            locks.get(node.id),
            lags.nodes[node.id],
            archived.get(node.id),
            "" if (server := lags.server_of(node.id)) == node.id else server,
            owners,
            copies.get(node.id, {}),
        )
        for node in fleet.nodes
    ]


def _read_copies(store: ObjectStore, entries: Iterable[Entry]) -> dict[str, dict[str, BackgroundCopy]]:
    """Read how far the copies of standbys are now that the chains' last commits name, by node and snapshot."""
    copies: dict[str, dict[str, BackgroundCopy]] = {}
    for entry in entries:
        if entry.chain is None or entry.ended is not None:
            continue
        for node, copying in entry.chain.copying.items():
            # Imported here, because few fleets have such copies.
            from cutline.snapshots.create.background_copies import read_underway

            now = read_underway(store, entry.chain, node).at_commit(copying.last)
            copies.setdefault(entry.chain.listed_id(node), {})[entry.name] = now
    return copies
