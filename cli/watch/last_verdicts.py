"""When the fleet was last checked and drilled, by whomever: so that a watch that begins does not repeat it."""

from __future__ import annotations

from datetime import datetime

from cli.output.exit_codes import CONFLICTS, DONE, INCONCLUSIVE
from cli.watch.schedule import TaskKind
from fleet.config import Fleet
from snapshots.activity.history import Ended
from snapshots.metrics.ended_operations import EndedReader
from snapshots.metrics.store_samples import read_facts

# Of checks and other operations each so many are read, the newest.
READ_MAX = 100


def last_verdicts(fleet: Fleet) -> dict[TaskKind, datetime]:
    """When the last check and the last drill ended that had a verdict; raises what reading the store raises."""
    found: dict[TaskKind, datetime] = {}
    for one in read_facts(fleet, EndedReader(READ_MAX)).ended.found:
        kind = _kind_of(one)
        if kind is not None and one.outcome is not None and one.code in (DONE, CONFLICTS, INCONCLUSIVE):
            found.setdefault(kind, datetime.fromisoformat(one.outcome.ended_at))
    return found


def _kind_of(one: Ended) -> TaskKind | None:
    if one.kind == "check":
        return TaskKind.CHECK
    return TaskKind.DRILL if one.intent is not None and one.intent.is_drill else None
