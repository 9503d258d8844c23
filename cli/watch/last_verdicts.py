"""When the watched snapshot was last checked, and any drilled, by whomever: a watch that begins does not repeat it."""

from __future__ import annotations

from datetime import datetime

from cli.output.exit_codes import CONFLICTS, DONE, INCONCLUSIVE
from cli.watch.schedule import TaskKind
from fleet.config import Fleet
from snapshots.activity.checks import read_checks
from snapshots.activity.ended_operations import EndedReader
from snapshots.metrics.store_samples import read_facts
from snapshots.operations.recorded import document_names
from snapshots.records.store_identity import open_own_store

# Of operations with an intent that have committed nothing, drills among them, the newest.
READ_MAX = 100


def last_verdicts(fleet: Fleet, snapshot: str) -> dict[TaskKind, datetime]:
    """When the last full check of the snapshot and the last drill ended; raises what reading the store raises."""
    found: dict[TaskKind, datetime] = {}
    store = open_own_store(fleet)
    if (check := read_checks(store, document_names(store)).full.get(snapshot)) is not None:
        found[TaskKind.CHECK] = check.moment
    for one in read_facts(fleet, EndedReader(READ_MAX)).ended.found:
        has_verdict = one.code in (DONE, CONFLICTS, INCONCLUSIVE)
        if one.ended_at is not None and has_verdict and one.intent is not None and one.intent.is_drill:
            found[TaskKind.DRILL] = one.ended_at
            break
    return found
