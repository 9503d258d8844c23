"""Which of a target's tables have all their rows while others are still being loaded.

A table is complete when every task that may bring rows of it is in the target's ledger. What is in the ledger loads
nothing any more, so a complete table stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import psycopg
from msgspec import Struct, field

from cutline.restore.rows.load import LoadTarget, LoadTask

DONE_QUERY = "SELECT pg_catalog.convert_to(task, 'UTF8') FROM {ledger} WHERE groupno = 0"


class ExpectedTasks(Struct):
    """The tasks that bring rows to a target's tables, apart from those that are known to be in its ledger.

    `groups` are the groups of which each task may have rows, by the task's name; `left` counts the tasks of each group.
    `complete` are the complete groups that have not been returned yet.
    """

    target: LoadTarget
    complete: list[int]
    groups: dict[str, Collection[int]] = field(default_factory=dict)
    left: Counter[int] = field(default_factory=Counter)

    def find_complete(self, connection: psycopg.Connection[Any]) -> list[int]:
        """Return the groups that are complete and were not returned before, according to the ledger."""
        found = connection.execute(DONE_QUERY.format(ledger=self.target.ledger).encode())
        return self.note_done(bytes(task).decode() for (task,) in found)

    def note_done(self, tasks: Iterable[str]) -> list[int]:
        """Return the groups that are complete once these tasks are done, unless they were returned before."""
        for task in tasks:
            for group in self.groups.pop(task, ()):
                self.left[group] -= 1
                if not self.left[group]:
                    self.complete.append(group)
        complete, self.complete = self.complete, []
        return complete


def expect_tasks(
    tasks: Iterable[LoadTask], targets: Mapping[int, LoadTarget], unsure: Mapping[int, Collection[int]]
) -> dict[int, ExpectedTasks]:
    """Return what is expected of these tasks, by the number of the target; none of them has routes.

    `unsure` are the groups, by target, that may get rows from others than these tasks, so they are never complete.
    Neither are groups that are loaded through a root, because their rows may be in another table.
    """
    chosen: dict[int, set[int]] = {
        number: target.groups.keys() - target.roots.keys() - set(unsure.get(number, ()))
        for number, target in targets.items()
    }
    expected = {number: ExpectedTasks(target, []) for number, target in targets.items()}
    for task in tasks:
        for number, target in task.feed.targets.items():
            if groups := chosen[number] & target.groups.keys():
                expected[number].groups[task.name] = groups
                expected[number].left.update(groups)
    for number, of_target in expected.items():
        of_target.complete += sorted(chosen[number] - of_target.left.keys())
    return expected
