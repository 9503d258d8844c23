"""Who lost the lock while it was away can't commit: two creators, each stopped between any two steps of theirs.

The hardest contest is always held, and one that the seed (CUTLINE_SEED) draws. With CUTLINE_SOAK=SECONDS all others are
held too, in an order that the seed draws, for so long.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from snapshots.operations.crash_points import CrashPoint
from snapshots.records.commits import read_chain
from tests.faults.contest import Contest, Entrant, Run, commits_in, failed_that_committed, held, stop_at, stops
from tests.faults.injection import Place
from tests.faults.signalled_command import ABOUT_TO_COMMIT
from tests.faults.world import World, eventually
from tests.faults.writers import journalled
from tests.s3_proxy import S3Proxy
from tests.snapshot_runs import chains_dropped, described
from tests.soak import SEED, SOAK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from embedded.fleet import EmbeddedFleet

DRAWN = 1
NODES = 4
CHAIN, NEW, OTHER = "chain", "new", "other"
# Refused, a session or a node lost, another operation, no cut: never "not known", never a bug.
FAILED_CODES = {3, 6, 7, 9}
REFUSED, BUSY = 3, 7


def entrants(name: str, *, incremental: bool) -> list[Entrant]:
    return [Entrant(name, stop, incremental) for stop in stops(incremental=incremental, nodes=NODES)]


def every() -> list[Contest]:
    """All contests: of the same name, of the same number, and of what has nothing to do with the other."""
    kinds = [(NEW, NEW), (NEW, OTHER), (NEW, CHAIN), (CHAIN, NEW), (CHAIN, CHAIN)]
    found: list[Contest] = []
    for one, other in kinds:
        firsts = entrants(one, incremental=one == CHAIN)
        seconds = [Entrant(other, None, other == CHAIN), *entrants(other, incremental=other == CHAIN)]
        found += [Contest(*pair, lost) for pair in itertools.product(firsts, seconds) for lost in (True, False)]
    return found


def hardest() -> list[Contest]:
    """The first is stopped when all is checked: nothing but the put itself can keep it from committing."""
    increment = Entrant(CHAIN, stop_at(ABOUT_TO_COMMIT, incremental=True), incremental=True)
    full = Entrant(NEW, stop_at(ABOUT_TO_COMMIT, incremental=False))
    second = Entrant(NEW, stop_at(CrashPoint.SNAPSHOTS_RELEASED, incremental=False))
    return [
        Contest(increment, Entrant(CHAIN, None, incremental=True), lock_lost=True),
        Contest(full, second, lock_lost=True),
    ]


def drawn() -> list[Contest]:
    return random.Random(SEED).sample(every(), len(every()))


HARDEST = hardest() if SOAK_SECONDS else hardest()[:1]


@pytest.fixture(scope="module")
def world(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("fencing")
    fleet = described(shared_fleet, folder / "fleet.toml", f"file://{folder}/store")
    place = Place(shared_fleet, {}, S3Proxy(""), None, random.Random(SEED))
    with chains_dropped(fleet), journalled(shared_fleet):
        made = World(fleet, spark, place, set())
        made.runs.init()
        made.runs.full(CHAIN)
        made.keep(CHAIN)
        yield made


@pytest.mark.parametrize(("number", "contest"), list(enumerate(HARDEST)), ids=map(str, HARDEST))
def test_of_two_creators_each_tells_the_truth(world: World, number: int, contest: Contest) -> None:
    hold(world, number, contest)


def test_whatever_the_two_are_at_each_tells_the_truth(world: World) -> None:
    began = time.monotonic()
    for number, contest in enumerate(drawn()):
        if number >= DRAWN and time.monotonic() - began > SOAK_SECONDS:
            break
        print(f"CUTLINE_SEED={SEED}, contest {number}: {contest}", flush=True)  # noqa: T201  # what failed is to be found
        hold(world, len(HARDEST) + number, contest)


def hold(world: World, number: int, contest: Contest) -> None:
    """Hold the contest, and see that all is as it was told."""
    contest = named(contest, number)
    before = commits_in(world.store)
    first, second = held(world, contest)
    after = commits_in(world.store)
    told = {place_of(run): [run.document["operation"]] for run in (first, second) if run.code == 0}
    assert {place: found for place, found in after.items() if place not in before} == told, f"{first}{second}"
    assert all(after[place] == found for place, found in before.items())
    for run in (first, second):
        assert run.code == 0 or (run.code in FAILED_CODES and run.document["hint"]), run
    check_who_must_win(contest, first, second)
    check_what_comes_next(world, told)
    for run in (first, second):
        if run.code == 0:
            world.check_restored(*place_of(run), run.truth_at_cut())
    for name in {name for name, _ in told} - {CHAIN}:
        world.end(name)


def named(contest: Contest, number: int) -> Contest:
    """The same with names that nobody has had."""

    def own(entrant: Entrant) -> Entrant:
        name = entrant.name if entrant.name == CHAIN else f"{entrant.name}-{number}"
        return Entrant(name, entrant.stop, entrant.incremental)

    return Contest(own(contest.first), own(contest.second), contest.lock_lost)


def place_of(run: Run) -> tuple[str, int]:
    return run.document["snapshot"], run.document["increment"]


def check_who_must_win(contest: Contest, first: Run, second: Run) -> None:
    """What follows from who has the lock, besides that nobody lies."""
    is_locked = contest.first.is_past(CrashPoint.LOCKED) and not contest.first.is_past(CrashPoint.RELEASED)
    if contest.first.is_past(CrashPoint.COMMITTED):
        assert first.code == 0, first
    if is_locked and not contest.lock_lost:
        assert first.code == 0, first
        if contest.second.stop is None or contest.second.is_past(CrashPoint.LOCKED):
            # A name that is taken is refused before anybody asks for the lock.
            exists = contest.same and not contest.second.incremental and contest.first.is_past(CrashPoint.COMMITTED)
            assert second.code == (REFUSED if exists else BUSY), second
    elif contest.second.stop is None or contest.second.is_past(CrashPoint.LOCKED):
        # Whoever is away without the lock keeps nobody from committing, unless it has done so.
        is_taken = contest.same and not contest.second.incremental and first.code == 0
        assert second.code == 0 or is_taken, second
    if contest.first.stop and contest.first.stop.point == ABOUT_TO_COMMIT and contest.lock_lost:
        assert (first.code, first.document["error"]) == (BUSY, "operation-settled"), first


def check_what_comes_next(world: World, told: dict[tuple[str, int], list[str]]) -> None:
    """The next command goes on, and nothing is left but what is committed."""
    world.writers.write()
    newest = world.newest(CHAIN)
    assert newest is not None
    commit, _ = world.next(CHAIN)
    assert commit.increment == newest + 1
    assert world.left_open() == []
    assert failed_that_committed(world.store) == []
    for name, _ in told:
        world.keep(name)
    eventually(world.left_behind)
    read_chain(world.store, CHAIN).check_archive()
    if SOAK_SECONDS:
        world.check_restored(CHAIN)


def test_nothing_was_lost_and_nothing_stored_twice(world: World) -> None:
    world.writers.write()
    world.create_next_and_compare(CHAIN)
    assert world.runs.check(CHAIN).exit_code == 0
