"""Run many histories in several processes: count what occurred in them, or report the first seed that breaks a promise.

Every history has its own seed, so each can be repeated alone: CUTLINE_SEED=SEED.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import count, cycle, islice

from cutline.storage.errors import SnapshotError
from tests.run.soak import SEED
from tests.simulation.fleet_model import World, seeded
from tests.simulation.promises import check_histories

HISTORIES_PER_TASK = 250
PROCESSES_MAX = 8
GARBAGE_OBJECTS = 50_000

# Runs successive seeds: the first, and how many.
RunSeeds = Callable[[int, int], Counter[str]]
# How many fleets are resolved together, as a cycle: most histories run with many others, one in sixty alone.
SIDE_BY_SIDE = (*(1,) * 4, 2, 4, 8, 16, *(66,) * 4)


class PromiseBrokenError(Exception):
    """A history broke a promise; the message says which, and the seed that repeats it."""


def run_history(seed: int) -> Counter[str]:
    """Run the history of a seed, and check every promise on all its cuts; raise PromiseBrokenError."""
    return _run_side_by_side(range(seed, seed + 1))


def run_fleets(first: int, histories: int) -> Counter[str]:
    """Run the histories of successive seeds, alone or side by side; raise PromiseBrokenError.

    Resolving takes the most time, and for many fleets hardly more than for one. Some run alone, because only then can
    events of some kind be missing altogether.
    """
    tally: Counter[str] = Counter()
    sizes = cycle(SIDE_BY_SIDE)
    while histories:
        seeds = range(first, first + min(next(sizes), histories))
        tally.update(_run_side_by_side(seeds))
        first, histories = first + len(seeds), histories - len(seeds)
    return tally


def _run_side_by_side(seeds: range) -> Counter[str]:
    worlds = [World(seeded(seed), label=f"{seed}.") for seed in seeds]
    for world in worlds:
        world.run()
    try:
        return check_histories(worlds)
    except (AssertionError, SnapshotError) as error:
        for seed in seeds if len(seeds) > 1 else ():
            run_history(seed)
        which = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}, side by side only"
        raise PromiseBrokenError(f"CUTLINE_SEED={which}: {error}") from error


def run_on_all_cores(
    first: int, histories: int | None, seconds: float | None = None, run: RunSeeds = run_fleets
) -> Counter[str]:
    """Run successive seeds from `first` on all cores: as many as `histories`, or for `seconds`."""
    deadline = None if seconds is None else time.monotonic() + seconds
    tasks = count() if histories is None else range(-(-histories // HISTORIES_PER_TASK))
    left = ((first + task * HISTORIES_PER_TASK, HISTORIES_PER_TASK) for task in tasks)
    processes = min(os.cpu_count() or 1, PROCESSES_MAX)
    tally: Counter[str] = Counter()
    # A process with threads (Arrow's) must not be forked.
    spawning = multiprocessing.get_context("spawn")
    # Histories are cyclic garbage: with the default threshold, collecting it takes a seventh of the time.
    with ProcessPoolExecutor(processes, spawning, gc.set_threshold, (GARBAGE_OBJECTS,)) as pool:
        running = {pool.submit(run, *task) for task in islice(left, 2 * processes)}
        try:
            while running:
                done = next(as_completed(running))
                running.remove(done)
                tally.update(done.result())
                if deadline is None or time.monotonic() < deadline:
                    running.update(pool.submit(run, *task) for task in islice(left, 1))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tally


def check_not_vacuous(tally: Counter[str], least_per_thousand: Mapping[str, int]) -> None:
    """Print what occurred in the histories, and fail if something that must occur was too rare."""
    print(f"CUTLINE_SEED={SEED}: {dict(sorted(tally.items()))}")  # noqa: T201  # a simulation prints its seed
    histories = tally["histories"]
    rare = {name: tally[name] for name, least in least_per_thousand.items() if tally[name] < least * histories // 1000}
    assert not rare, f"CUTLINE_SEED={SEED}: too rare to prove anything: {rare}"
