"""Reducing a case that fails: statements are removed as long as it still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.script import Case, Transaction

Place = tuple[int, ...]


def reduce_case(case: Case, fails: Callable[[Case], bool], seconds_max: float) -> Case:
    """The smallest case that was found in that time and for which `fails` is true."""
    deadline = time.monotonic() + seconds_max
    chunk = len(list(places(case))) // 2
    while chunk:
        start = 0
        while start < len(found := list(places(case))):
            if time.monotonic() > deadline:
                return case
            smaller = without(case, set(found[start : start + chunk]))
            if fails(smaller):
                case = smaller
            else:
                start += chunk
        chunk //= 2
    return case


def places(case: Case) -> Iterator[Place]:
    """The places of all statements, those of the last transactions first."""
    for i, interval in reversed([*enumerate(case.intervals)]):
        for t, transaction in reversed([*enumerate(interval)]):
            for p, (_, statements) in enumerate(transaction.parts):
                yield from ((i, t, p, s) for s in range(len(statements)))
    yield from ((place,) for place in reversed(range(len(case.setup))))


def without(case: Case, left_out: set[Place]) -> Case:
    """The case without these statements, and without transactions and last intervals that become empty."""

    def strip(place: Place, transaction: Transaction) -> Transaction:
        parts = (
            (shard, tuple(one for s, one in enumerate(statements) if (*place, p, s) not in left_out))
            for p, (shard, statements) in enumerate(transaction.parts)
        )
        return replace(transaction, parts=tuple((shard, statements) for shard, statements in parts if statements))

    intervals = [
        tuple(found for t, one in enumerate(interval) if (found := strip((i, t), one)).parts)
        for i, interval in enumerate(case.intervals)
    ]
    setup = tuple(one for place, one in enumerate(case.setup) if (place,) not in left_out)
    while len(intervals) > 1 and not intervals[-1]:
        intervals.pop()
    return replace(case, setup=setup, intervals=tuple(intervals))
