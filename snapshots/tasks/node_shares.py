"""How far each node is while the tasks of a job end: what every task counts for, and on which node."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from cutline.fleet.progress import Progress, Reading

Task = TypeVar("Task")


def _one(_: object) -> int:
    return 1


class NodeShares(Generic[Task]):
    """Tells `progress` how much is done on each node and on all together, as tasks end.

    `totals` is what there is to do by node, in `unit`s; a task counts for `amount_of` it, on the node `node_of` it.
    Tasks are advanced, too. Any thread may say that some have ended.
    """

    def __init__(
        self,
        progress: Progress,
        totals: Mapping[str, int],
        node_of: Callable[[Task], str],
        amount_of: Callable[[Task], int],
        unit: str = "bytes",
    ) -> None:
        self.progress, self._totals, self._unit = progress, totals, unit
        self._node_of, self._amount_of = node_of, amount_of
        self._done = Counter[str]()
        self._lock = threading.Lock()

    @classmethod
    def of_tasks(
        cls,
        progress: Progress,
        tasks: Sequence[Task],
        node_of: Callable[[Task], str],
        bytes_of: Callable[[Task], int] | None = None,
    ) -> NodeShares[Task]:
        """The shares of these tasks, which are all that there is to do; by their number if bytes are not known."""
        amount_of, unit = (bytes_of, "bytes") if bytes_of else (_one, "tasks")
        totals = Counter[str]()
        for task in tasks:
            totals[node_of(task)] += amount_of(task)
        return cls(progress, totals, node_of, amount_of, unit)

    def begin(self) -> None:
        """Tell what there is to do."""
        with self._lock:
            self._tell(self._totals)

    def end(self, tasks: Sequence[Task]) -> None:
        """Count tasks that have ended."""
        if not tasks:
            return
        self.progress.advance(len(tasks))
        with self._lock:
            for task in tasks:
                self._done[self._node_of(task)] += self._amount_of(task)
            self._tell(dict.fromkeys(map(self._node_of, tasks)))

    def _tell(self, nodes: Mapping[str, object]) -> None:
        for node in nodes:
            self.progress.tell(Reading(self._done[node], self._totals.get(node), self._unit, node))
        self.progress.tell(Reading(self._done.total(), sum(self._totals.values()), self._unit))
