"""A create that loses the lock while it is stopped can't commit: two creates compete, each stopped between any steps.

The short form runs the hardest contest. With CUTLINE_SOAK=SECONDS, the others run too, in an order that the seed
(CUTLINE_SEED) draws, for about that time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cutline.fleet.crash_points import CrashPoint
from cutline.snapshots.records.proven_chains import read_chain
from tests.commands.snapshot_runs import configure_fleet, dropping_slots
from tests.faults.awaited import await_none
from tests.faults.contest import (
    Contest,
    Entrant,
    Run,
    all_stops,
    commits_in,
    failed_that_committed,
    hold_contest,
    stop_at,
)
from tests.faults.injection import FaultTargets
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.faults.world import World
from tests.faults.writers import journal_tables
from tests.run.soak import SEED, SOAK_SECONDS, first
from tests.s3.proxy import S3Proxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NODES = 4
CHAIN, NEW, OTHER = "chain", "new", "other"
# Refused, a session or node lost, another operation, inconsistent cut; never "indeterminate", never a bug.
FAILED_CODES = {3, 6, 7, 9}
REFUSED, BUSY = 3, 7


def entrants(name: str, *, incremental: bool) -> list[Entrant]:
    return [Entrant(name, stop, incremental) for stop in all_stops(incremental=incremental, nodes=NODES)]


def all_contests() -> list[Contest]:
    """All contests: for the same name, for the same number, and between independent creates."""
    kinds = [(NEW, NEW), (NEW, OTHER), (NEW, CHAIN), (CHAIN, NEW), (CHAIN, CHAIN)]
    found: list[Contest] = []
    for one, other in kinds:
        firsts = entrants(one, incremental=one == CHAIN)
        seconds = [Entrant(other, None, other == CHAIN), *entrants(other, incremental=other == CHAIN)]
        found += [Contest(*pair, lost) for pair in itertools.product(firsts, seconds) for lost in (True, False)]
    return found


def hardest_contests() -> list[Contest]:
    """The first create is stopped after its last check: only the conditional put can keep it from committing."""
    increment = Entrant(CHAIN, stop_at(ABOUT_TO_COMMIT, incremental=True), incremental=True)
    full = Entrant(NEW, stop_at(ABOUT_TO_COMMIT, incremental=False))
    second = Entrant(NEW, stop_at(CrashPoint.SNAPSHOTS_RELEASED, incremental=False))
    return [
        Contest(increment, Entrant(CHAIN, None, incremental=True), lock_lost=True),
        Contest(full, second, lock_lost=True),
    ]


def shuffled_contests() -> list[Contest]:
    return random.Random(SEED).sample(all_contests(), len(all_contests()))


HARDEST = hardest_contests()


@pytest.fixture(scope="module")
def world(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fencing")
    fleet = configure_fleet(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
    place = FaultTargets(shared_fleet, {}, S3Proxy(""), None, random.Random(SEED))
    with dropping_slots(fleet), journal_tables(shared_fleet):
        world = World(fleet, spark, place, set())
        world.runs.init()
        world.runs.full(CHAIN)
        world.keep_chain(CHAIN)
        yield world


@pytest.mark.parametrize(("number", "contest"), first(enumerate(HARDEST)), ids=map(str, HARDEST))
def test_both_of_two_competing_creates_report_the_truth(world: World, number: int, contest: Contest) -> None:
    run_contest(world, number, contest)


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=SECONDS")
def test_two_creates_stopped_at_drawn_steps_report_the_truth(world: World) -> None:
    began = time.monotonic()
    for number, contest in enumerate(shuffled_contests()):
        if time.monotonic() - began > SOAK_SECONDS:
            break
        print(f"CUTLINE_SEED={SEED}, contest {number}: {contest}", flush=True)  # noqa: T201  # names the contest that fails
        run_contest(world, len(HARDEST) + number, contest)


def run_contest(world: World, number: int, contest: Contest) -> None:
    """Run the contest, and assert that the store and the fleet agree with what the creates reported."""
    contest = with_new_names(contest, number)
    before = commits_in(world.store)
    first, second = hold_contest(world, contest)
    after = commits_in(world.store)
    reported = {place_of(run): [run.document["operation"]] for run in (first, second) if run.code == 0}
    assert {place: found for place, found in after.items() if place not in before} == reported, f"{first}{second}"
    assert all(after[place] == found for place, found in before.items())
    for run in (first, second):
        assert run.code == 0 or (run.code in FAILED_CODES and run.document["hint"]), run
    check_winner(contest, first, second)
    check_next_create(world, reported)
    for run in (first, second):
        if run.code == 0:
            world.check_restored(*place_of(run), run.truth_at_cut())
    for name in {name for name, _ in reported} - {CHAIN}:
        world.end_chain(name)


def with_new_names(contest: Contest, number: int) -> Contest:
    """The contest with names of full snapshots that were never used."""

    def renamed(entrant: Entrant) -> Entrant:
        name = entrant.name if entrant.name == CHAIN else f"{entrant.name}-{number}"
        return Entrant(name, entrant.stop, entrant.incremental)

    return Contest(renamed(contest.first), renamed(contest.second), contest.lock_lost)


def place_of(run: Run) -> tuple[str, int]:
    return run.document["snapshot"], run.document["increment"]


def check_winner(contest: Contest, first: Run, second: Run) -> None:
    """Assert the results that follow from which create has the lock."""
    is_locked = contest.first.is_past(CrashPoint.LOCKED) and not contest.first.is_past(CrashPoint.RELEASED)
    if contest.first.is_past(CrashPoint.COMMITTED):
        assert first.code == 0, first
    if is_locked and not contest.lock_lost:
        assert first.code == 0, first
        if contest.second.stop is None or contest.second.is_past(CrashPoint.LOCKED):
            # A taken name is refused before the lock is requested.
            exists = (
                contest.is_for_same_commit
                and not contest.second.incremental
                and contest.first.is_past(CrashPoint.COMMITTED)
            )
            assert second.code == (REFUSED if exists else BUSY), second
    elif contest.second.stop is None or contest.second.is_past(CrashPoint.LOCKED):
        # A stopped create without the lock does not keep the other from committing, unless it took the name itself.
        is_taken = contest.is_for_same_commit and not contest.second.incremental and first.code == 0
        assert second.code == 0 or is_taken, second
    if contest.first.stop and contest.first.stop.point == ABOUT_TO_COMMIT and contest.lock_lost:
        assert (first.code, first.document["error"]) == (BUSY, "operation-settled"), first


def check_next_create(world: World, reported: dict[tuple[str, int], list[str]]) -> None:
    """Assert that the next create commits, and that nothing but committed snapshots is left."""
    world.writers.write()
    newest = world.newest_increment(CHAIN)
    assert newest is not None
    commit, _ = world.create_next(CHAIN)
    assert commit.increment == newest + 1
    assert world.open_operations() == []
    assert failed_that_committed(world.store) == []
    for name, _ in reported:
        world.keep_chain(name)
    await_none(world.find_leftovers)
    read_chain(world.store, CHAIN).check_archive()
    if SOAK_SECONDS:
        world.check_restored(CHAIN)


def test_nothing_is_lost_and_nothing_is_stored_twice(world: World) -> None:
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    assert world.runs.check(CHAIN).exit_code == 0
