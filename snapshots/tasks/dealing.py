"""Deal the tasks of a job: many small ones to one Spark task, and to a node no more at a time than it may serve.

A Spark task costs 10 to 50 ms of processor time, however little it does, and a session of a node has to be free while
it runs. So tasks are dealt to lanes. A lane is one Spark task, which does its tasks one after the other.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
# A lane of objects or pages has at least this many bytes, unless there are too few lanes for all cores.
LANE_BYTES = 4 << 20
# Per core: enough that the lanes' different lengths even out.
LANES_PER_CORE_MIN, LANES_PER_CORE_MAX = 4, 16
# Up to so many lanes cost little, and show how far a job is.
LANES_AT_LEAST = 256
LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,")


def _no_nodes(_: Any) -> Iterable[str]:
    return ()


# In Python 3.11 a class that is generic and frozen can't have slots, too.
@dataclass(frozen=True)
class Dealing(Generic[Task]):
    """The bytes of a task, and the nodes that it has sessions on; `sessions` are by node the most at a time."""

    bytes_of: Callable[[Task], int]
    nodes_of: Callable[[Task], Iterable[str]] = _no_nodes
    sessions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cores:
    """How many cores a session's executors have now, and the most tasks that they may ever run at once."""

    now: int
    most: float

    @property
    def lanes_max(self) -> int:
        """How many lanes a job has at most."""
        return max(LANES_AT_LEAST, LANES_PER_CORE_MAX * self.now)


def cores_of(spark: SparkSession) -> Cores:
    """The session's cores. On clusters more executors may come, unless `spark.cores.max` limits them."""
    now, master = max(spark.sparkContext.defaultParallelism, 1), str(spark.sparkContext.master)
    if cluster := LOCAL_CLUSTER.match(master):
        # Some of its executors may not have come yet.
        now = math.prod(map(int, cluster.groups()))
    limit = spark.conf.get("spark.cores.max", None)
    return Cores(now, now if master.startswith("local") else float(limit) if limit else math.inf)


def limited_sessions(spark: SparkSession, sessions: Mapping[str, int], jobs: int = 1) -> dict[str, int]:
    """`sessions` by node for each of so many jobs side by side; those that no number of tasks can exceed are left out.

    A task that Spark runs twice, because it seems slow, has two sessions.
    """
    most = cores_of(spark).most
    copies = 2 if spark.conf.get("spark.speculation", "false") == "true" else 1
    return {node: max(number // (jobs * copies), 1) for node, number in sessions.items() if number < most * copies}


def deal(tasks: Sequence[Task], dealing: Dealing[Task], cores: Cores) -> list[list[int]]:
    """The lanes, as numbers of tasks; those that begin with the largest tasks come first.

    `dealing.sessions` has only nodes that the job could ask for more sessions than that.
    """
    sizes = [max(dealing.bytes_of(task), 1) for task in tasks]
    total = sum(sizes)
    wanted = min(max(total // LANE_BYTES, LANES_PER_CORE_MIN * cores.now), cores.lanes_max)
    lanes: list[list[int]] = []
    for some, most in _together(tasks, dealing):
        share = math.ceil(wanted * sum(sizes[number] for number in some) / total)
        lanes += _spread(some, sizes, int(min(share, most, len(some))))
    return sorted(lanes, key=lambda lane: -sizes[lane[0]])


def _together(tasks: Sequence[Task], dealing: Dealing[Task]) -> Iterable[tuple[list[int], float]]:
    """The numbers of the tasks that share nodes with limits, directly or by others; each with the least limit."""
    parents = {node: node for node in dealing.sessions}

    def root(node: str) -> str:
        while parents[node] != node:
            parents[node] = node = parents[parents[node]]
        return node

    first: dict[int, str] = {}
    for number, task in enumerate(tasks):
        for node in dealing.nodes_of(task):
            if node in parents:
                parents[root(node)] = root(first.setdefault(number, node))
    found: dict[str, list[int]] = {}
    for number in range(len(tasks)):
        found.setdefault(root(first[number]) if number in first else "", []).append(number)
    least = dict.fromkeys(found, math.inf)
    for node, most in dealing.sessions.items():
        if (one := root(node)) in least:
            least[one] = min(least[one], most)
    return [(numbers, least[one]) for one, numbers in found.items()]


def _spread(numbers: Sequence[int], sizes: Sequence[int], count: int) -> list[list[int]]:
    """These tasks in `count` lanes of about equal bytes: the largest first, each to the lane that has the least."""
    lanes: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, lane) for lane in range(count)]
    for number in sorted(numbers, key=lambda number: -sizes[number]):
        load, lane = heap[0]
        lanes[lane].append(number)
        heapq.heapreplace(heap, (load + sizes[number], lane))
    return lanes
