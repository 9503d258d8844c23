"""How far a step is, and how fast: what progress as JSON lines and signs of life say of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cutline.fleet.progress import Reading


@dataclass(frozen=True, slots=True)
class NodePace:
    """The last reading, units per second since the first one, and the seconds that the rest takes at that rate.

    None: it is not known.
    """

    reading: Reading
    rate: float | None
    seconds_left: float | None


@dataclass(slots=True)
class StepPace:
    """The step in progress. Times are on the monotonic clock.

    `readings` are the last ones, `first` those that the rates begin at, with their times; both by node, "" for all
    together.
    """

    name: str
    total: int | None
    unit: str
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    readings: dict[str, Reading] = field(default_factory=dict)
    first: dict[str, tuple[int, float]] = field(default_factory=dict)

    def take(self, reading: Reading) -> None:
        """Take a reading instead of the step's own count, or that of a node."""
        self.readings[reading.node] = reading
        if not self.first.get(reading.node, (0, 0.0))[0]:
            # What takes long to begin is not slow to go on.
            self.first[reading.node] = (reading.done, time.monotonic())

    def least_advanced(self, count: int) -> list[str]:
        """Of the nodes that have readings, those that have done the smallest parts: `count` of them at most."""

        def part(node: str) -> float:
            one = self.readings[node]
            # Where nothing is to do, all is done.
            return one.done / one.total if one.total else float(one.total is not None)

        return sorted((node for node in self.readings if node), key=lambda node: (part(node), node))[:count]

    def pace(self, node: str, now: float) -> NodePace:
        """How far it is, and how fast, on one node or ("") on all together."""
        reading = self.readings.get(node) or Reading(self.done, self.total, self.unit, node)
        begun, since = self.first.get(node, (0, self.began))
        rate = (reading.done - begun) / (now - since) if reading.done > begun and now > since else None
        left = max((reading.total - reading.done) / rate, 0.0) if rate and reading.total is not None else None
        return NodePace(reading, rate, left)
