"""Simulated retention: `delete`, `prune`, `gc`, and giving up a chain whose nodes retain too much WAL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from msgspec.structs import replace

from cutline.fleet.config import Retention
from cutline.nodes.lock import FleetBusyError
from cutline.snapshots.operations.leases import open_leases
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.operations.operation import current_time, record_outcome
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.operation_records import Intent
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.removal.deletion import delete_locked, is_finished
from cutline.snapshots.removal.gc import RESUMABLE_SECONDS, find_garbage, remove_garbage
from cutline.snapshots.removal.pinning import pin_in_store, release_in_store
from cutline.snapshots.removal.pruning import PrunePlan, prune_locked
from cutline.snapshots.removal.removing import RemovalRun
from cutline.storage.errors import RefusedError, UnreachableError
from cutline.storage.store import StoreUnreachableError
from cutline.wal.drain.slots import slot_name
from tests.simulation.create_processes import FLEET
from tests.simulation.repository_model import PinRun
from tests.simulation.repository_promises import check_pin, check_prune_plan
from tests.simulation.store_faults import Fault
from tests.simulation.store_processes import ModelLock, Process, exclusive


def collect(process: Process, grace_seconds: float = 0.0) -> None:
    """`snapshot gc`, without a grace period, as no promise may depend on it."""
    _settle(process)
    report = find_garbage(process.store, grace_seconds, process)
    process.log(f"finds {len(report.garbage)} objects of garbage")
    remove_garbage(process.store, report, process)
    process.world.tally["objects of garbage removed"] += report.removed.objects


def _settle(process: Process) -> None:
    """Settle as snapshots.removal.gc does, with the lock of the model."""
    store = process.store
    try:
        for lease in open_leases(store):
            if not lease.is_running(process.world.clock() - timedelta(seconds=RESUMABLE_SECONDS)):
                record_outcome(store, lease.operation, "failed", "its lease expired")
        if not any(one.operation is None or one.operation.kind == "create" for one in read_open_operations(store)):
            return
        with exclusive(process):
            settle_operations(store, FLEET, process)
    except StoreUnreachableError:
        raise
    except (FleetBusyError, UnreachableError, RefusedError) as error:
        process.log(f"could not settle: {error.message}")


@dataclass(frozen=True, slots=True)
class ModelNodeCleanup:
    """The nodes as a removal uses them, with the slots of the model."""

    process: Process
    lock: ModelLock

    def check_held(self, operation: Intent) -> None:
        """See NodeCleanup."""
        self.lock.check_held()

    def drop_slot(self, slot: str, nodes: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        return self.process.drop_slots(slot), []

    def drop_publications(self, is_ours: Callable[[str], bool]) -> tuple[list[str], list[str]]:
        """See NodeCleanup."""
        self.process.ask_node("drop publications")
        return [], []


@contextmanager
def removing(process: Process) -> Iterator[RemovalRun]:
    """Lock the fleet and settle, as snapshots.removal.deletion and snapshots.removal.pruning do first."""
    with exclusive(process) as lock:
        settle_operations(process.store, FLEET, process)
        yield RemovalRun(
            FLEET, process.store, ModelNodeCleanup(process, lock), process, force=process.world.below(2) > 0
        )


def delete(process: Process, name: str) -> None:
    """`snapshot delete NAME`."""
    if not is_finished(process.store, name, force=False):
        with removing(process) as run:
            process.breaks_pins = run.force
            done = delete_locked(run, name, lambda plan: None)
        if done.removed and not done.removed.is_done:
            raise RemovalIncompleteError(f"the removal of {name} is incomplete")
    process.world.note_deleted(name)


def prune(process: Process, rules: Retention) -> None:
    """`snapshot prune --yes`."""
    began_at, world = process.world.schedule.steps, process.world
    with removing(process) as run:

        def announce(plan: PrunePlan) -> None:
            process.log(", ".join(f"{s.kind} {s.mark.snapshot}" for s in plan.steps))
            check_prune_plan(world, process, plan, began_at, force=run.force)
            world.tally["kept because of conflicts"] += len(plan.kept_instead)

        done = prune_locked(run, rules, announce)
    for removed in done.removed:
        if not removed.is_done:
            raise RemovalIncompleteError(f"the removal of {removed.mark.snapshot} is incomplete")
    for error in done.left:
        raise error


def prune_some(process: Process) -> None:
    """Prune by rules that remove something if there is anything to remove."""
    draw = process.world.draw
    rules = Retention(last=draw.choice((None, 1, 2)), only_full=draw.choice((1, 2, "all")))
    prune(process, replace(rules, hourly=draw.choice((None, None, 1))))


def prune_nothing(process: Process) -> None:
    """Prune by rules that keep everything, which resumes an unfinished removal."""
    prune(process, Retention(last="all"))


def keep(process: Process, name: str, increment: int | None = None) -> None:
    """`snapshot keep NAME[@N]`; without a number, of a random increment or of the newest."""
    world = process.world
    number = increment if increment is not None else world.draw.choice((None, 0, 1))
    change = pin_in_store(process.store, name, number)
    # With a stale listing, or an intent that can't be read, a removal may go unseen.
    if process.faults & {Fault.STALE, Fault.TRUNCATED}:
        return
    for stored in change.changed:
        assert stored.increment is not None
        world.pins.append(PinRun(name, stored.increment))
        process.log(f"pins {name}@{stored.increment}")
        check_pin(world, world.pins[-1])


def release(process: Process, name: str) -> None:
    """`snapshot keep NAME --release`."""
    for pin in process.world.pins:
        pin.is_released |= pin.snapshot == name
    release_in_store(process.store, name, None)


class RemovalIncompleteError(RefusedError):
    """A removal is incomplete; repeating the command completes it."""


def give_up(process: Process, name: str) -> None:
    """`snapshot end NAME`: it marks the chain as ended and drops its slots."""
    store = process.store
    with exclusive(process):
        settle_operations(store, FLEET, process)
        chain = read_chain(store, name)
        mark_end(store, EndMark(name, chain.full.chain, chain.last.increment, "a", current_time()))
        process.drop_slots(slot_name(chain.full.chain))
