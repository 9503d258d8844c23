"""What operations were like, by kind: the open ones, those that have ended, and the last one that succeeded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from msgspec import UnsetType

from cutline.fleet.record import Time
from cutline.snapshots.activity.ended_operations import Ended, EndedOperations
from cutline.snapshots.activity.kinds import operation_kind
from cutline.snapshots.activity.under_way import ActivityState, UnderWay
from cutline.snapshots.metrics import catalog
from cutline.snapshots.metrics.catalog import Metric, Sample
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.operation_records import DONE, Intent
from cutline.snapshots.records.restore_figures import RestoreFigures

WINDOW_SECONDS = 24 * 3600.0
UNKNOWN = "unknown"
# The units of volumes.
VOLUMES: Mapping[str, Metric] = {
    "bytes": catalog.SUCCESS_BYTES,
    "objects": catalog.SUCCESS_OBJECTS,
    "rows": catalog.SUCCESS_ROWS,
    "changes": catalog.SUCCESS_CHANGES,
    "transactions": catalog.SUCCESS_TRANSACTIONS,
}


@dataclass(frozen=True, slots=True)
class KindEnd:
    """How one operation ended, for metrics. `retries` None: it makes no cuts. Other fields that are None: unknown."""

    kind: str
    ended_at: float
    code: int | None
    is_done: bool
    seconds: float | None = None
    volumes: Mapping[str, int] = field(default_factory=dict)
    retries: int | None = None
    figures: RestoreFigures | None = None


def moment_of(time: Time) -> float:
    """A stored time in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def _label_of(command: str, increment: int | None, intent: Intent | None) -> str:
    """The label `kind` of an operation."""
    kind = operation_kind(command, increment, intent)
    return kind if kind in catalog.KINDS else catalog.OTHER


def end_of(ended: Ended) -> KindEnd | None:
    """How an operation ended according to its outcome; None if that can't be read."""
    if (outcome := ended.outcome) is None:
        return None
    kind, is_create = _label_of(ended.kind, ended.increment, ended.intent), ended.kind == "create"
    figures = None if isinstance(outcome.figures, UnsetType) else outcome.figures
    is_done = outcome.state == DONE
    return KindEnd(
        kind, moment_of(outcome.ended_at), code=ended.code, is_done=is_done, seconds=ended.seconds,
        volumes=ended.volumes, retries=len(ended.causes) if is_create else None, figures=figures,
    )  # fmt: skip


def end_of_commit(commit: Commit, kind: str) -> KindEnd:
    """How the operation ended that has put this commit."""
    ended_at = moment_of(commit.created_at) + commit.seconds
    return KindEnd(
        kind, ended_at, code=0, is_done=True, seconds=commit.seconds, volumes=commit.counts,
        retries=max(commit.cut.attempts - 1, 0),
    )  # fmt: skip


def samples_of_open(operations: Iterable[UnderWay], states: Mapping[str, ActivityState]) -> Iterator[Sample]:
    """How many operations of every kind are in each state; `states` is by operation."""
    found = Counter((_label_of(one.kind, one.increment, one.intent), states[one.id].value) for one in operations)
    for kind in catalog.KINDS:
        for state in ActivityState:
            yield catalog.OPEN_OPERATIONS.of(found[kind, state.value], kind, state.value)


def samples_of_ends(read: EndedOperations, committed: Iterable[KindEnd], now: float) -> Iterator[Sample]:
    """What ended within the window, and the last one of every kind; `committed` is what no outcome is read of."""
    ends = [*committed, *(end for one in read.found if (end := end_of(one)) is not None)]
    window = WINDOW_SECONDS if read.since is None else min(WINDOW_SECONDS, max(now - read.since.timestamp(), 0.0))
    yield catalog.HISTORY_WINDOW.of(window)
    counts = Counter((one.kind, _code_text(one)) for one in ends if one.ended_at >= now - window)
    for (kind, code), count in sorted(counts.items()):
        yield catalog.ENDED.of(count, kind, code)
    for kind in catalog.KINDS:
        own = sorted((one for one in ends if one.kind == kind), key=lambda one: one.ended_at)
        if own and own[-1].code is not None:
            yield catalog.LAST_CODE.of(own[-1].code, kind)
        successes = [one for one in own if one.is_done and not one.code]
        if successes:
            yield from _success(successes[-1])
    measured = [one for one in ends if one.figures is not None]
    if measured:
        yield from _restored(max(measured, key=lambda one: one.ended_at))


def _code_text(end: KindEnd) -> str:
    if end.code is not None:
        return str(end.code)
    # Early versions record no code.
    return "0" if end.is_done else UNKNOWN


def _success(end: KindEnd) -> Iterator[Sample]:
    yield catalog.SUCCESS.of(end.ended_at, end.kind)
    if end.seconds is not None:
        yield catalog.SUCCESS_SECONDS.of(end.seconds, end.kind)
    if end.retries is not None:
        yield catalog.SUCCESS_RETRIES.of(end.retries, end.kind)
    for unit, metric in VOLUMES.items():
        if unit in end.volumes:
            yield metric.of(end.volumes[unit], end.kind)


def _restored(end: KindEnd) -> Iterator[Sample]:
    steps = end.figures.steps if end.figures else {}
    for name in catalog.RESTORE_STEPS:
        if name in steps:
            yield catalog.RESTORE_STEP.of(steps[name].seconds, name)
    if catalog.WAL_STEP in steps:
        yield catalog.RESTORE_CHANGES.of(steps[catalog.WAL_STEP].amount)
