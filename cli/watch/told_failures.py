"""What earlier watches of the fleet have told of tasks that failed: this one tells once these work again.

A watch says it in its signs of life, for the one that takes over when it was killed, and in its outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime

from msgspec import UnsetType

from cutline.cli.watch.schedule import Task, TaskKind
from cutline.fleet.record import Time
from cutline.snapshots.activity.ended_operations import list_ended, read_batches
from cutline.snapshots.activity.under_way import WATCH, ActivityState, UnderWay, read_under_way
from cutline.snapshots.operations.recorded import document_names
from cutline.snapshots.records.operation_records import FailingTask, Outcome, WatchState
from cutline.storage.clock import utc_now
from cutline.storage.store import ObjectStore

# Of operations without an intent. They are in the order in which they began, and a watch may work for months.
READ_MAX = 5000
OF_WATCH = (TaskKind.WATCH, TaskKind.FILE)


def state_of(tasks: Iterable[Task], *, had_turn: bool) -> WatchState:
    """What a watch has told of `tasks` that fail."""
    failing = ((one, one.failing_since) for one in tasks if one.failing_since)
    told = tuple(FailingTask(one.kind.value, Time.of(at), one.problem) for one, at in failing)
    return WatchState(Time.of(utc_now()), had_turn, told)


def told_failures(store: ObjectStore, own: str, own_state: WatchState | None) -> list[FailingTask]:
    """What other watches than `own` have told, and have not seen to work again; raises what reading the store raises.

    Those count that are not at work any more, back to the last one that had the turn: this one has it now. It had it
    itself if `own_state` is the newest: what it had told when it lost it.
    """
    documents, now = document_names(store), utc_now()
    signs = (_of_sign(one, now) for one in read_under_way(store, documents) if one.kind == WATCH and one.id != own)
    ended = list_ended(documents, has_intent=False)[:READ_MAX]
    outcomes = (one.outcome for batch in read_batches(store, documents, ended) for one in batch)
    states = [one for one in (own_state, *signs, *_recorded(outcomes)) if one is not None]
    found: list[FailingTask] = []
    for state in sorted(states, key=lambda one: datetime.fromisoformat(one.at), reverse=True):
        known = {one.task for one in found}
        found += [one for one in state.failing if one.task not in known]
        if state.had_turn:
            break
    return found


def adopt_failures(told: Iterable[FailingTask], tasks: dict[TaskKind, Task]) -> dict[TaskKind, Task]:
    """Let the `tasks` fail that were told to; return those of the watch itself.

    Checks and drills whose last outcome was bad fail already. What is never done here would never work again.
    """
    of_watch: dict[TaskKind, Task] = {}
    for one in told:
        if one.task not in set(TaskKind):
            continue
        kind, since = TaskKind(one.task), datetime.fromisoformat(one.since)
        if kind in OF_WATCH:
            of_watch[kind] = Task(kind, 0.0, failing_since=since, problem=one.problem, failures=1)
        elif kind in tasks and not tasks[kind].problem and tasks[kind].interval_seconds > 0:
            tasks[kind] = replace(tasks[kind], failing_since=since, problem=one.problem)
    return of_watch


def not_needed(told: Iterable[FailingTask], tasks: dict[TaskKind, Task]) -> list[Task]:
    """Those of the failures that were told whose task there is no need for any more: a chain that was to be ended."""
    kind = TaskKind.REPLACE
    found = (one for one in told if one.task == kind and tasks[kind].interval_seconds <= 0)
    return [Task(kind, 0.0, failing_since=datetime.fromisoformat(one.since), problem=one.problem) for one in found]


def _of_sign(one: UnderWay, now: datetime) -> WatchState | None:
    """What the sign of a watch says; None of one that stands by now."""
    if one.sign is None or isinstance(one.sign.watch, UnsetType):
        return None
    stands_by = not one.sign.watch.had_turn and one.state(now) is not ActivityState.DEAD
    return None if stands_by else one.sign.watch


def _recorded(outcomes: Iterable[Outcome | None]) -> Iterator[WatchState]:
    for one in outcomes:
        if one is not None and not isinstance(one.watch, UnsetType):
            yield one.watch
