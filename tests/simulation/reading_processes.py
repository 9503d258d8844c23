"""Simulated readers: `list`, `check`, and what `restore` does on the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cutline.snapshots.listing.listing import Entry, read_entry
from cutline.snapshots.operations.activity import Command, Ending, record_without_intent
from cutline.snapshots.operations.leases import hold_lease
from cutline.snapshots.operations.open_operations import read_open_operations
from cutline.snapshots.operations.operation import current_time, new_operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.operation_records import CONFLICTS, VALID, CheckedPoint, CheckResult
from cutline.snapshots.records.proven_chains import read_chain, snapshot_names
from cutline.snapshots.records.store_identity import StoreIdentity
from cutline.storage.ids import new_operation_id
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from tests.simulation.repository_model import NODES, CheckRun
from tests.simulation.repository_promises import (
    check_listing,
    check_newest,
    check_open,
    check_restored,
    may_be_gone,
)
from tests.simulation.store_processes import Process
from tests.stores.listed import objects_of

IDENTITY = StoreIdentity("f", "simulated")


def list_store(process: Process) -> list[Entry]:
    """`snapshot list`, with its output checked."""
    read = (read_entry(process.store, IDENTITY, name) for name in snapshot_names(process.store))
    # Without those that were deleted meanwhile; the check below finds one that is missing and was not.
    entries = [one for one in read if one is not None]
    shown = (f"{one.name} up to {one.chain.last.increment}" if one.chain else one.name for one in entries)
    process.log(f"shows {', '.join(shown) or 'nothing'}")
    check_listing(process.world, process, entries)
    check_open(process.world, read_open_operations(process.store))
    return entries


def restore(process: Process, name: str, increment: int | None = None) -> None:
    """`snapshot restore NAME`, with its result checked. It may fail if a read does, or if the snapshot is deleted."""
    chain = read_chain(process.store, name, increment)
    chain.check_archive()
    operation = new_operation("restore", name, chain.last.increment, NODES)
    with excusing_damage(process, chain), hold_lease(process.store, operation, process):
        state = {node: read_numbers(process, chain, node) for node in NODES}
    check_restored(process.world, process, chain, state)
    if increment is None:
        check_newest(process.world, process, chain)


def check(process: Process, name: str, result: CheckResult | None = None) -> None:
    """`snapshot check NAME`, which finds `result`, else what is drawn, and records it."""
    chain, world = read_chain(process.store, name), process.world
    found = result or world.draw.choice((VALID, CONFLICTS))
    operation = new_operation_id(world.clock())
    run = CheckRun(name, found == CONFLICTS, world.clock())
    world.check_runs.append(run)
    ending = Ending("done", found, checked=(CheckedPoint(name, chain.last.increment, found, full=True),))
    record_without_intent(process.store, Command("check", name, operation), current_time(), "", ending)
    run.stored_at = world.schedule.steps
    process.log(f"finds {name}: {found}")


@contextmanager
def excusing_damage(process: Process, chain: Chain) -> Iterator[None]:
    """Assert that no object is damaged unless the snapshot is being deleted, or its increments pruned."""
    try:
        yield
    except ObjectDamagedError as error:
        if may_be_gone(process.world, (chain.name, chain.last.increment)):
            raise
        raise AssertionError(f"restores: {error.message}") from error


def read_numbers(process: Process, chain: Chain, node: str) -> list[int]:
    """The numbers that a node's rows have at the chain's last cut."""
    listed = [(one.key, (one.size, one.digest)) for one in objects_of(chain.full) if one.node == node]
    listed += [(one.key, (one.size, one.digest)) for one in chain.segments(node)]
    bodies = [read_listed(process.store, node, key, expected) for key, expected in listed]
    numbers: list[int] = []
    for body in bodies:
        # Read leniently: only the digest is meant to detect a truncated body.
        after, through = (int(word or 0) for word in [*body.decode().split(" "), "", "", "", ""][2:4])
        numbers += range(after + 1, through + 1)
    return [number for number in numbers if number <= chain.position(node)]
