"""Settling what earlier operations left open, before a new one begins. The caller holds the fleet's lock."""

from __future__ import annotations

from fleet.config import Fleet, Node
from fleet.progress import Progress
from fleet.read_only.resume import undo_freeze
from snapshots.operations.deciding import decide
from snapshots.operations.operation import pending_ids, record_outcome
from snapshots.records.commits import increment_label
from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import Intent, read_intent
from snapshots.records.tombstones import only_full_key, tombstone_key
from storage.store import ObjectMissingError, ObjectStore
from wal.slots.slots import copy_slot_name, drop_slots

# The mark after which a deletion or a pruning is gone on with by the next of its kind.
MARKS = {"delete": tombstone_key, "prune": only_full_key}


def settle_operations(store: ObjectStore, fleet: Fleet, progress: Progress) -> None:
    """Give every create without an outcome its outcome: committed, or failed, its slots dropped and its freeze undone.

    And every removal that ended before its mark.
    What is settled stays so, however late the operation's own put arrives. An operation whose slots can't all be
    dropped now stays open, so that the next command tries again. So does one that can't be read; it is named, and holds
    no lock, and of its commit and another's of the same number only one can be stored. Raises UndecidedError.
    """
    known = {node.id: node for node in fleet.nodes}
    for operation_id in pending_ids(store):
        try:
            operation = read_intent(store, operation_id)
            if operation.kind != "create":
                _settle_removal(store, operation, progress)
                continue
            committed = decide(store, operation)
        except ObjectMissingError:
            # An old one that is over: gc takes its records away, the intent first.
            continue
        except ManifestError as error:
            # It stays open, and its snapshot unreadable: no reason to take no other.
            progress.note(f"operation {operation_id} can't be settled: {error.message}; {error.hint}")
            continue
        what = increment_label(operation.snapshot, operation.increment)
        if committed:
            progress.note(f"operation {operation.id} had committed {what}")
            record_outcome(store, operation, "done", "found committed")
            continue
        progress.note(f"operation {operation.id} ended without committing {what}")
        nodes = [known[node] for node in operation.nodes if node in known]
        accepts = not operation.is_terminal or undo_freeze(nodes, operation.id, progress)
        if accepts and not _note_left_slots(operation, nodes, progress):
            record_outcome(store, operation, "failed", "found without a commit")


def _note_left_slots(operation: Intent, nodes: list[Node], progress: Progress) -> bool:
    """Drop the slots that the operation may have made; whether some are left."""
    found = {slot: drop_slots(nodes, slot) for slot in (operation.slot, copy_slot_name(operation.id)) if slot}
    for slot, left in found.items():
        if left:
            progress.note(f"slot {slot} could not be dropped on {', '.join(left)}")
    return any(found.values())


def _settle_removal(store: ObjectStore, operation: Intent, progress: Progress) -> None:
    """Close a removal that ended before its mark: it has taken nothing away, and nobody would repeat it for its sake.

    A mark whose put arrives later counts all the same, as the marks do and not the operations.
    """
    if operation.kind in MARKS and not store.exists(MARKS[operation.kind](operation.snapshot)):
        progress.note(f"operation {operation.id} ended before it had taken anything of {operation.snapshot} away")
        record_outcome(store, operation, "failed", "found without a mark")
