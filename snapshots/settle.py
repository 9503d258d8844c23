"""Settling what earlier operations left open, before a new one begins. The caller holds the fleet's lock."""

from __future__ import annotations

from fleet.config import Fleet
from fleet.progress import Progress
from snapshots.operations import close, pending, was_committed
from storage.store import ObjectStore
from wal.slots import drop_slot


def settle_operations(store: ObjectStore, fleet: Fleet, progress: Progress) -> None:
    """Give every create without an outcome its outcome: committed, or failed with its slots dropped.

    An operation whose slots can't all be dropped now stays open, so that the next command tries again.
    """
    for intent in pending(store):
        if intent["kind"] != "create":
            continue
        operation_id = str(intent["operation"])
        if was_committed(store, intent):
            progress.note(f"operation {operation_id} had committed {_called(intent)}")
            close(store, operation_id, "done", "found committed")
            continue
        progress.note(f"operation {operation_id} ended without committing {_called(intent)}")
        known = {node.id: node for node in fleet.nodes}
        left = [
            node
            for node in intent["nodes"]
            if intent["slot"] and node in known and not drop_slot(known[node], intent["slot"])
        ]
        if left:
            progress.note(f"slot {intent['slot']} could not be dropped on {', '.join(left)}")
            continue
        close(store, operation_id, "failed", "found without a commit")


def _called(intent: dict[str, object]) -> str:
    number = intent["increment"]
    return f"increment {number} of {intent['snapshot']}" if number else f"snapshot {intent['snapshot']}"
