"""What must hold once no fault is left: the next command settles, and what is committed stays, restores and goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from snapshots.listing.listing import Entry
from snapshots.records.chain import Chain
from tests.simulation.create_processes import create_full, create_increment
from tests.simulation.faulty_store import Late
from tests.simulation.reading_processes import list_store, restore
from tests.simulation.repository_model import ONLY_FULL, TOMBSTONE, RepositoryWorld
from tests.simulation.repository_promises import check_attempts, check_no_garbage, check_nothing_open, goes_on
from tests.simulation.retention_processes import collect, prune_nothing
from tests.simulation.store_processes import CALM, Process

# After it nothing is young to gc.
LATER_SECONDS = 3 * 3600.0


def check_calm(world: RepositoryWorld, names: tuple[str, ...]) -> None:
    """Assert what is promised of a store to which only puts that are still under way can happen."""
    for late in list(world.bucket.late):
        # A mark may come late: what it marks is gone from then on, and told by nobody before; the slots of a chain that
        # is lost go by the create after it. And an intent that comes after the last create is that of an operation
        # that seems to run until the next one.
        is_mark = TOMBSTONE.fullmatch(late.key) or ONLY_FULL.fullmatch(late.key) or "/lost/" in late.key
        is_early = is_mark or late.key.endswith("/intent.json")
        if is_early or world.below(2):
            arrive(world, late)
    run_calm(world, "create last", partial(create_full, name="last"))
    settled = chains_of(listed(world))
    for late in list(world.bucket.late):
        arrive(world, late)
    again = listed(world)
    assert chains_of(again) == settled, "settled: what is listed changes after it was settled"
    if world.deletions or world.prunings:
        # A lease that came late runs out.
        world.skip(LATER_SECONDS)
        run_calm(world, "prune", prune_nothing)
        check_gone(world, again)
    check_gc(world, again)
    for name in names:
        if name not in again and name not in gone_of(world):
            run_calm(world, f"create {name}", partial(create_full, name=name))
    for name in names:
        if name in again:
            check_goes_on(world, name, again[name])
    entries = listed(world)
    check_attempts(world)
    check_nothing_open(world, entries)
    world.tally["snapshots and increments committed"] += sum(len(one.commits) for one in chains_of(entries).values())


def check_gc(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that gc takes what is garbage, only that, and leaves nothing to a second one."""
    world.skip(LATER_SECONDS)
    before = world.tally["objects of garbage removed"]
    run_calm(world, "gc", collect)
    removed = world.tally["objects of garbage removed"]
    if removed > before:
        run_calm(world, "gc again", collect)
        assert world.tally["objects of garbage removed"] == removed, "garbage: gc leaves something to a second one"
    check_no_garbage(world, entries)


def gone_of(world: RepositoryWorld) -> list[str]:
    """The names of which there is a tombstone."""
    return [found[1] for key in world.bucket.stored.list("deleted") if (found := TOMBSTONE.fullmatch(key))]


def check_gone(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that what is deleted is not listed, its objects are gone, and its name is never used again."""
    for name in gone_of(world):
        assert name not in entries, f"deleted: {name} is listed"
        left = world.bucket.stored.list(f"snapshots/{name}")
        assert not left, f"deleted: {left} is left"
        told = Process(world, f"create {name} again", CALM).run(partial(create_full, name=name))
        assert told == "no", f"deleted: the name {name} is used again"
    for name, deletion in world.deletions.items():
        assert deletion.done_at is None or name in gone_of(world), f"deleted: {name} has no tombstone"


def check_goes_on(world: RepositoryWorld, name: str, entry: Entry) -> None:
    """Assert that a snapshot restores, and gets its next increment if it is to get any."""
    if entry.chain is None:
        return
    if goes_on(entry):
        run_calm(world, f"increment {name}", partial(create_increment, name=name))
    number = world.below(entry.chain.last.increment + 2)
    # Without a number it is the newest.
    increment = number if number <= entry.chain.last.increment else None
    run_calm(world, f"restore {name} {number}", partial(restore, name=name, increment=increment))


def arrive(world: RepositoryWorld, late: Late) -> None:
    """Let a put that was under way arrive now."""
    is_stored = world.bucket.arrive(late)
    world.tell(f"late: {late.key} {'is stored' if is_stored else 'comes too late'}")
    world.tally["late puts stored" if is_stored else "late puts refused"] += 1


def run_calm(world: RepositoryWorld, title: str, work: Callable[[Process], object]) -> None:
    """Run a command that nothing stands in the way of: it must succeed."""
    told = Process(world, title, CALM).run(work)
    assert told == "yes", f"goes on: {title} fails with no fault left"


def listed(world: RepositoryWorld) -> dict[str, Entry]:
    """What is listed now, by a reader that meets no fault."""
    found: list[Entry] = []
    run_calm(world, "list", lambda process: found.extend(list_store(process)))
    return {entry.name: entry for entry in found}


def chains_of(entries: Mapping[str, Entry]) -> dict[str, Chain]:
    """The chains that were listed."""
    return {name: entry.chain for name, entry in entries.items() if entry.chain}
