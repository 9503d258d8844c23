"""A history of a repository: some shells that run commands at once, with faults, and then a calm that must mend all.

The seed says everything: what is run, who runs when, and what each call meets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from storage.errors import SnapshotError
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.reading_processes import list_store, restore
from tests.simulation.repository_calm import arrive, check_calm
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.repository_promises import tally_of
from tests.simulation.retention_processes import collect, delete, give_up, prune_some
from tests.simulation.runs import PromiseBrokenError
from tests.simulation.simulated import simulated
from tests.simulation.store_processes import CALM, Climate, Process

Command = tuple[str, Callable[[Process], object]]

NAMES = ("x", "y")
CLIMATES = (
    Climate(pause=0.05),
    Climate(fault=0.01, listing=0.1, body=0.05, commit=0.3, pause=0.02),
    Climate(fault=0.005, listing=0.3, body=0.1, commit=0.6, pause=0.02),
    Climate(fault=0.05, listing=0.05, body=0.1, commit=0.2, pause=0.01),
    Climate(fault=0.01, body=0.3, commit=0.4, pause=0.1),
)
SWITCHES = (0.05, 0.3, 0.8)
# As often as they stand here.
COMMANDS: tuple[tuple[str, Callable[..., object]], ...] = (
    *(("create", create_full),) * 6,
    *(("increment", create_increment),) * 8,
    *(("restore", restore),) * 2,
    *(("list", list_store),) * 3,
    *(("gc", collect),) * 3,
    *(("delete", delete),) * 2,
    *(("prune", prune_some),) * 2,
    ("give up", give_up),
)
NAMELESS = (list_store, collect, prune_some)
LANES_MAX = 3
COMMANDS_MAX = 4
ARRIVAL = 0.02
SKEWS_SECONDS = (0, 0, 0, -90, 90, 7200)


def run_repository(seed: int) -> Counter[str]:
    """Make the history of a seed and check every promise; raise PromiseBrokenError with its story."""
    world = RepositoryWorld(seed)
    with promising(world, f"CUTLINE_SEED={seed}"), simulated(world):
        make_history(world)
        check_calm(world, NAMES)
    return counted(world)


def run_repositories(first: int, histories: int) -> Counter[str]:
    """Run the histories of successive seeds."""
    tally: Counter[str] = Counter()
    for seed in range(first, first + histories):
        tally.update(run_repository(seed))
    return tally


@contextmanager
def promising(world: RepositoryWorld, repeat: str) -> Iterator[None]:
    """Say what repeats it, and tell the story, where a promise is broken."""
    try:
        yield
    except (AssertionError, SnapshotError) as error:
        story = "\n".join(world.story)
        raise PromiseBrokenError(f"{repeat}: {error}\n{story}") from error


def counted(world: RepositoryWorld) -> Counter[str]:
    """What the history held."""
    world.tally["histories"] += 1
    world.tally["calls"] += world.schedule.steps
    world.tally.update(tally_of(world.attempts.values()))
    return world.tally


def make_history(world: RepositoryWorld) -> None:
    """Run some shells to their ends, all with one climate."""
    climate = world.draw.choice(CLIMATES)
    world.schedule.switch = world.draw.choice(SWITCHES)
    if world.below(3):
        Process(world, "create x", CALM).run(partial(create_full, name="x"))
        for _ in range(world.below(3)):
            Process(world, "increment x", CALM).run(partial(create_increment, name="x"))
        if world.below(2):
            Process(world, "create y", CALM).run(partial(create_full, name="y"))
    world.schedule.on_step = partial(let_arrive, world)
    world.schedule.run([partial(run_shell, world, climate, number) for number in range(1 + world.below(LANES_MAX))])


def let_arrive(world: RepositoryWorld) -> None:
    """At any call, a put that was under way may arrive."""
    for late in list(world.bucket.late):
        if world.draw.random() < ARRIVAL:
            arrive(world, late)


def run_shell(world: RepositoryWorld, climate: Climate, number: int) -> None:
    """One lane: commands one after the other, on a machine whose clock may be wrong."""
    skew = timedelta(seconds=world.draw.choice(SKEWS_SECONDS))
    for _ in range(1 + world.below(COMMANDS_MAX)):
        title, work = draw_command(world)
        Process(world, f"{title} ({number})", climate, skew).run(work)


def draw_command(world: RepositoryWorld) -> Command:
    """What somebody runs next."""
    title, work = world.draw.choice(COMMANDS)
    if work in NAMELESS:
        return title, work
    name = world.draw.choice(NAMES)
    return f"{title} {name}", partial(work, name=name)
