"""What must hold after all faults: the next command settles, and what is committed stays, restores and continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.records.chain import Chain
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.faulty_store import LatePut
from tests.simulation.reading_processes import list_store, restore
from tests.simulation.repository_model import ONLY_FULL, TOMBSTONE, RepositoryWorld
from tests.simulation.repository_promises import check_create_runs, check_no_garbage, check_nothing_open, is_continuable
from tests.simulation.retention_processes import collect, prune_nothing
from tests.simulation.store_processes import NO_FAULTS, Process

# After this long, gc considers no object young.
LATER_SECONDS = 3 * 3600.0


def check_after_faults(world: RepositoryWorld, names: tuple[str, ...]) -> None:
    """Assert the promises for a store that nothing but late puts can still change."""
    for late in list(world.bucket.late):
        # These arrive before the last create. A late mark removes what it marks, which no command has reported yet, and
        # the slots of an ended chain are dropped by the next create. After a late intent, an operation seems to run
        # until the next create.
        is_mark = TOMBSTONE.fullmatch(late.key) or ONLY_FULL.fullmatch(late.key) or "/ended/" in late.key
        is_early = is_mark or late.key.endswith("/intent.json")
        if is_early or world.below(2):
            deliver_late(world, late)
    run_without_faults(world, "create last", partial(create_full, name="last"))
    settled = chains_of(list_entries(world))
    for late in list(world.bucket.late):
        deliver_late(world, late)
    again = list_entries(world)
    assert chains_of(again) == settled, "settled: a late put changes what is listed"
    if world.deletions or world.prunings:
        # Let a lease that arrived late expire.
        world.skip(LATER_SECONDS)
        run_without_faults(world, "prune", prune_nothing)
        check_gone(world, again)
    check_gc(world, again)
    check_pinned(world)
    for name in names:
        if name not in again and name not in deleted_names(world):
            run_without_faults(world, f"create {name}", partial(create_full, name=name))
    for name in names:
        if name in again:
            check_continues(world, name, again[name])
    entries = list_entries(world)
    check_create_runs(world)
    check_nothing_open(world, entries)
    world.tally["snapshots and increments committed"] += sum(
        one.last.increment + 1 for one in chains_of(entries).values()
    )


def check_gc(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that gc removes all garbage and nothing else, so that a second gc finds nothing."""
    world.skip(LATER_SECONDS)
    before = world.tally["objects of garbage removed"]
    run_without_faults(world, "gc", collect)
    removed = world.tally["objects of garbage removed"]
    if removed > before:
        run_without_faults(world, "gc again", collect)
        assert world.tally["objects of garbage removed"] == removed, "garbage: a second gc finds something"
    check_no_garbage(world, entries)


def deleted_names(world: RepositoryWorld) -> list[str]:
    """The names that have a tombstone."""
    return [found[1] for key in world.bucket.stored.list("deleted") if (found := TOMBSTONE.fullmatch(key))]


def check_pinned(world: RepositoryWorld) -> None:
    """Assert that what is pinned can be restored, unless a mark that may break pins was stored."""
    stored = world.bucket.stored.list("")
    for pin in world.pins:
        if pin.is_released or any(map(pin.is_broken_by, stored)):
            continue
        title = f"restore {pin.snapshot}@{pin.increment}"
        run_without_faults(world, title, partial(restore, name=pin.snapshot, increment=pin.increment))
        world.tally["pins that held"] += 1


def check_gone(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that deleted snapshots are not listed, leave no objects, and that their names are refused."""
    for name in deleted_names(world):
        assert name not in entries, f"deleted: {name} is listed"
        left = world.bucket.stored.list(f"snapshots/{name}")
        assert not left, f"deleted: {left} are left"
        reported = Process(world, f"create {name} again", NO_FAULTS).run(partial(create_full, name=name))
        assert reported == "no", f"deleted: the name {name} is used again"
    for name, deletion in world.deletions.items():
        assert deletion.done_at is None or name in deleted_names(world), f"deleted: {name} has no tombstone"


def check_continues(world: RepositoryWorld, name: str, entry: Entry) -> None:
    """Assert that a snapshot can be restored, and continued unless it is lost or pruned."""
    if entry.chain is None:
        return
    if is_continuable(entry):
        run_without_faults(world, f"increment {name}", partial(create_increment, name=name))
    number = world.below(entry.chain.last.increment + 2)
    # Without a number, restore the newest.
    increment = number if number <= entry.chain.last.increment else None
    run_without_faults(world, f"restore {name} {number}", partial(restore, name=name, increment=increment))


def deliver_late(world: RepositoryWorld, late: LatePut) -> None:
    """Let a late put arrive now."""
    is_stored = world.bucket.deliver(late)
    world.log(f"late: {late.key} {'is stored' if is_stored else 'comes too late'}")
    world.tally["late puts stored" if is_stored else "late puts refused"] += 1


def run_without_faults(world: RepositoryWorld, title: str, work: Callable[[Process], object]) -> None:
    """Run a command without faults: it must succeed."""
    reported = Process(world, title, NO_FAULTS).run(work)
    assert reported == "yes", f"continues: {title} fails without a fault"


def list_entries(world: RepositoryWorld) -> dict[str, Entry]:
    """The entries that `list` shows now, without faults."""
    found: list[Entry] = []
    run_without_faults(world, "list", lambda process: found.extend(list_store(process)))
    return {entry.name: entry for entry in found}


def chains_of(entries: Mapping[str, Entry]) -> dict[str, Chain]:
    """The chains of the entries."""
    return {name: entry.chain for name, entry in entries.items() if entry.chain}
