"""Which lanes of a job have ended: every Spark task says it with its result, so that nobody has to be asked.

An accumulator of the Spark context carries it. Spark may run a lane twice; it counts once.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from pyspark import Accumulator, SparkContext

# The numbers of lanes that have ended, by job.
Lanes: TypeAlias = dict[int, set[int]]
_jobs = itertools.count()


class LanesParam:
    """How Spark adds up lanes: as an AccumulatorParam, whose module is not imported for it."""

    def zero(self, _: Lanes) -> Lanes:
        """What a task begins with."""
        return {}

    def addInPlace(self, total: Lanes, more: Lanes) -> Lanes:  # noqa: N802  # Spark's name
        """Add what another task says."""
        for job, lanes in more.items():
            total.setdefault(job, set()).update(lanes)
        return total


class EndedLanes:
    """The lanes of one job that have ended. Tasks are sent `accumulator` and `job`, and call `say_ended`."""

    def __init__(self, context: SparkContext) -> None:
        self.accumulator, self.job = _accumulator_of(context), next(_jobs)
        self._seen: set[int] = set()

    def new(self) -> set[int]:
        """Those that have ended since the last call."""
        found = self.accumulator.value.get(self.job, set()) - self._seen
        self._seen |= found
        return found

    def left(self, count: int) -> set[int]:
        """Those of the first `count` lanes, which have all ended, that no call has returned."""
        return set(range(count)) - self._seen

    def close(self) -> None:
        """Forget the job."""
        self.accumulator.value.pop(self.job, None)


def say_ended(accumulator: Accumulator[Lanes], job: int, lane: int) -> None:
    """Let the driver know, with the task's result, that the lane has ended; in an executor."""
    accumulator.add({job: {lane}})


@lru_cache(maxsize=1)
def _accumulator_of(context: SparkContext) -> Accumulator[Lanes]:
    # One for all jobs: Spark never forgets an accumulator.
    param: Any = LanesParam()
    found: Accumulator[Lanes] = context.accumulator({}, param)
    return found
