"""Select the cases of a table for a run, and read the environment variables of tests that have a long form.

`make test` is the same every time: of a table of similar cases it runs the first, or the first of each kind; the others
carry the mark `rest` (tests/run/selection.py). `make all` runs every case.

CUTLINE_SOAK=SECONDS chooses the long form and its approximate duration. Long forms print their seed; CUTLINE_SEED=N
repeats a run. Without CUTLINE_SOAK the seed is 1, so that all runs are the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SOAK_SECONDS = int(os.environ.get("CUTLINE_SOAK", "0"))
SEED = int(os.environ.get("CUTLINE_SEED", "0")) or (random.SystemRandom().randrange(1 << 32) if SOAK_SECONDS else 1)


def first(cases: Iterable[object], count: int = 1) -> list[Any]:
    """Return all cases for `parametrize`, of which `make test` runs the first `count`. A tuple is spread."""
    return [_case(case, is_in_rest=number >= count) for number, case in enumerate(cases)]


def first_of_each(
    cases: Iterable[tuple[Any, ...]], kind: Callable[[tuple[Any, ...]], tuple[object, ...]] = tuple
) -> list[Any]:
    """Return all cases for `parametrize`, of which `make test` runs enough to cover each value of each parameter.

    With `kind`, it covers each value in the tuples that `kind` returns for the cases.
    """
    every = list(cases)
    chosen = covering([kind(case) for case in every])
    return [_case(case, is_in_rest=number not in chosen) for number, case in enumerate(every)]


def covering(cases: list[tuple[object, ...]]) -> set[int]:
    """Return the numbers of cases that cover every value of every parameter: few, by a greedy search."""
    seen: set[tuple[int, object]] = set()
    chosen = set()
    # First choose cases with only new values, so that a product of two lists is covered by its diagonal.
    for is_new in (all, any):
        for number, case in enumerate(cases):
            values = [*enumerate(case)]
            if number not in chosen and is_new(value not in seen for value in values):
                seen.update(values)
                chosen.add(number)
    return chosen


def _case(case: object, *, is_in_rest: bool) -> Any:
    marks = [pytest.mark.rest] if is_in_rest else []
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, *marks])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
