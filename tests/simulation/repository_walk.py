"""Every fault at every call of every command, one at a time, and every two commands at once, stopped at every call.

What random histories may miss, a walk does not: it is short, and the same each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product

from fleet.config import Retention
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.faulty_store import Call, Fault
from tests.simulation.reading_processes import list_store, restore
from tests.simulation.repository_calm import check_calm, run_calm
from tests.simulation.repository_history import counted, promising
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.retention_processes import collect, delete, give_up, prune
from tests.simulation.simulated import simulated
from tests.simulation.store_processes import CALM, Process, is_commit

Work = Callable[[Process], object]

COMMANDS: Mapping[str, Work] = {
    "create y": partial(create_full, name="y"),
    "increment x": partial(create_increment, name="x"),
    "list": list_store,
    "gc": collect,
    "delete x": partial(delete, name="x"),
    "prune w": partial(prune, rules=Retention(keep_full=1)),
    "prune increments of w": partial(prune, rules=Retention(keep_increments=1)),
    "give up x": partial(give_up, name="x"),
    "restore x": partial(restore, name="x"),
}
# Those that change something, each beside each.
RIVALS = ("create y", "increment x", "gc", "delete x", "prune w", "prune increments of w", "give up x")
COMMITTING = ("create y", "increment x")
CALLS_BEHIND = 2
HOUR_SECONDS = 3600.0
BEHIND_A_READ = (Fault.CRASH_AFTER, Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER)
THEN = (
    *(Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.INTERRUPT_BEFORE, Fault.UNREACHABLE),
    *(Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE, Fault.TRUNCATED),
)


@cache
def _prepared(names: tuple[str, ...]) -> RepositoryWorld:
    """A world in which all but the last of the names are snapshots of one increment, beside which there is garbage."""
    world = RepositoryWorld(0)
    with simulated(world):
        for name in names[:-1]:
            run_calm(world, f"create {name}", partial(create_full, name=name))
            run_calm(world, f"increment {name}", partial(create_increment, name=name))
            world.skip(HOUR_SECONDS)
        for name, work in (("create y", create_full), ("increment x", create_increment)):
            killed = Process(world, f"{name} that is killed", CALM)
            killed.weather.kills_before_commit = True
            killed.run(partial(work, name=name[-1]))
    return world


def prepared(*commands: str) -> tuple[RepositoryWorld, tuple[str, ...]]:
    """A world with a snapshot x and garbage; for what prunes it an older w. And the names to be seen there."""
    names = ("w", "x", "y") if any(command.endswith("w") for command in commands) else ("x", "y")
    return _prepared(names).copied(), names


def calls_of(command: str) -> list[Call]:
    """The calls that a command makes where nothing happens."""
    world, _ = prepared(command)
    with simulated(world):
        process = Process(world, command, CALM)
        assert process.run(COMMANDS[command]) == "yes"
    return process.weather.calls


def walk_faults(command: str) -> Counter[str]:
    """One history for every fault at every call of the command; then the next commands, and every promise."""
    tally: Counter[str] = Counter()
    for number, call in enumerate(calls_of(command)):
        for fault in told_apart(call):
            tally += run_stricken(command, {number: fault})
    return tally


def told_apart(call: Call) -> list[Fault]:
    """The faults of a call that differ in what they leave: a call that changes nothing is the same before and after."""
    changes = call.verb in ("create", "delete", "node")
    same = {Fault.THROTTLED} if changes else {Fault.THROTTLED, *BEHIND_A_READ}
    return [fault for fault in call.possible if fault not in same]


def walk_commit(command: str) -> Counter[str]:
    """One history for every fault at the commit's put together with every fault at each of the calls that follow it."""
    tally: Counter[str] = Counter()
    calls = calls_of(command)
    put = max(number for number, call in enumerate(calls) if is_commit(call))
    for fault, then, behind in product(told_apart(calls[put]), THEN, range(1, CALLS_BEHIND + 1)):
        tally += run_stricken(command, {put: fault, put + behind: then})
    return tally


def run_stricken(command: str, plan: Mapping[int, Fault]) -> Counter[str]:
    """Run a command that meets the faults of `plan` at the calls of those numbers, where they can meet such.

    Raises PromiseBrokenError.
    """
    world, names = prepared(command)
    with promising(world, f"{command} at call {plan}"), simulated(world):
        process = Process(world, command, CALM)
        process.weather.plan = plan
        process.run(COMMANDS[command])
        assert process.faults, "walk: the call was not made"
        world.draw.seed(str(plan))
        check_calm(world, names)
    return counted(world)


def walk_rivals(command: str, rival: str) -> Counter[str]:
    """One history for every call of the command before which it is stopped, and loses the lock, while a rival runs."""
    tally: Counter[str] = Counter()
    for number in range(len(calls_of(command))):
        tally += run_rivals(command, rival, number)
    return tally


def run_rivals(command: str, rival: str, number: int, plan: Mapping[int, Fault] | None = None) -> Counter[str]:
    """Run a command that is stopped before its call `number` while the rival runs to its end."""
    world, names = prepared(command, rival)
    with promising(world, f"{command} stopped at call {number}, {rival}, {plan}"), simulated(world):
        process, other = Process(world, command, CALM), Process(world, f"{rival} beside it", CALM)
        process.weather.aside = (number, partial(other.run, COMMANDS[rival]))
        process.weather.plan = plan or {}
        process.run(COMMANDS[command])
        world.draw.seed(number)
        check_calm(world, names)
    return counted(world)
