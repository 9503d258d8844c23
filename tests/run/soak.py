"""Which cases of a table a run has, and the environment variables of tests that have a long form.

`make test` is the same every time: of a table of similar cases it has the first, or the first of each kind, and
`make all` has every case. The others carry the mark `rest` (tests/run/selection.py).

CUTLINE_SOAK=SECONDS chooses the long form and its approximate duration. Long forms print their seed: CUTLINE_SEED=N
repeats one. Without CUTLINE_SOAK the seed is 1, so that no run differs from the one before.
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
    """Return all cases for `parametrize`, of which `make test` runs enough to have each value of each parameter.

    With `kind` it runs enough to have each value of what that returns of a case.
    """
    every = list(cases)
    chosen = covering([kind(case) for case in every])
    return [_case(case, is_in_rest=number not in chosen) for number, case in enumerate(every)]


def covering(cases: list[tuple[object, ...]]) -> set[int]:
    """The numbers of cases in which every value of every parameter occurs; as few as a simple search finds."""
    seen: set[tuple[int, object]] = set()
    chosen = set()
    # Cases with new values only come first: a product of two lists is then covered by its diagonal.
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
