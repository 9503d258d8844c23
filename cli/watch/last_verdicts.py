"""What the last check of the watched snapshot and the last drill have found, by whomever: a watch repeats neither."""

from __future__ import annotations

from dataclasses import replace

from cutline.check.report import EXIT_CODES
from cutline.cli.output.exit_codes import CONFLICTS, DONE, INCONCLUSIVE
from cutline.cli.output.failure import CommandFailure
from cutline.cli.watch.schedule import Task, TaskKind, clock_text
from cutline.cli.watch.tasks import TaskResult, accepting, finding_of, with_finding
from cutline.fleet.config import Fleet
from cutline.restore.drill import drill
from cutline.snapshots.activity.checks import read_checks
from cutline.snapshots.activity.ended_operations import EndedReader
from cutline.snapshots.metrics.store_samples import read_facts
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.records.store_identity import open_own_store

# Of operations with an intent that have committed nothing, drills among them, the newest.
READ_MAX = 100
DRILL_RESULTS = {code: result for result, code in drill.EXIT_CODES.items()}


def adopt(fleet: Fleet, snapshot: str, tasks: dict[TaskKind, Task]) -> list[tuple[Task, CommandFailure]]:
    """Plan the `tasks` by what is in the store, and let those fail that have found something; return what to tell.

    Conflicts are told rather twice than never. A drill of any snapshot
    counts as one that was done; what it has found only if it was of this one.
    """
    told: list[tuple[Task, CommandFailure]] = []
    for kind, (name, found) in {TaskKind.CHECK: last_check(fleet, snapshot), TaskKind.DRILL: last_drill(fleet)}.items():
        if found is None or found.done_at is None:
            continue
        tasks[kind] = task = tasks[kind].last_done(found.done_at)
        # What is never done here would never be seen to work again.
        if name != snapshot or task.problem or task.interval_seconds <= 0:
            continue
        tasks[kind] = with_finding(task, found)
        if found.finding is not None and found.finding.code == CONFLICTS:
            told.append((tasks[kind], found.finding))
    return told


def newer_verdict(fleet: Fleet, snapshot: str, task: Task) -> TaskResult | None:
    """What somebody else has found since the task was done, as a command that a killed watch has left; None: nobody."""
    name, found = last_check(fleet, snapshot) if task.kind is TaskKind.CHECK else last_drill(fleet)
    if found is None or found.done_at is None or name != snapshot:
        return None
    if task.done_at is not None and found.done_at <= task.done_at:
        return None
    return replace(found, text=f"{found.text}, by another process at {clock_text(found.done_at)}")


def last_check(fleet: Fleet, snapshot: str) -> tuple[str, TaskResult | None]:
    """The snapshot, and what its last full check has found; raises what reading the store raises."""
    store = open_own_store(fleet)
    check = read_checks(store, document_names(store)).full.get(snapshot)
    if check is None:
        return snapshot, None
    result = check.point.result
    text = f"check of {snapshot}: {result}"
    return snapshot, accepting(finding_of(EXIT_CODES[result], result, text, done_at=check.moment), fleet)


def last_drill(fleet: Fleet) -> tuple[str, TaskResult | None]:
    """The snapshot of the last drill, and what that has found; raises what reading the store raises."""
    for one in read_facts(fleet, EndedReader(READ_MAX)).ended.found:
        has_verdict = one.code in (DONE, CONFLICTS, INCONCLUSIVE)
        if one.ended_at is not None and has_verdict and one.intent is not None and one.intent.is_drill:
            result = DRILL_RESULTS[one.code or DONE]
            text = f"drill of {one.snapshot}: {result}"
            found = finding_of(one.code or DONE, result, text, done_at=one.ended_at)
            return one.snapshot, accepting(found, fleet)
    return "", None
