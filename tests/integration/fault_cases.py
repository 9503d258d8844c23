"""Which faults the walk has at which points of create: all of them in the long form, else those that a seed draws."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapshots.operations.crash_points import (
    CUT_POINTS,
    FREEZE_POINTS,
    FULL_POINTS,
    INCREMENT_POINTS,
    LAST_POINTS,
    PER_NODE,
    CrashPoint,
    ddl_crash_points,
    terminal_crash_points,
)
from tests.faults import (
    FLEET_FAULTS,
    STORE_FAULTS,
    Mend,
    Place,
    disk_full,
    primary_down,
    store_failing,
)
from tests.sights import Sight
from tests.soak import SOAK_SECONDS

if TYPE_CHECKING:
    pass


SEED = 20
NODES = 4
KILLED, STOPPED = "SIGKILL", "SIGINT"


@dataclass(frozen=True, slots=True)
class Step:
    """A point of a full create or of an increment, reached for the `count`th time, or something seen from outside."""

    incremental: bool
    point: CrashPoint | Sight
    count: int = 1
    terminal: bool = False
    anew: bool = False

    @property
    def committed(self) -> bool:
        """Whether the commit is stored when the point is reached."""
        if isinstance(self.point, Sight):
            return False
        points = terminal_crash_points(ddl_crash_points(INCREMENT_POINTS) if self.incremental else FULL_POINTS)
        return points.index(self.point) >= points.index(CrashPoint.COMMITTED)

    @property
    def kind(self) -> dict[str, bool]:
        """The command's options."""
        return {"incremental": self.incremental, "terminal": self.terminal}

    def __str__(self) -> str:
        command = ("terminal-" if self.terminal else "") + ("increment" if self.incremental else "full")
        command += "-new-table" if self.anew else ""
        return f"{command}-{self.point.replace(' ', '_')}-{self.count}"


@dataclass(frozen=True, slots=True)
class Case:
    """A fault at a step: a signal to the command, or something of the fleet or the store."""

    step: Step
    fault: str | Callable[[Place], Mend]

    @property
    def name(self) -> str:
        return self.fault if isinstance(self.fault, str) else self.fault.__name__

    def __str__(self) -> str:
        return f"{self.name}-{self.step}"


# Of a terminal increment the points from the freeze on, most in the long form alone.
TERMINAL = [(CrashPoint.FROZEN, 1), (CrashPoint.SESSIONS_ENDED, 2), (CrashPoint.COMMITTED, 1)]
if SOAK_SECONDS:
    TERMINAL += [
        (CrashPoint.FROZEN, 2),
        (CrashPoint.SESSIONS_ENDED, 1),
        *((point, 1) for point in (*CUT_POINTS, *LAST_POINTS[:1], *LAST_POINTS[2:])),
    ]


# Of an increment that finds a table new the points that others have not.
ANEW = [
    (CrashPoint.TABLES_PUBLISHED, 1),
    (CrashPoint.SLOT_MADE, 1),
    (CrashPoint.BASE_COPIED, 1),
    (CrashPoint.DDL_STORED, 1),
]
if SOAK_SECONDS:
    ANEW += [(CrashPoint.SLOT_MADE, NODES), (CrashPoint.COPY_SLOTS_DROPPED, 1), *((point, 1) for point in CUT_POINTS)]


def steps() -> list[Step]:
    """Every point of both commands; of those that are reached on every node the first and the last."""
    found: list[Step] = []
    for incremental, points in ((False, FULL_POINTS), (True, INCREMENT_POINTS)):
        seen: Counter[CrashPoint] = Counter()
        for point in points:
            seen[point] += 1
            found.append(Step(incremental, point, seen[point]))
            if point in PER_NODE:
                found.append(Step(incremental, point, NODES))
    # An increment copies nothing, but what is new.
    found += [Step(incremental=True, point=point, count=count, anew=True) for point, count in ANEW]
    found += [Step(incremental=False, point=sight) for sight in Sight]
    found += [Step(incremental=True, point=sight) for sight in (Sight.SEGMENT, Sight.ADVANCED)]
    return [*found, *(Step(incremental=True, point=point, count=count, terminal=True) for point, count in TERMINAL)]


# The kill comes at every step, and takes the time of a JVM's start.
SAMPLED = 1
FAULTS: tuple[str | Callable[[Place], Mend], ...] = (STOPPED, *FLEET_FAULTS, *STORE_FAULTS, disk_full)


def sample(generator: random.Random) -> list[Case]:
    """Every fault besides the kill at SAMPLED steps, no two at the same."""
    shuffled = generator.sample([step for step in steps() if not (step.terminal or step.anew)], SAMPLED * len(FAULTS))
    chosen = [Case(step, fault) for step, fault in zip(shuffled, itertools.cycle(FAULTS), strict=False)]
    # What happens in the middle of a job is no place for a signal from within the command.
    chosen = [Case(one.step, primary_down) if is_from_within(one) else one for one in chosen]
    frozen, ended = [Step(incremental=True, point=point, count=2, terminal=True) for point in FREEZE_POINTS]
    return [*chosen, Case(frozen, primary_down), Case(ended, store_failing)]


def is_from_within(case: Case) -> bool:
    return case.fault == STOPPED and isinstance(case.step.point, Sight)


def cases() -> list[Case]:
    """In the order of their steps, which is the order of a walk; the long form in random order."""
    if SOAK_SECONDS:
        every = [Case(step, fault) for step in steps() for fault in (KILLED, *FAULTS)]
        return [one for one in random.Random(SEED).sample(every, len(every)) if not is_from_within(one)]
    chosen = [*(Case(step, KILLED) for step in steps()), *sample(random.Random(SEED))]
    order = [str(step) for step in steps()]
    return sorted(chosen, key=lambda case: order.index(str(case.step)) if str(case.step) in order else len(order))
