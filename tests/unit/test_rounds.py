"""Load jobs whose tables refuse rows are run again, as long as that loads anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from cutline.restore.rows.load import LoadError
from cutline.restore.rows.rounds import LoadEnd, load_in_rounds
from cutline.storage.errors import ErrorReport, report_of

Job = Callable[[], LoadEnd]


def problem(name: str) -> ErrorReport:
    return report_of(LoadError(f"table {name} refuses a row", hint="drop its CHECK"))


class Rounds:
    """Runs jobs one after the other and counts them by round."""

    def __init__(self) -> None:
        self.jobs: list[int] = []

    def run(self, jobs: Sequence[Job]) -> list[LoadEnd]:
        self.jobs.append(len(jobs))
        return [job() for job in jobs]


def refused(*tables: str, again: Job, has_progressed: bool = False) -> LoadEnd:
    return LoadEnd(Counter(), [problem(table) for table in tables], has_progressed, again)


def done(rows: int) -> LoadEnd:
    return LoadEnd(Counter({0: rows}), has_progressed=True)


def test_jobs_run_once_if_nothing_is_refused() -> None:
    rounds = Rounds()
    assert load_in_rounds(rounds.run, [lambda: done(1), lambda: done(2)]) == {0: 3}
    assert rounds.jobs == [2]


def test_only_refused_jobs_run_again_until_they_are_done() -> None:
    rounds = Rounds()

    def second() -> LoadEnd:
        return refused("a", again=lambda: done(4), has_progressed=True)

    assert load_in_rounds(rounds.run, [lambda: done(1), lambda: refused("a", "b", again=second)]) == {0: 5}
    assert rounds.jobs == [2, 1, 1]


def test_a_round_that_loads_nothing_ends_with_all_that_is_refused() -> None:
    rounds = Rounds()

    def second() -> LoadEnd:
        return refused("a", "b", again=second)

    with pytest.raises(LoadError, match="table a") as raised:
        load_in_rounds(rounds.run, [second, lambda: refused("c", again=lambda: refused("c", again=second))])
    assert raised.value.details["others"] == ["table b refuses a row", "table c refuses a row"]
    assert rounds.jobs == [2, 2]


def test_fewer_refused_tables_are_progress_even_if_no_task_reports_it() -> None:
    """A task that Spark ran again after its commit finds everything loaded."""
    rounds = Rounds()
    jobs = [lambda: refused("a", "b", again=lambda: refused("b", again=lambda: done(1)))]
    assert load_in_rounds(rounds.run, jobs) == {0: 1}
