"""The newest figures that a restore has recorded in the store."""

from __future__ import annotations

from snapshots.records.documents import ManifestError
from snapshots.records.operation_records import read_outcome
from snapshots.records.restore_figures import RestoreFigures
from storage.store import ObjectStore

# Only restores store a decision, and those that end well an outcome with figures.
DECISION = "/decision.json"
READ_MAX = 50


def read_newest_figures(store: ObjectStore) -> tuple[str, RestoreFigures] | None:
    """The operation and the figures of the newest restore that has any, of the READ_MAX newest that were decided."""
    decided = [key.split("/")[1] for key in store.list("operations") if key.endswith(DECISION)]
    for operation in sorted(decided, reverse=True)[:READ_MAX]:
        try:
            outcome = read_outcome(store, operation)
        except ManifestError:
            # Figures only; whoever needs the outcome reports it.
            continue
        if outcome is not None and isinstance(outcome.figures, RestoreFigures):
            return operation, outcome.figures
    return None
