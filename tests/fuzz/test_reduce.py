"""A case round-trips through its text, and a reduced case keeps what makes it fail."""

from __future__ import annotations

import pytest

from tests.fuzz.drawing import draw_cases
from tests.fuzz.reduce import Place, reduce_case, without
from tests.fuzz.script import Case, Fate, Statement, Transaction, format_case, parse_case


def transaction(*texts: str, fate: Fate = Fate.COMMIT) -> Transaction:
    return Transaction(fate, ((0, tuple(Statement(text) for text in texts)), (1, (Statement("other"),))))


CASE = Case(
    (((0, 1), "CREATE one"), ((1,), "CREATE\ntwo")),
    (
        (transaction("a", "b"), transaction("c", fate=Fate.HALF)),
        tuple(transaction(f"d{n}", f"e{n}", fate=Fate.HOLD_LONG_COMMIT) for n in range(9)),
        (transaction("f"),),
    ),
    {"check": "yes", "set search_path": "'Odd \"S\"'"},
)


def texts_of(case: Case) -> list[str]:
    found = [
        statement for interval in case.intervals for one in interval for _, part in one.parts for statement in part
    ]
    return [*(text for _, text in case.setup), *(statement.sql for statement in found)]


def test_a_case_round_trips_through_its_text() -> None:
    assert parse_case(format_case(CASE)) == CASE
    for case in draw_cases(20261120, 3):
        assert parse_case(format_case(case)) == case


@pytest.mark.parametrize("needed", [{"e7"}, {"CREATE one", "a", "e3"}, {"b", "d0", "d8", "f"}])
def test_a_reduced_case_has_only_what_makes_it_fail(needed: set[str]) -> None:
    small = reduce_case(CASE, lambda case: needed <= set(texts_of(case)), 60)
    assert set(texts_of(small)) == needed
    assert small.options == CASE.options


def test_a_case_without_time_to_reduce_it_stays_whole() -> None:
    assert reduce_case(CASE, lambda case: True, -1) == CASE


def test_intervals_keep_their_places() -> None:
    everything: set[Place] = {(1, t, p, s) for t in range(9) for p in range(2) for s in range(2)}
    assert [len(interval) for interval in without(CASE, everything).intervals] == [2, 0, 1]
