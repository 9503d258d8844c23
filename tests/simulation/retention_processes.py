"""Simulated retention: `delete`, `prune`, `gc`, and a chain that is given up as its nodes keep too much WAL for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fleet.config import Retention
from fleet.nodes.lock import FleetBusyError
from snapshots.operations.leases import open_leases
from snapshots.operations.open_operations import read_open_operations
from snapshots.operations.operation import current_time, record_outcome
from snapshots.operations.settling import settle_operations
from snapshots.records.commits import read_chain
from snapshots.records.lost_chains import LostChain, mark_lost
from snapshots.removal.deletion import RemovalRun, delete_locked, is_finished
from snapshots.removal.gc import find_garbage, remove_garbage
from snapshots.removal.pruning import prune_locked
from storage.errors import RefusedError, UnreachableError
from storage.store import StoreUnreachableError
from tests.simulation.create_processes import FLEET
from tests.simulation.store_processes import ModelLock, Process, exclusive
from wal.slots.slots import slot_name


def collect(process: Process, grace_seconds: float = 0.0) -> None:
    """`snapshot gc`: without a grace period, as nothing that is promised may depend on it."""
    _settle(process)
    report = find_garbage(process.store, grace_seconds, process)
    process.tell(f"finds {len(report.garbage)} objects of garbage")
    remove_garbage(process.store, report, process)
    process.world.tally["objects of garbage removed"] += report.removed.objects


def _settle(process: Process) -> None:
    """As snapshots.removal.gc does it, by the model's lock."""
    store = process.store
    try:
        for lease in open_leases(store):
            if not lease.is_running(process.world.clock()):
                record_outcome(store, lease.operation, "failed", "its lease expired")
        if not any(one.operation is None or one.operation.kind == "create" for one in read_open_operations(store)):
            return
        with exclusive(process):
            settle_operations(store, FLEET, process)
    except StoreUnreachableError:
        raise
    except (FleetBusyError, UnreachableError, RefusedError) as error:
        process.tell(f"does not settle: {error.message}")


@dataclass(frozen=True, slots=True)
class ModelOnNodes:
    """What removing asks of the nodes, asked of the model's."""

    process: Process
    lock: ModelLock

    def check_held(self) -> None:
        """See OnNodes."""
        self.lock.check_held()

    def drop_slot(self, slot: str, nodes: Iterable[str]) -> tuple[list[str], list[str]]:
        """See OnNodes."""
        return self.process.drop_slots(slot), []

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """See OnNodes."""
        self.process.ask_node("drop publications")
        return [], []


@contextmanager
def deleting(process: Process) -> Iterator[RemovalRun]:
    """Hold the fleet, everything settled, as snapshots.removal.deletion and snapshots.removal.pruning begin."""
    with exclusive(process) as lock:
        settle_operations(process.store, FLEET, process)
        yield RemovalRun(FLEET, process.store, ModelOnNodes(process, lock), process, force=process.world.below(2) > 0)


def delete(process: Process, name: str) -> None:
    """`snapshot delete NAME`."""
    if not is_finished(process.store, name):
        with deleting(process) as held:
            done = delete_locked(held, name, lambda plan: None)
        if done.removed and not done.removed.is_done:
            raise LeftOverError(f"something of {name} is left")
    process.world.is_told_deleted(name)


def prune(process: Process, rules: Retention) -> None:
    """`snapshot prune --yes`."""
    with deleting(process) as held:
        done = prune_locked(
            held, rules, lambda plan: process.tell(", ".join(f"{s.kind} {s.mark.snapshot}" for s in plan.steps))
        )
    for removed in done.removed:
        if not removed.is_done:
            raise LeftOverError(f"something of {removed.mark.snapshot} is left")


def prune_some(process: Process) -> None:
    """By rules that take something away where there is something."""
    draw = process.world.draw
    prune(process, Retention(draw.choice((None, 1, 2)), None, draw.choice((0, 1))))


def prune_nothing(process: Process) -> None:
    """By rules that keep everything: what was begun is finished."""
    prune(process, Retention(1000, None, 1000))


class LeftOverError(RefusedError):
    """Something could not be taken away; a repeat will."""


def give_up(process: Process, name: str) -> None:
    """A create that gives a chain up: it marks the chain lost, and drops its slots, as the slot guard does."""
    store = process.store
    with exclusive(process):
        settle_operations(store, FLEET, process)
        chain = read_chain(store, name)
        mark_lost(store, LostChain(name, chain.full.chain, chain.last.increment, "a", 9, 5, current_time()))
        process.drop_slots(slot_name(chain.full.chain))
