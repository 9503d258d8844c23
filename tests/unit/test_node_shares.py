"""How far the nodes of a job are, as its tasks end."""

from __future__ import annotations

from dataclasses import dataclass, field

from cutline.fleet.progress import Reading, Silent, StepPace
from cutline.spark.spark_jobs import NodeShares


@dataclass
class Kept(Silent):
    """Keeps the last reading of each node, and how far the step's own count is."""

    last: dict[str, Reading] = field(default_factory=dict)
    done: int = 0

    def tell(self, reading: Reading) -> None:
        self.last[reading.node] = reading

    def advance(self, done: int) -> None:
        self.done += done


def test_bytes_count_for_the_node_of_their_task() -> None:
    kept, tasks = Kept(), [("a", 10), ("a", 30), ("b", 5)]
    shares = NodeShares[tuple[str, int]].of_tasks(kept, tasks, lambda one: one[0], lambda one: one[1])
    shares.begin()
    assert kept.last == {
        "a": Reading(0, 40, "bytes", "a"),
        "b": Reading(0, 5, "bytes", "b"),
        "": Reading(0, 45, "bytes"),
    }
    shares.end([("a", 30)])
    assert kept.last["a"] == Reading(30, 40, "bytes", "a")
    shares.end([("b", 5), ("a", 10)])
    assert kept.last == {
        "a": Reading(40, 40, "bytes", "a"),
        "b": Reading(5, 5, "bytes", "b"),
        "": Reading(45, 45, "bytes"),
    }
    assert kept.done == 3


def test_where_bytes_are_not_known_tasks_count() -> None:
    kept = Kept()
    shares = NodeShares[str].of_tasks(kept, ["a", "b", "b"], str)
    shares.end(["b"])
    assert kept.last == {"b": Reading(1, 2, "tasks", "b"), "": Reading(1, 3, "tasks")}


def test_the_least_advanced_nodes_are_those_with_the_smallest_parts_done() -> None:
    step = StepPace("copy", None, "")
    for node, done, total in (("a", 50, 100), ("b", 60, 1000), ("c", 0, 0), ("d", 0, 10), ("e", 7, None)):
        step.take(Reading(done, total, "bytes", node))
    step.take(Reading(117, 1110, "bytes"))
    # Of c nothing is to do; of e nobody knows how much.
    assert step.least_advanced(10) == ["d", "e", "b", "a", "c"]
    assert step.least_advanced(3) == ["d", "e", "b"]
