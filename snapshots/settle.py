"""Settling what earlier operations left open, before a new one begins. The caller holds the fleet's lock."""

from __future__ import annotations

from fleet.config import Fleet
from fleet.progress import Progress
from snapshots.operations import Operation, close, pending, was_committed
from storage.store import ObjectStore
from wal.slots import drop_slots


def settle_operations(store: ObjectStore, fleet: Fleet, progress: Progress) -> None:
    """Give every create without an outcome its outcome: committed, or failed with its slots dropped.

    An operation whose slots can't all be dropped now stays open, so that the next command tries again.
    """
    known = {node.id: node for node in fleet.nodes}
    for operation in pending(store):
        if operation.kind != "create":
            continue
        if was_committed(store, operation):
            progress.note(f"operation {operation.id} had committed {_called(operation)}")
            close(store, operation.id, "done", "found committed")
            continue
        progress.note(f"operation {operation.id} ended without committing {_called(operation)}")
        nodes = [known[node] for node in operation.nodes if node in known]
        if operation.slot and (left := drop_slots(nodes, operation.slot)):
            progress.note(f"slot {operation.slot} could not be dropped on {', '.join(left)}")
            continue
        close(store, operation.id, "failed", "found without a commit")


def _called(operation: Operation) -> str:
    number = operation.increment
    return f"increment {number} of {operation.snapshot}" if number else f"snapshot {operation.snapshot}"
