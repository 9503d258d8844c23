"""What a restore of about this size took: figures that restores have recorded in the store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from cutline.snapshots.operations.restore_decisions import list_decided
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.restore_figures import RestoreFigures
from cutline.storage.store import ObjectStore

READ_MAX = 50
# Servers and machines change: of so many restores, the newest ones, the one of the most similar size tells most.
COMPARED_MAX = 5


def read_measured(store: ObjectStore, rows: int) -> tuple[str, RestoreFigures] | None:
    """The operation and the figures of a recent restore, the one whose size is nearest to `rows`; None without any.

    Of equally near ones the newest counts. Only the READ_MAX newest that were decided are looked at.
    """
    recent = list(islice(_newest_figures(store), COMPARED_MAX))
    return min(recent, key=lambda one: abs(math.log((one[1].rows + 1) / (rows + 1))), default=None)


def _newest_figures(store: ObjectStore) -> Iterator[tuple[str, RestoreFigures]]:
    # Only restores store a decision, and those that end well an outcome with figures.
    for operation in islice(list_decided(store), READ_MAX):
        try:
            outcome = read_outcome(store, operation)
        except ManifestError:
            # Figures only; whoever needs the outcome reports it.
            continue
        if outcome is not None and isinstance(outcome.figures, RestoreFigures):
            yield operation, outcome.figures
