"""A history of a repository: some shells run commands at once, under faults; then come commands without faults.

The seed decides everything: which commands run, which process runs when, and which faults each call meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from cutline.storage.errors import SnapshotError
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.reading_processes import check, list_store, restore
from tests.simulation.repository_calm import check_after_faults, deliver_late
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.repository_promises import count_reports
from tests.simulation.retention_processes import collect, delete, give_up, keep, prune_some, release
from tests.simulation.runs import PromiseBrokenError
from tests.simulation.simulated import simulated
from tests.simulation.store_processes import NO_FAULTS, FaultRates, Process

Command = tuple[str, Callable[[Process], object]]

NAMES = ("x", "y")
FAULT_RATES = (
    FaultRates(pause=0.05),
    FaultRates(fault=0.01, listing=0.1, body=0.05, commit=0.3, pause=0.02),
    FaultRates(fault=0.005, listing=0.3, body=0.1, commit=0.6, pause=0.02),
    FaultRates(fault=0.05, listing=0.05, body=0.1, commit=0.2, pause=0.01),
    FaultRates(fault=0.01, body=0.3, commit=0.4, pause=0.1),
)
SWITCHES = (0.05, 0.3, 0.8)
# A command that is listed n times is drawn n times as often.
COMMANDS: tuple[tuple[str, Callable[..., object]], ...] = (
    *(("create", create_full),) * 6,
    *(("increment", create_increment),) * 8,
    *(("restore", restore),) * 2,
    *(("list", list_store),) * 3,
    *(("check", check),) * 2,
    *(("gc", collect),) * 3,
    *(("delete", delete),) * 2,
    *(("prune", prune_some),) * 2,
    *(("keep", keep),) * 2,
    ("release", release),
    ("give up", give_up),
)
NAMELESS = (list_store, collect, prune_some)
LANES_MAX = 3
COMMANDS_MAX = 4
ARRIVAL = 0.02
SKEWS_SECONDS = (0, 0, 0, -90, 90, 7200)


def run_repository(seed: int) -> Counter[str]:
    """Run the history of a seed and check every promise; raise PromiseBrokenError with its story."""
    world = RepositoryWorld(seed)
    with reporting_broken_promises(world, f"CUTLINE_SEED={seed}"), simulated(world):
        make_history(world)
        check_after_faults(world, NAMES)
    return finish_tally(world)


def run_repositories(first: int, histories: int) -> Counter[str]:
    """Run the histories of successive seeds."""
    tally: Counter[str] = Counter()
    for seed in range(first, first + histories):
        tally.update(run_repository(seed))
    return tally


@contextmanager
def reporting_broken_promises(world: RepositoryWorld, repeat: str) -> Iterator[None]:
    """If a promise is broken, raise PromiseBrokenError with how to repeat the history, and its story."""
    try:
        yield
    except (AssertionError, SnapshotError) as error:
        story = "\n".join(world.story)
        raise PromiseBrokenError(f"{repeat}: {error}\n{story}") from error


def finish_tally(world: RepositoryWorld) -> Counter[str]:
    """Complete the counts of the history."""
    world.tally["histories"] += 1
    world.tally["calls"] += world.schedule.steps
    world.tally.update(count_reports(world.create_runs.values()))
    return world.tally


def make_history(world: RepositoryWorld) -> None:
    """Run some shells to their ends, all with the same fault rates."""
    rates = world.draw.choice(FAULT_RATES)
    world.schedule.switch = world.draw.choice(SWITCHES)
    if world.below(3):
        Process(world, "create x", NO_FAULTS).run(partial(create_full, name="x"))
        for _ in range(world.below(3)):
            Process(world, "increment x", NO_FAULTS).run(partial(create_increment, name="x"))
        if world.below(2):
            Process(world, "create y", NO_FAULTS).run(partial(create_full, name="y"))
            if world.below(2):
                Process(world, "check y", NO_FAULTS).run(partial(check, name="y"))
    world.schedule.on_step = partial(deliver_some_late, world)
    world.schedule.run([partial(run_shell, world, rates, number) for number in range(1 + world.below(LANES_MAX))])


def deliver_some_late(world: RepositoryWorld) -> None:
    """Let late puts arrive, each with a small probability at any call."""
    for late in list(world.bucket.late):
        if world.draw.random() < ARRIVAL:
            deliver_late(world, late)


def run_shell(world: RepositoryWorld, rates: FaultRates, number: int) -> None:
    """Run the commands of one lane, on a machine whose clock may be wrong."""
    skew = timedelta(seconds=world.draw.choice(SKEWS_SECONDS))
    for _ in range(1 + world.below(COMMANDS_MAX)):
        title, work = draw_command(world)
        Process(world, f"{title} ({number})", rates, skew).run(work)


def draw_command(world: RepositoryWorld) -> Command:
    """Draw the next command of a shell."""
    title, work = world.draw.choice(COMMANDS)
    if work in NAMELESS:
        return title, work
    name = world.draw.choice(NAMES)
    return f"{title} {name}", partial(work, name=name)
