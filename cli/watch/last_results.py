"""The last results of tasks of `watch`, as the store's records show them.

A watch that starts plans its tasks from them, and a watch that runs learns what other processes have found.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from cutline.check.report import EXIT_CODES
from cutline.cli.output.failure import CONFLICTS, DONE, INCONCLUSIVE, CommandFailure
from cutline.cli.watch.schedule import Task, TaskKind, clock_text
from cutline.cli.watch.tasks import TaskResult, accepting, finding_of, with_finding
from cutline.fleet.config import Fleet
from cutline.restore.drill import drill
from cutline.snapshots.listing.metrics_gathering import read_facts
from cutline.snapshots.operations.ended_operations import EndedReader, list_ended, read_batches, read_checks
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.records.merge_records import newest_merge
from cutline.snapshots.records.operation_records import FAILED
from cutline.snapshots.records.store_identity import open_own_store

# How many of the newest operations with an intent and without a commit are read; drills are among them.
READ_MAX = 100
# How many of the newest operations without an intent are read to find the last gc.
GC_READ_MAX = 2000
DRILL_RESULTS = {code: result for result, code in drill.EXIT_CODES.items()}


def adopt(fleet: Fleet, snapshot: str, tasks: dict[TaskKind, Task]) -> list[tuple[Task, CommandFailure]]:
    """Plan the `tasks` from the store's records; mark tasks with findings as failing; return the failures to report.

    It is better to report conflicts twice than not at all. A drill of any snapshot counts as done, but its findings
    count only if it restored `snapshot`.
    """
    told: list[tuple[Task, CommandFailure]] = []
    for kind, (name, result) in {
        TaskKind.CHECK: last_check(fleet, snapshot),
        TaskKind.DRILL: last_drill(fleet),
        TaskKind.COPY: last_copy(fleet),
        TaskKind.GC: last_gc(fleet),
    }.items():
        if result is None or result.done_at is None:
            continue
        tasks[kind] = task = tasks[kind].last_done(result.done_at)
        # A task that is never due here could not recover.
        if name != snapshot or task.problem or task.interval_seconds <= 0:
            continue
        tasks[kind] = with_finding(task, result)
        if result.finding is not None and result.finding.code == CONFLICTS:
            told.append((tasks[kind], result.finding))
    return told


def newer_verdict(fleet: Fleet, snapshot: str, task: Task) -> TaskResult | None:
    """Return the result of another process, such as a killed watch's command, if it is newer than the task."""
    name, result = last_check(fleet, snapshot) if task.kind is TaskKind.CHECK else last_drill(fleet)
    if result is None or result.done_at is None or name != snapshot:
        return None
    if task.done_at is not None and result.done_at <= task.done_at:
        return None
    return replace(result, text=f"{result.text}, by another process at {clock_text(result.done_at)}")


def last_check(fleet: Fleet, snapshot: str) -> tuple[str, TaskResult | None]:
    """Return the snapshot, and the result of its last full check; raises the store's errors."""
    store = open_own_store(fleet)
    check = read_checks(store, document_names(store)).full.get(snapshot)
    if check is None:
        return snapshot, None
    result = check.point.result
    text = f"check of {snapshot}: {result}"
    return snapshot, accepting(finding_of(EXIT_CODES[result], result, text, done_at=check.moment), fleet)


def last_copy(fleet: Fleet) -> tuple[str, TaskResult | None]:
    """Return the time of the last complete copy of all snapshots, as a result; raises the store's errors."""
    for ended in read_facts(fleet, EndedReader(READ_MAX)).ended.found:
        if (ended.kind, ended.snapshot, ended.code) == (TaskKind.COPY.value, "", DONE):
            return "", TaskResult("copy of all snapshots", done_at=ended.ended_at)
    return "", None


def last_gc(fleet: Fleet) -> tuple[str, TaskResult | None]:
    """Return the time of the last gc, as a result; raises the store's errors."""
    store = open_own_store(fleet)
    documents = document_names(store)
    # Copies may leave a hundred records between two runs of gc.
    for batch in read_batches(store, documents, list_ended(documents, has_intent=False)[:GC_READ_MAX]):
        for ended in batch:
            # A gc that left objects, because the store refuses to delete them, ends with 3; so does one that failed.
            if ended.kind == TaskKind.GC.value and ended.outcome is not None and ended.outcome.state != FAILED:
                return "", TaskResult("gc", done_at=ended.ended_at)
    return "", None


def last_drill(fleet: Fleet) -> tuple[str, TaskResult | None]:
    """Return the snapshot of the last drill, and the drill's result; raises the store's errors."""
    for ended in read_facts(fleet, EndedReader(READ_MAX)).ended.found:
        has_verdict = ended.code in (DONE, CONFLICTS, INCONCLUSIVE)
        if ended.ended_at is not None and has_verdict and ended.intent is not None and ended.intent.is_drill:
            result = DRILL_RESULTS[ended.code or DONE]
            text = f"drill of {ended.snapshot}: {result}"
            task_result = finding_of(ended.code or DONE, result, text, done_at=ended.ended_at)
            return ended.snapshot, accepting(task_result, fleet)
    return "", None


def last_merge(fleet: Fleet, snapshot: str) -> datetime | None:
    """Return when the snapshot was last merged; None if never. Raises the store's errors."""
    merge = newest_merge(open_own_store(fleet), snapshot)
    return datetime.fromisoformat(merge.made_at) if merge else None
