"""Figures of operations that have ended: the time that their phases took, and what checks compared and skipped."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

from cutline.snapshots.activity.checks import EndedCheck, checks_of
from cutline.snapshots.activity.ended_operations import Ended, list_ended, read_batches
from cutline.snapshots.activity.kinds import operation_kind
from cutline.snapshots.operations.recorded import document_names
from cutline.storage.store import ObjectStore

# So many of the newest are read of operations without an intent (checks, gc, prunes), and of those with one that have
# committed no increment; what each of them says is one or two reads. A watch takes thousands of increments between two
# checks: of those the newest are a sample.
OPERATIONS_MAX, INCREMENTS_MAX = 1000, 200


@dataclass(frozen=True, slots=True)
class PhaseFigures:
    """A phase of all operations of one kind that have it: how many, and how long it took."""

    kind: str
    phase: str
    operations: int
    mean_seconds: float
    longest_seconds: float


@dataclass(frozen=True, slots=True)
class OperationFigures:
    """The figures of `read` operations; if they `are_all`, no other one has ended that counts.

    `untimed` counts those that are done and whose phases were not recorded. `checks` are the newest first.
    """

    read: int = 0
    are_all: bool = True
    untimed: int = 0
    phases: tuple[PhaseFigures, ...] = ()
    checks: tuple[EndedCheck, ...] = ()


def read_operation_figures(
    store: ObjectStore,
    snapshot: str | None = None,
    *,
    increments: Collection[str] = (),
    others: Collection[str] = (),
) -> OperationFigures:
    """Read the newest operations that have ended, and collect the figures of one snapshot, or of all.

    `increments` are the operations that have committed increments; of one snapshot only its own, and `others` those
    of others, which are not read.
    """
    documents, own, not_read = document_names(store), frozenset(increments), frozenset(others)
    with_intent = [one for one in list_ended(documents, has_intent=True) if one not in not_read]
    classes = (
        (OPERATIONS_MAX, list_ended(documents, has_intent=False)),
        (OPERATIONS_MAX, [one for one in with_intent if one not in own]),
        (INCREMENTS_MAX, [one for one in with_intent if one in own]),
    )
    newest = sorted((one for count, ids in classes for one in ids[:count]), reverse=True)
    found = chain.from_iterable(read_batches(store, documents, newest))
    return collect_operations(found, snapshot, are_all=all(len(ids) <= count for count, ids in classes))


def collect_operations(
    ended: Iterable[Ended], snapshot: str | None = None, *, are_all: bool = True
) -> OperationFigures:
    """The figures of operations, the newest first: of one snapshot, or of all."""
    found = list(ended)
    own = [one for one in found if one.outcome and one.outcome.state == "done" and snapshot in (None, one.snapshot)]
    timed = [one for one in own if one.phases]
    checks = [check for one in found for check in checks_of(one) if snapshot in (None, check.point.snapshot)]
    return OperationFigures(len(found), are_all, len(own) - len(timed), _phases(timed), tuple(checks))


def _phases(timed: Iterable[Ended]) -> tuple[PhaseFigures, ...]:
    """By kind, in the order of the operation that has most of them."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for one in sorted(timed, key=lambda one: -len(one.phases)):
        of_kind, checked = (
            seconds.setdefault(operation_kind(one.kind, one.increment, one.intent), {}),
            {point.snapshot for point in one.checked},
        )
        own: dict[str, float] = {}
        for phase, taken in one.phases.items():
            # A check has a step for each snapshot, named for it.
            name = "check commits" if phase.removeprefix("check ") in checked else phase
            own[name] = own.get(name, 0.0) + taken
        for name, taken in own.items():
            of_kind.setdefault(name, []).append(taken)
    return tuple(
        PhaseFigures(kind, phase, len(taken), sum(taken) / len(taken), max(taken))
        for kind, phases in sorted(seconds.items())
        for phase, taken in phases.items()
    )
