"""Inject every fault at every call of every command, and suspend the changing commands at every call for another one.

A walk finds what random histories may miss: it is exhaustive, short, and always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import product

from cutline.fleet.config import Retention
from cutline.snapshots.records.operation_records import CONFLICTS
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.reading_processes import check, list_store, restore
from tests.simulation.repository_calm import check_after_faults, run_without_faults
from tests.simulation.repository_history import finish_tally, reporting_broken_promises
from tests.simulation.repository_model import RepositoryWorld
from tests.simulation.retention_processes import collect, delete, give_up, keep, prune
from tests.simulation.simulated import simulated
from tests.simulation.store_faults import Call, Fault
from tests.simulation.store_processes import NO_FAULTS, Process, is_commit

Work = Callable[[Process], object]


def check_and_prune(process: Process) -> None:
    """A check of the newer x finds conflicts, and a prune keeps one snapshot, which is then w."""
    check(process, "x", CONFLICTS)
    prune(process, Retention(last=1))


COMMANDS: Mapping[str, Work] = {
    "create y": partial(create_full, name="y"),
    "increment x": partial(create_increment, name="x"),
    "list": list_store,
    "gc": collect,
    "delete x": partial(delete, name="x"),
    "prune w": partial(prune, rules=Retention(last=1)),
    "check x and prune w": check_and_prune,
    "prune increments of w": partial(prune, rules=Retention(last=1, only_full="all")),
    "give up x": partial(give_up, name="x"),
    "restore x": partial(restore, name="x"),
    "keep x": partial(keep, name="x", increment=1),
    "keep w": partial(keep, name="w", increment=1),
}
# The commands that change something: each is suspended at every call while each of COMMANDS runs.
CHANGING_COMMANDS = (
    *("create y", "increment x", "gc", "delete x", "prune w", "prune increments of w", "give up x"),
    *("keep x", "keep w"),
)
COMMITTING = ("create y", "increment x")
CALLS_AFTER_PUT = 2
HOUR_SECONDS = 3600.0
SAME_AFTER_READ = (Fault.CRASH_AFTER, Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER)
SECOND_FAULTS = (
    *(Fault.CRASH_BEFORE, Fault.CRASH_AFTER, Fault.INTERRUPT_BEFORE, Fault.UNREACHABLE),
    *(Fault.LOST_STORED, Fault.LOST_NOT_STORED, Fault.LATE, Fault.TRUNCATED),
)


@cache
def _prepare_world(names: tuple[str, ...]) -> RepositoryWorld:
    """A world with garbage, in which every name but the last is a snapshot with one increment."""
    world = RepositoryWorld(0)
    with simulated(world):
        for name in names[:-1]:
            run_without_faults(world, f"create {name}", partial(create_full, name=name))
            run_without_faults(world, f"increment {name}", partial(create_increment, name=name))
            world.skip(HOUR_SECONDS)
        for name, work in (("create y", create_full), ("increment x", create_increment)):
            killed = Process(world, f"{name} that is killed", NO_FAULTS)
            killed.fault_source.kills_before_commit = True
            killed.run(partial(work, name=name[-1]))
    return world


def prepare_world(*commands: str) -> tuple[RepositoryWorld, tuple[str, ...]]:
    """A world with a snapshot x and garbage, and an older w if a command needs it; and the names used there."""
    names = ("w", "x", "y") if any(command.endswith("w") for command in commands) else ("x", "y")
    return _prepare_world(names).copy(), names


def calls_of(command: str) -> list[Call]:
    """The calls that a command makes without faults."""
    world, _ = prepare_world(command)
    with simulated(world):
        process = Process(world, command, NO_FAULTS)
        assert process.run(COMMANDS[command]) == "yes"
    return process.fault_source.calls


def walk_faults(command: str) -> Counter[str]:
    """Run one history for every fault at every call of the command, and check every promise after it."""
    tally: Counter[str] = Counter()
    for number, call in enumerate(calls_of(command)):
        for fault in distinct_faults(call):
            tally += run_with_faults(command, {number: fault})
    return tally


def distinct_faults(call: Call) -> list[Fault]:
    """The faults of a call with different effects: to a call that changes nothing, before and after are the same."""
    changes = call.verb in ("create", "delete", "node")
    same = {Fault.THROTTLED} if changes else {Fault.THROTTLED, *SAME_AFTER_READ}
    return [fault for fault in call.possible if fault not in same]


def walk_commit(command: str) -> Counter[str]:
    """Run one history for every fault at the commit's put with every second fault at each of the next calls."""
    tally: Counter[str] = Counter()
    calls = calls_of(command)
    put = max(number for number, call in enumerate(calls) if is_commit(call))
    for fault, then, behind in product(distinct_faults(calls[put]), SECOND_FAULTS, range(1, CALLS_AFTER_PUT + 1)):
        tally += run_with_faults(command, {put: fault, put + behind: then})
    return tally


def run_with_faults(command: str, plan: Mapping[int, Fault]) -> Counter[str]:
    """Run a command with the faults of `plan`, by number of the call; those that a call can't meet are left out.

    Raises PromiseBrokenError.
    """
    world, names = prepare_world(command)
    with reporting_broken_promises(world, f"{command} at call {plan}"), simulated(world):
        process = Process(world, command, NO_FAULTS)
        process.fault_source.plan = plan
        process.run(COMMANDS[command])
        assert process.faults, "walk: the call was not made"
        world.draw.seed(str(plan))
        check_after_faults(world, names)
    return finish_tally(world)


def walk_rivals(command: str, rival: str) -> Counter[str]:
    """Run one history for every call of the command: before it the command is suspended while a rival runs."""
    tally: Counter[str] = Counter()
    for number in range(len(calls_of(command))):
        tally += run_rivals(command, rival, number)
    return tally


def run_rivals(command: str, rival: str, number: int, plan: Mapping[int, Fault] | None = None) -> Counter[str]:
    """Run a command that is suspended before its call `number` while the rival runs to its end.

    It loses the lock meanwhile, unless the rival needs none.
    """
    world, names = prepare_world(command, rival)
    with reporting_broken_promises(world, f"{command} suspended at call {number}, {rival}, {plan}"), simulated(world):
        process, other = Process(world, command, NO_FAULTS), Process(world, f"{rival} beside it", NO_FAULTS)
        process.fault_source.suspension = (number, partial(other.run, COMMANDS[rival]))
        process.fault_source.plan = plan or {}
        process.keeps_lock = rival.startswith("keep")
        process.run(COMMANDS[command])
        world.draw.seed(number)
        check_after_faults(world, names)
    return finish_tally(world)
