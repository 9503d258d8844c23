"""Which faults the walk has at which points of create: all of them in the long form, else those that the seed draws."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
from tests.faults.injection import FLEET_FAULTS, STORE_FAULTS, Mend, Place, disk_full
from tests.faults.sights import Sight
from tests.soak import SEED, SOAK_SECONDS

NODES = 4
KILLED, STOPPED = "SIGKILL", "SIGINT"
READ_ONLY = "read-only"
# The kinds of points: by what a command leaves that ends there (docs/architecture.md, "When something fails").
KINDS: Mapping[str, frozenset[CrashPoint | Sight]] = {
    "locked": frozenset(
        {CrashPoint.CHECKED, CrashPoint.LOCKED, CrashPoint.SETTLED, CrashPoint.GIVEN_UP, CrashPoint.SPARK_BEGUN}
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
    "within a job": frozenset(Sight),
}


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


# Of a terminal increment the points from the freeze on.
TERMINAL = [
    *((point, count) for point in FREEZE_POINTS for count in (1, 2)),
    *((point, 1) for point in (*CUT_POINTS, *LAST_POINTS)),
]
# Of an increment that finds a table new the points that others have not, and its cut.
ANEW = [
    (CrashPoint.TABLES_PUBLISHED, 1),
    (CrashPoint.SLOT_MADE, 1),
    (CrashPoint.SLOT_MADE, NODES),
    *(
        (point, 1)
        for point in (CrashPoint.BASE_COPIED, CrashPoint.COPY_SLOTS_DROPPED, CrashPoint.DDL_STORED, *CUT_POINTS)
    ),
]


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


FAULTS: tuple[str | Callable[[Place], Mend], ...] = (KILLED, STOPPED, *FLEET_FAULTS, *STORE_FAULTS, disk_full)
# Those besides the one that every fault has: a kill takes the time of a JVM's start.
KILLS = 2


def every() -> list[Case]:
    """All faults at all steps."""
    found = [Case(step, fault) for step in steps() for fault in FAULTS]
    # What happens in the middle of a job is no place for a signal from within the command.
    return [one for one in found if not (one.fault == STOPPED and isinstance(one.step.point, Sight))]


def sample(generator: random.Random) -> list[Case]:
    """Every fault, and at every kind of point one; kills of a full create, of an increment, and of one that freezes."""
    by_both: dict[tuple[str, object], list[Case]] = {}
    for kind, points in KINDS.items():
        for case in every():
            if case.step.point in points:
                by_both.setdefault((kind, case.fault), []).append(case)
    faults = [*[KILLED] * KILLS, *FAULTS]
    while True:
        kinds = [*KINDS, *generator.choices(list(KINDS), k=len(faults) - len(KINDS))]
        generator.shuffle(faults)
        # Of some kinds not every fault is possible.
        places = [by_both[place] for place in zip(kinds, faults, strict=True) if place in by_both]
        found = [generator.choice(place) for place in places]
        if is_wide(found):
            return found


def is_wide(chosen: list[Case]) -> bool:
    """Whether all is among them that must be."""
    killed = [one.step for one in chosen if one.fault == KILLED]
    return (
        {one.fault for one in chosen} == set(FAULTS)
        and all(any(one.step.point in points for one in chosen) for points in KINDS.values())
        and any(step.point in KINDS[READ_ONLY] for step in killed)
        and {step.incremental for step in killed if not step.terminal} == {True, False}
        and len({str(one) for one in chosen}) == len(chosen)
    )


def cases() -> list[Case]:
    """In the order of their steps, which is the order of a walk; the long form in random order."""
    if SOAK_SECONDS:
        return random.Random(SEED).sample(every(), len(every()))
    order = [str(step) for step in steps()]
    return sorted(sample(random.Random(SEED)), key=lambda case: order.index(str(case.step)))
