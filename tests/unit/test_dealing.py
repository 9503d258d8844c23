"""The lanes of a job: every task once, evenly, and on a node no more at a time than it may serve."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cutline.spark.spark_jobs import (
    LANE_BYTES,
    LANES_AT_LEAST,
    LANES_PER_CORE_MIN,
    Cores,
    Dealing,
    deal,
    limited_sessions,
)


@dataclass(frozen=True)
class Work:
    size: int
    nodes: tuple[str, ...] = ()


NODES = ("a", "b", "c", "d")
TASKS = st.lists(
    st.builds(
        Work, st.integers(0, 10 * LANE_BYTES), st.lists(st.sampled_from(NODES), max_size=2, unique=True).map(tuple)
    )
)
LIMITS = st.dictionaries(st.sampled_from(NODES), st.integers(1, 5))


def dealing(limits: dict[str, int] | None = None) -> Dealing[Work]:
    return Dealing(lambda task: task.size, lambda task: task.nodes, limits or {})


@given(TASKS, LIMITS, st.integers(1, 40))
def test_each_task_is_in_one_lane_and_no_node_has_more_lanes_than_it_may_serve(
    tasks: list[Work], limits: dict[str, int], cores: int
) -> None:
    lanes = deal(tasks, dealing(limits), Cores(cores, math.inf))
    assert sorted(number for lane in lanes for number in lane) == list(range(len(tasks)))
    assert all(lanes)
    for node, most in limits.items():
        assert sum(any(node in tasks[number].nodes for number in lane) for lane in lanes) <= most


@given(st.lists(st.integers(1, 3 * LANE_BYTES), min_size=1, max_size=2000), st.integers(1, 8))
def test_lanes_are_about_equal_and_no_more_than_bytes_and_cores_are_worth(sizes: list[int], cores: int) -> None:
    lanes = deal([Work(size) for size in sizes], dealing(), Cores(cores, cores))
    loads = [sum(sizes[number] for number in lane) for lane in lanes]
    # The bound of longest-processing-time-first scheduling (Graham 1969), loosely.
    assert max(loads) <= sum(sizes) / len(lanes) + max(sizes)
    assert len(lanes) <= max(sum(sizes) // LANE_BYTES, LANES_PER_CORE_MIN * cores)
    assert len(lanes) <= Cores(cores, cores).lanes_max


def test_many_small_tasks_are_few_lanes_and_some_large_ones_are_a_lane_each() -> None:
    two = Cores(2, 2)
    assert len(deal([Work(20_000)] * 827, dealing(), two)) == LANES_PER_CORE_MIN * 2
    assert len(deal([Work(LANE_BYTES)] * 100, dealing(), two)) == 100
    assert len(deal([Work(LANE_BYTES)] * 100_000, dealing(), two)) == LANES_AT_LEAST


def test_equal_tasks_keep_their_order_and_the_largest_begin() -> None:
    tasks = [Work(LANE_BYTES), Work(2 * LANE_BYTES), Work(LANE_BYTES), Work(2 * LANE_BYTES)]
    assert deal(tasks, dealing(), Cores(2, 2)) == [[1], [3], [0], [2]]


def test_the_tasks_of_one_node_do_not_wait_for_those_of_another() -> None:
    tasks = [Work(LANE_BYTES, ("a",))] * 10 + [Work(LANE_BYTES, ("b",))] * 10
    lanes = deal(tasks, dealing({"a": 2}), Cores(24, 24))
    assert sorted(map(len, lanes)) == [1] * 10 + [5] * 2


def session(master: str, cores: int, **settings: str) -> Any:
    """What `limited_sessions` asks of a Spark session."""
    conf = SimpleNamespace(get=lambda name, default=None: settings.get(name.removeprefix("spark."), default))
    context = SimpleNamespace(master=master, defaultParallelism=cores, getConf=lambda: conf)
    return SimpleNamespace(sparkContext=context)


def test_sessions_are_limited_where_there_may_be_more_tasks_than_that() -> None:
    given = {"a": 4, "b": 40}
    assert limited_sessions(session("local[*]", 2), given) == {}
    assert limited_sessions(session("local[8]", 8), given) == {"a": 4}
    assert limited_sessions(session("local[8]", 8), given, jobs=2) == {"a": 2}
    # Its executors are not all there yet.
    assert limited_sessions(session("local-cluster[3,16,1024]", 2), given) == given
    # More executors may come.
    assert limited_sessions(session("spark://m:7077", 2), given) == given
    assert limited_sessions(session("spark://m:7077", 2, **{"cores.max": "20"}), given) == {"a": 4}
    # A task may run twice at a time.
    assert limited_sessions(session("spark://m:7077", 2, speculation="true"), given) == {"a": 2, "b": 20}
    assert limited_sessions(session("spark://m:7077", 2), {"a": 1}, jobs=3) == {"a": 1}
