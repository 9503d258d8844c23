"""Measure the steps of a restore while it runs, and tell how long the rest takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.progress import Progress, Reading
from restore.estimates.model import Estimate, RestoreStep
from snapshots.records.restore_figures import NodeFigures, RestoreFigures, StepFigures

# What is part of a step although progress names it otherwise.
PARTS = {
    "check owners of large objects": RestoreStep.LARGE_OBJECTS,
    # Of a restore into tables that exist.
    "prepare tables": RestoreStep.DATABASES,
    "verify foreign keys": RestoreStep.INDEXES,
    "set sequences": RestoreStep.SWAP,
}
# Of these a reading says how much is done.
COUNTED = (RestoreStep.ROWS, RestoreStep.INDEXES)
# From this part of a step on, its own pace alone counts.
OWN_PACE_SHARE = 0.5
# The part of the estimate that has to pass until the pace so far counts as much as the estimate.
TRUST_SHARE = 0.15
# How much slower than expected the rest is thought to be, at most, because of one step of unknown progress.
FACTOR_MAX = 5.0


@dataclass(slots=True)
class RestorePace:
    """A Progress that passes everything on to `target`, with the seconds that are left by `estimate`.

    `seconds` are those of the steps so far, and `nodes` has the nodes that have ended. The step in progress counts by
    its own pace, as soon as a reading says how much of it is done; the steps after it by the estimate, and by how the
    steps so far compare with theirs. If it `is_resumed`, the first reading of a step is of what was done before.
    """

    target: Progress
    estimate: Estimate
    operation: str
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, NodeFigures] = field(default_factory=dict)
    is_resumed: bool = False
    _before: int | None = None
    _step: str = ""
    _done: float = 0.0
    _idle: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        """Pass it on, and how long the rest takes."""
        with self._lock:
            now = time.monotonic()
            if self._step:
                self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._began
            self._step, self._done, self._idle, self._began = PARTS.get(name, name), 0.0, 0.0, now
            self._before = None if self.is_resumed else 0
        self.target.step(name, total=total, unit=unit)
        self.target.tell(Reading(0, total, unit, operation=self.operation, seconds_left=self.seconds_left()))

    def end(self) -> None:
        """End the last step."""
        with self._lock:
            if self._step:
                self.seconds[self._step] = self.seconds.get(self._step, 0.0) + time.monotonic() - self._began
            self._step = ""

    def advance(self, done: int) -> None:
        """Pass it on."""
        self.target.advance(done)

    def tell(self, reading: Reading) -> None:
        """Pass it on, with the operation, and how long the rest takes."""
        if reading.total and not reading.node and self._step in COUNTED:
            if self._before is None:
                self._before = reading.done
            self._done = min((reading.done - self._before) / max(reading.total - self._before, 1), 1.0)
            if self._done <= 0.0:
                self._idle = time.monotonic() - self._began
        told = Reading(reading.done, reading.total, reading.unit, reading.node, self.operation, self.seconds_left())
        self.target.tell(told)

    def note(self, text: str) -> None:
        """Pass it on."""
        self.target.note(text)

    def reached(self, point: str, *, node: str = "") -> None:
        """Pass it on."""
        self.target.reached(point, node=node)

    def seconds_left(self) -> float | None:
        """The seconds until the restore ends; None in a step that the estimate does not know."""
        with self._lock:
            steps = [str(step) for step in self.estimate.seconds]
            if self._step not in steps:
                return None
            expected = {str(step): seconds for step, seconds in self.estimate.seconds.items()}
            elapsed, done, due = time.monotonic() - self._began, self._done, expected[self._step]
            before = steps[: steps.index(self._step)]
            after = sum(expected[step] for step in steps[steps.index(self._step) + 1 :])
            # How the steps so far compare with their estimates.
            trust = TRUST_SHARE * self.estimate.total
            factor = (sum(self.seconds.get(step, 0.0) for step in before) + trust) / (
                sum(expected[step] for step in before) + trust
            )
            if done <= 0.0:
                # Nothing tells how far it is. What takes longer than expected says the same of the rest.
                return max(due * factor - elapsed, 0.0) + after * max(factor, min(elapsed / max(due, 1.0), FACTOR_MAX))
            weight = min(done / OWN_PACE_SHARE, 1.0)
            # Its pace is that of the work; what is slow to begin is not slow to go on.
            idle = min(self._idle, self.estimate.fixed.get(RestoreStep(self._step), 0.0))
            left = (weight * (elapsed - idle) / done + (1 - weight) * max(due * factor - idle, 0.0)) * (1 - done)
            whole = weight * (idle + (elapsed - idle) / done) + (1 - weight) * due * factor
            return left + after * (weight * done * whole / max(due, 0.1) + (1 - weight * done) * factor)

    def end_node(self, node: str, rows: int, seconds: Mapping[RestoreStep, float]) -> None:
        """Keep what was measured of one node."""
        self.nodes[node] = NodeFigures(rows, {str(step): round(one, 3) for step, one in seconds.items()})

    def figures(self, stored_bytes: int) -> RestoreFigures:
        """What was measured."""
        self.end()
        amounts = {str(step): amount for step, amount in self.estimate.amounts.items()}
        steps = {
            name: StepFigures(round(seconds, 3), amounts[name])
            for name, seconds in self.seconds.items()
            if name in amounts
        }
        return RestoreFigures(
            rows=sum(one.rows for one in self.nodes.values()),
            bytes=stored_bytes,
            seconds=round(sum(one.seconds for one in steps.values()), 3),
            steps=steps,
            nodes=dict(self.nodes),
        )
