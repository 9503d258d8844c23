"""The cases of the fault walk: all faults at all points in the long form.

Else every point has a fault, by turns another one (`make all`). Of these and some more, `make test` has a sample with
every fault and every kind of point.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cutline.fleet.crash_points import CrashPoint
from tests.faults.injection import FLEET_FAULTS, STORE_FAULTS, FaultTargets, Repair, disk_full
from tests.faults.points import (
    CUT_POINTS,
    FREEZE_POINTS,
    FULL_POINTS,
    INCREMENT_POINTS,
    LAST_POINTS,
    PER_NODE,
    ddl_crash_points,
    renewing_crash_points,
    spark_crash_points,
    terminal_crash_points,
)
from tests.faults.sights import TaskEffect
from tests.run.soak import SEED, SOAK_SECONDS

NODES = 4
KILLED, STOPPED, CANCELLED = "SIGKILL", "SIGINT", "cancel"
READ_ONLY = "read-only"
# The kinds of points, by what a command leaves if it ends there (docs/architecture/creating.md).
KINDS: Mapping[str, frozenset[CrashPoint | TaskEffect]] = {
    "locked": frozenset(
        {CrashPoint.CHECKED, CrashPoint.LOCKED, CrashPoint.SETTLED, CrashPoint.SLOTS_DROPPED, CrashPoint.SPARK_BEGUN}
    ),
    "intent": frozenset({CrashPoint.INTENT_STORED}),
    "slots": frozenset(
        {
            CrashPoint.SLOT_MADE,
            CrashPoint.SPARK_READY,
            CrashPoint.SNAPSHOTS_RELEASED,
            CrashPoint.COPY_SLOTS_DROPPED,
            CrashPoint.PREPARED_OVER,
        }
    ),
    "published": frozenset({CrashPoint.TABLES_PUBLISHED}),
    "copied": frozenset({CrashPoint.BASE_COPIED, CrashPoint.DDL_STORED}),
    "cut": frozenset(
        {
            CrashPoint.STARTS_WRITTEN,
            CrashPoint.FINISHES_WRITTEN,
            CrashPoint.ARCHIVED,
            CrashPoint.RESOLVED,
            CrashPoint.SEQUENCES_READ,
        }
    ),
    READ_ONLY: frozenset(FREEZE_POINTS),
    "committed": frozenset({CrashPoint.COMMITTED, CrashPoint.OUTCOME_STORED, CrashPoint.RELEASED}),
    "within a job": frozenset(TaskEffect),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A crash point of a create, reached for the `count`th time, or an effect that is seen from outside.

    If it `renews` a node, that has lost the chain's slot before, and the increment copies it again.
    `by_spark`: Spark copies the tables and archives the WAL, and not the command itself.
    """

    incremental: bool
    point: CrashPoint | TaskEffect
    count: int = 1
    terminal: bool = False
    new_table: bool = False
    by_spark: bool = False
    renews: str = ""

    @property
    def is_committed(self) -> bool:
        """Whether the commit has been stored when the point is reached."""
        if isinstance(self.point, TaskEffect):
            return False
        points = ddl_crash_points(INCREMENT_POINTS) if self.incremental else FULL_POINTS
        points = renewing_crash_points(INCREMENT_POINTS) if self.renews else points
        points = terminal_crash_points(spark_crash_points(points))
        return points.index(self.point) >= points.index(CrashPoint.COMMITTED)

    @property
    def options(self) -> dict[str, bool]:
        """The command's options."""
        return {"incremental": self.incremental, "terminal": self.terminal, "by_spark": self.by_spark}

    def __str__(self) -> str:
        command = ("terminal-" if self.terminal else "") + ("increment" if self.incremental else "full")
        command += ("-new-table" if self.new_table else "") + ("-by-Spark" if self.by_spark else "")
        command += f"-renewing-{self.renews}" if self.renews else ""
        return f"{command}-{self.point.replace(' ', '_')}-{self.count}"


@dataclass(frozen=True, slots=True)
class Case:
    """A fault at a step: a signal to the command, or a fault of the fleet or the store."""

    step: Step
    fault: str | Callable[[FaultTargets], Repair]

    @property
    def name(self) -> str:
        return self.fault if isinstance(self.fault, str) else self.fault.__name__

    def __str__(self) -> str:
        return f"{self.name}-{self.step}"


# The points of a terminal increment, from the freeze on.
TERMINAL_POINTS = [
    *((point, count) for point in FREEZE_POINTS for count in (1, 2)),
    *((point, 1) for point in (*CUT_POINTS, *LAST_POINTS)),
]
# The additional points of an increment that finds a new table, and those of its cut.
NEW_TABLE_POINTS = [
    (CrashPoint.TABLES_PUBLISHED, 1),
    (CrashPoint.SLOT_MADE, 1),
    (CrashPoint.SLOT_MADE, NODES),
    *(
        (point, 1)
        for point in (CrashPoint.BASE_COPIED, CrashPoint.COPY_SLOTS_DROPPED, CrashPoint.DDL_STORED, *CUT_POINTS)
    ),
]


# Where an increment is that copies a standby, or the tables of a primary, again.
STANDBY, PRIMARY = "s1-b1", "s1"
RENEWING_POINTS = [
    *(
        (STANDBY, point)
        for point in (
            CrashPoint.SLOT_MADE,
            CrashPoint.BASE_COPIED,
            CrashPoint.SNAPSHOTS_RELEASED,
            CrashPoint.PREPARED_OVER,
            CrashPoint.ARCHIVED,
            CrashPoint.COMMITTED,
        )
    ),
    *(
        (PRIMARY, point)
        for point in (
            CrashPoint.SLOT_MADE,
            CrashPoint.PREPARED_OVER,
            CrashPoint.BASE_COPIED,
            CrashPoint.COPY_SLOTS_DROPPED,
            CrashPoint.FINISHES_WRITTEN,
            CrashPoint.COMMITTED,
        )
    ),
]


def all_steps() -> list[Step]:
    """Every point of both commands; a point that is reached on every node for the first and the last of them."""
    found: list[Step] = []
    for incremental, by_spark, points in (
        (False, False, FULL_POINTS),
        (False, True, FULL_POINTS),
        (True, False, INCREMENT_POINTS),
        (True, True, spark_crash_points(INCREMENT_POINTS)),
    ):
        for point in points:
            found.append(Step(incremental, point, by_spark=by_spark))
            if point in PER_NODE:
                found.append(Step(incremental, point, NODES, by_spark=by_spark))
    # Spark is waited for a second time: for the cut.
    found.append(Step(incremental=False, point=CrashPoint.SPARK_READY, count=2, by_spark=True))
    # An increment copies new tables only.
    found += [Step(incremental=True, point=point, count=count, new_table=True) for point, count in NEW_TABLE_POINTS]
    found += [Step(incremental=True, point=point, renews=node) for node, point in RENEWING_POINTS]
    found += [
        Step(incremental=False, point=effect, by_spark=by_spark) for effect in TaskEffect for by_spark in (False, True)
    ]
    found += [
        Step(incremental=True, point=effect, by_spark=by_spark)
        for effect in (TaskEffect.SEGMENT, TaskEffect.ADVANCED)
        for by_spark in (False, True)
    ]
    return [
        *found,
        *(Step(incremental=True, point=point, count=count, terminal=True) for point, count in TERMINAL_POINTS),
    ]


FAULTS: tuple[str | Callable[[FaultTargets], Repair], ...] = (
    KILLED, STOPPED, CANCELLED, *FLEET_FAULTS, *STORE_FAULTS, disk_full,
)  # fmt: skip
# Before the intent is stored nobody can name the operation, and after the outcome nothing is under way.
NOT_CANCELLED = KINDS["locked"] | {CrashPoint.OUTCOME_STORED, CrashPoint.RELEASED}
# Further kills in a sample, besides one case for each fault: a kill costs the start of a JVM.
KILLS = 2


def all_cases() -> list[Case]:
    """All faults at all steps."""
    found = [Case(step, fault) for step in all_steps() for fault in FAULTS]
    # The command can't signal itself in the middle of a job.
    found = [one for one in found if not (one.fault == STOPPED and isinstance(one.step.point, TaskEffect))]
    return [one for one in found if not (one.fault == CANCELLED and one.step.point in NOT_CANCELLED)]


def sample(generator: random.Random) -> list[Case]:
    """Draw cases with every fault, every kind of point, and kills of full, incremental and terminal creates.

    One of the killed increments copies a node again.
    """
    by_both: dict[tuple[str, object], list[Case]] = {}
    for kind, points in KINDS.items():
        for case in all_cases():
            if case.step.point in points:
                by_both.setdefault((kind, case.fault), []).append(case)
    faults = [*[KILLED] * KILLS, *FAULTS]
    while True:
        kinds = [*KINDS, *generator.choices(list(KINDS), k=len(faults) - len(KINDS))]
        generator.shuffle(faults)
        # Some faults are impossible at some kinds of points.
        places = [by_both[place] for place in zip(kinds, faults, strict=True) if place in by_both]
        found = [generator.choice(place) for place in places]
        if is_representative(found):
            return found


def is_representative(chosen: list[Case]) -> bool:
    """Whether the cases include everything that a sample must."""
    killed = [one.step for one in chosen if one.fault == KILLED]
    return (
        {one.fault for one in chosen} == set(FAULTS)
        and all(any(one.step.point in points for one in chosen) for points in KINDS.values())
        and any(step.point in KINDS[READ_ONLY] for step in killed)
        and any(step.renews for step in killed)
        and {step.incremental for step in killed if not step.terminal} == {True, False}
        and len({str(one) for one in chosen}) == len(chosen)
    )


def one_of_each_step() -> list[Case]:
    """A case for every step: by turns of another fault, or of the next one that is possible there."""
    possible = {str(case): case for case in all_cases()}
    found = []
    for number, step in enumerate(all_steps()):
        turn = number % len(FAULTS)
        names = (str(Case(step, fault)) for fault in (*FAULTS[turn:], *FAULTS[:turn]))
        found.append(next(possible[name] for name in names if name in possible))
    return found


def cases() -> list[Any]:
    """The cases of a run: in the order of their steps, which is that of a walk; in the long form in random order."""
    if SOAK_SECONDS:
        return random.Random(SEED).sample(all_cases(), len(all_cases()))
    in_test = {str(case): case for case in sample(random.Random(SEED))}
    every = {str(case): case for case in one_of_each_step()} | in_test
    order = [str(step) for step in all_steps()]
    walked = sorted(every.values(), key=lambda case: order.index(str(case.step)))
    return [pytest.param(case, marks=() if str(case) in in_test else pytest.mark.rest) for case in walked]
