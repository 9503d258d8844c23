"""Many histories, in several processes: what they held, or the first seed that breaks a promise.

A history has one seed, so that any of them can be repeated alone: CUTLINE_SEED=SEED.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, islice

from storage.errors import SnapshotError
from tests.simulation.fleet_model import World, seeded
from tests.simulation.promises import check_history
from tests.soak import SEED

HISTORIES_PER_TASK = 1000
PROCESSES_MAX = 8

Run = Callable[[int], Counter[str]]


class PromiseBrokenError(Exception):
    """A history broke a promise; the message says which, and the seed that repeats it."""


def run_history(seed: int) -> Counter[str]:
    """Make the history of a seed and check every promise on all of its cuts; raise PromiseBrokenError."""
    world = World(seeded(seed))
    world.run()
    try:
        return check_history(world)
    except (AssertionError, SnapshotError) as error:
        raise PromiseBrokenError(f"CUTLINE_SEED={seed}: {error}") from error


def run_histories(first: int, histories: int, run: Run = run_history) -> Counter[str]:
    """Run the histories of successive seeds."""
    tally: Counter[str] = Counter()
    for seed in range(first, first + histories):
        tally.update(run(seed))
    return tally


def run_fleet_of_histories(
    first: int, histories: int | None, seconds: float | None = None, run: Run = run_history
) -> Counter[str]:
    """Run successive seeds from `first` on all cores: as many as asked for, or for so many seconds."""
    deadline = None if seconds is None else time.monotonic() + seconds
    tasks = count() if histories is None else range(-(-histories // HISTORIES_PER_TASK))
    left = ((first + task * HISTORIES_PER_TASK, HISTORIES_PER_TASK, run) for task in tasks)
    processes = min(os.cpu_count() or 1, PROCESSES_MAX)
    tally: Counter[str] = Counter()
    # Spawned, as a process with threads (Arrow's) must not be forked.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(run_histories, *task) for task in islice(left, 2 * processes)}
        try:
            while running:
                done = next(as_completed(running))
                running.remove(done)
                tally.update(done.result())
                if deadline is None or time.monotonic() < deadline:
                    running.update(pool.submit(run_histories, *task) for task in islice(left, 1))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tally


def check_not_vacuous(tally: Counter[str], least_per_thousand: Mapping[str, int]) -> None:
    """Print what the histories held, and fail if something that has to be in them was too rare."""
    print(f"CUTLINE_SEED={SEED}: {dict(sorted(tally.items()))}")  # noqa: T201  # a simulation prints its seed
    thousands = tally["histories"] // 1000
    rare = {name: tally[name] for name, least in least_per_thousand.items() if tally[name] < least * thousands}
    assert not rare, f"CUTLINE_SEED={SEED}: too rare to prove anything: {rare}"
