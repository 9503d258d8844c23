"""Which create made a slot. A slot is dropped only for a create whose whole intent is in this store.

The exception: past a node's limit on retained WAL, the slot guard drops a slot that is named as Cutline's in any case
(snapshots/operations/slot_guard.py).

What a document says never decides which slot is dropped: somebody who can write to the store could name a slot of an
application, or of another store's chain. The names of slots derive from the ids of operations, in lower case, so that
two ids can have the same slot: then one of them was planted, and neither is believed.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import Intent, read_intent
from cutline.snapshots.records.store_identity import read_fleet_id
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.slots.slots import slot_name


@dataclass(frozen=True, slots=True)
class SlotOwners:
    """The ids of the store's operations, by the slot that a create of that id makes."""

    store: ObjectStore
    ids: dict[str, list[str]]

    def owner_of(self, slot: str) -> Intent | None:
        """The create that made the slot; None if this store does not know it for sure."""
        ids = self.ids.get(slot, [])
        if len(ids) != 1:
            return None
        try:
            intent = read_intent(self.store, ids[0])
        except (ObjectMissingError, ManifestError):
            return None
        return None if intent.kind != "create" or is_foreign(self.store, intent) else intent


def read_slot_owners(store: ObjectStore) -> SlotOwners:
    """The owners of all slots, by one listing."""
    ids: dict[str, list[str]] = {}
    for operation in store.list_children("operations"):
        ids.setdefault(slot_name(operation), []).append(operation)
    return SlotOwners(store, ids)


def is_foreign(store: ObjectStore, intent: Intent) -> bool:
    """Whether the intent names another fleet than the store does: somebody copied it here from another store."""
    return intent.fleet_id is not UNSET and intent.fleet_id != read_fleet_id(store)
