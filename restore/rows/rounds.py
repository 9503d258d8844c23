"""Load rows again that their tables refused, until the tables have them or no more are accepted.

A CHECK or a generated column may call a function that reads other rows. PostgreSQL does not support that, so it has no
order in which such rows must be loaded. Here, what was refused is loaded again after everything else, in rounds, as
long as a round loads anything. Without refused rows there are no rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec import Struct

from cutline.spark.spark_jobs import raise_first
from cutline.storage.errors import ErrorReport


class LoadEnd(Struct, frozen=True):
    """What a load job `placed` on each target, by its number, and the `problems` of tables that refused rows.

    `again` loads what was refused, and returns the end of the whole job. `has_progressed`: it has loaded something.
    """

    placed: Counter[int]
    problems: Sequence[ErrorReport] = ()
    has_progressed: bool = False
    again: Callable[[], LoadEnd] | None = None


def load_in_rounds(
    run: Callable[[Sequence[Callable[[], LoadEnd]]], list[LoadEnd]], jobs: Sequence[Callable[[], LoadEnd]]
) -> Counter[int]:
    """Run the jobs with `run`, and again those that were refused rows; return what all have placed.

    If a round loads nothing, raises the first error, with the messages of all others in its details.
    """
    placed: Counter[int] = Counter()
    refused_before = 0
    is_first = True
    while jobs:
        ended = run(jobs)
        for end in ended:
            if end.again is None:
                placed.update(end.placed)
        problems = [problem for end in ended for problem in end.problems]
        # A task that Spark ran twice may report that it found everything loaded.
        if not is_first and not any(end.has_progressed for end in ended) and len(problems) >= refused_before:
            raise_first(problems)
        is_first, refused_before = False, len(problems)
        jobs = [end.again for end in ended if end.again is not None]
    return placed
