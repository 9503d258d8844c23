"""The cases of the fault walk: every step is of exactly one kind, and every sample has all kinds and all faults."""

from __future__ import annotations

import random

from cutline.fleet.crash_points import CrashPoint
from tests.faults.cases import (
    FAULTS,
    KILLED,
    KINDS,
    NEW_TABLE_POINTS,
    READ_ONLY,
    RENEWING_POINTS,
    STOPPED,
    Case,
    all_steps,
    sample,
)
from tests.faults.points import FULL_POINTS, INCREMENT_POINTS, spark_crash_points, terminal_crash_points
from tests.faults.sights import TaskEffect

SAMPLES = 50


def test_every_point_is_a_step_of_exactly_one_kind() -> None:
    assert {(step.incremental, step.point) for step in all_steps() if isinstance(step.point, CrashPoint)} == {
        *((False, point) for point in FULL_POINTS),
        *((True, point) for point in terminal_crash_points(spark_crash_points(INCREMENT_POINTS))),
        *((True, point) for point, _ in NEW_TABLE_POINTS),
        *((True, point) for _, point in RENEWING_POINTS),
    }
    for step in all_steps():
        assert len([kind for kind, points in KINDS.items() if step.point in points]) == 1, step


def test_every_sample_has_every_fault_and_every_kind_of_point() -> None:
    for seed in range(SAMPLES):
        chosen = sample(random.Random(seed))
        assert {case.name for case in chosen} == {Case(all_steps()[0], fault).name for fault in FAULTS}
        assert {kind for case in chosen for kind, points in KINDS.items() if case.step.point in points} == set(KINDS)
        killed = [case.step for case in chosen if case.fault == KILLED]
        assert {(step.incremental, step.terminal) for step in killed} >= {(False, False), (True, False), (True, True)}
        assert any(step.point in KINDS[READ_ONLY] for step in killed)
        assert any(step.renews for step in killed)
        assert not [case for case in chosen if case.fault == STOPPED and isinstance(case.step.point, TaskEffect)]
