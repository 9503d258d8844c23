"""Which chain each slot of Cutline on the nodes belongs to, and whether that chain still needs the slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from cutline.snapshots.listing.listing import BROKEN, COMPLETE, SLOT_LOST, Entry
from cutline.snapshots.operations.open_operations import has_failed, is_open
from cutline.snapshots.operations.slot_guard import read_slot_owners
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.tombstones import is_deleted
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import COPY_SUFFIX, slot_name

# The states of a slot's chain that are not those of a snapshot in `list`.
OPEN, FAILED, DELETED, UNKNOWN = "open", "failed", "deleted", "unknown"
TEXTS = {
    OPEN: "of a create that has not ended",
    FAILED: "of a create that has failed: the next create drops it",
    DELETED: "of a snapshot that was deleted: the next create drops it",
    UNKNOWN: "not of a snapshot in this store",
}


class SlotOwner(Struct, frozen=True):
    """The chain of a slot: its snapshot, its operation, and its state.

    `state` is that of the snapshot in `list`, or OPEN, FAILED, DELETED or UNKNOWN; `snapshot` and `operation` are ""
    if the store does not prove which create made the slot.
    """

    snapshot: str = ""
    operation: str = ""
    state: str = UNKNOWN

    @property
    def text(self) -> str:
        """The chain, and what becomes of the slot, in the words of `status --nodes`."""
        if self.state in TEXTS and not (self.snapshot and self.state == UNKNOWN):
            return TEXTS[self.state]
        if self.state in (COMPLETE, SLOT_LOST, BROKEN, UNKNOWN):
            return f"of snapshot {self.snapshot}"
        return f"of snapshot {self.snapshot}, which is {self.state}: the next create drops it"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a slot in `status --json`; unknown values are null."""
        return {
            "snapshot": self.snapshot or None,
            "chain": self.operation or None,
            "chain_state": self.state,
        }


UNKNOWN_OWNER = SlotOwner()


def read_owners(store: ObjectStore, entries: Iterable[Entry], slots: Iterable[str]) -> Mapping[str, SlotOwner]:
    """Return the owner of each of these slots; `entries` are all snapshots in the store. Raises the store's errors."""
    by_slot = {slot_name(entry.chain.full.chain): entry for entry in entries if entry.chain is not None}
    found = {slot: _of_entry(by_slot[slot]) for slot in slots if slot in by_slot}
    if left := sorted(set(slots) - found.keys()):
        owners = read_slot_owners(store)
        for slot in left:
            intent = owners.owner_of(slot.removesuffix(COPY_SUFFIX))
            if intent is not None:
                found[slot] = SlotOwner(intent.snapshot, intent.id, _state_of(store, intent.id, intent.snapshot))
    return found


def _of_entry(entry: Entry) -> SlotOwner:
    return SlotOwner(entry.name, entry.chain.full.chain if entry.chain else "", entry.state)


def _state_of(store: ObjectStore, operation: str, snapshot: str) -> str:
    try:
        if is_deleted(store, snapshot):
            return DELETED
        if has_failed(store, operation):
            return FAILED
        return OPEN if is_open(store, operation) else UNKNOWN
    except ManifestError:
        return UNKNOWN
