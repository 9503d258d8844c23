"""Decide what becomes of a restore's databases: one conditional put, before the first of them gets its real name.

A restore that was suspended, and the command that ends it in its place, may both put a decision. Exactly one is stored.
A restore publishes only if that is the decision; one that is undone after it gets its old databases back.
"""

from __future__ import annotations

from typing import Literal

from cutline.fleet.label import own_label
from cutline.snapshots.operations.deciding import UndecidedError
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.operation_records import Decision, Intent, read_decision, write_operation_record
from cutline.storage.store import ObjectExistsError, ObjectStore
from cutline.storage.storing import StoreAnswersLostError

PUBLISH: Literal["publish"] = "publish"
ABANDON: Literal["abandon"] = "abandon"


def decide_restore(store: ObjectStore, intent: Intent, decision: Literal["publish", "abandon"]) -> str:
    """Store the decision unless there is one; return the decision that counts.

    Raises UndecidedError if the store's answers are lost.
    """
    ours = Decision(
        operation=intent.operation,
        decision=decision,
        by=own_label(intent.kind, intent.snapshot),
        decided_at=current_time(),
    )
    try:
        write_operation_record(store, "decision", ours)
    except ObjectExistsError:
        stored = read_decision(store, intent.operation)
        return stored.decision if stored else decision
    except StoreAnswersLostError as error:
        raise UndecidedError(
            f"it is not known whether operation {intent.operation} was decided: the store's answers were lost",
            hint="once the store answers, repeat the restore with --resume, or with --abandon",
            details={"operation": intent.operation},
        ) from error
    return decision


def is_publishing(store: ObjectStore, operation: str) -> bool:
    """Whether a restore has decided to publish: from then on it only goes forward. Raises ManifestError."""
    decision = read_decision(store, operation)
    return decision is not None and decision.decision == PUBLISH


def list_decided(store: ObjectStore) -> list[str]:
    """The restores that were decided, the newest first. Only restores store a decision."""
    keys = store.list("operations")
    return sorted((key.split("/")[1] for key in keys if key.endswith("/decision.json")), reverse=True)
