"""What docs/storage.md promises of a repository, asserted on every listing and restore of a history, and at its end.

The truth is what those who ran the commands were told. A message begins with the promise's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from snapshots.listing.listing import Entry
from snapshots.operations.open_operations import OpenOperation
from snapshots.operations.operation import pending_operations
from snapshots.records.chain import Chain
from snapshots.records.operation_records import read_outcome
from storage.digest import digest
from tests.simulation.faulty_store import Bucket, Fault, FaultyStore, Weather
from tests.simulation.repository_model import NODES, Attempt, RepositoryWorld
from tests.simulation.store_processes import Process
from wal.slots.slots import slot_name

Numbers = tuple[str, int]


def check_chain(world: RepositoryWorld, chain: Chain, at: int) -> None:
    """Assert that what was read is what some process committed, and no other than was ever seen in its place."""
    before = ""
    for commit in chain.commits:
        attempt = world.attempts.get(commit.operation)
        what = f"{commit.snapshot} {commit.increment} of {commit.operation}"
        assert attempt, f"committed: {what} was never tried"
        assert attempt.told != "no", f"refused: {what} exists, and its process was told that it does not"
        number = (commit.snapshot, commit.increment)
        assert number == (attempt.snapshot, attempt.increment), f"numbers: {what} is in the place of another"
        first, _ = world.seen.setdefault(number, (commit.operation, at))
        assert first == commit.operation, f"numbers: {what} is in the place of {first}"
        assert attempt.previous == before, f"predecessor: {what} was made for {attempt.previous} and follows {before}"
        before = commit.operation


def check_listing(world: RepositoryWorld, process: Process, entries: Iterable[Entry]) -> None:
    """Assert that a listing shows nothing but what was committed, and all of it that it must.

    What somebody begins to delete meanwhile may be shown or not; a stale listing may be of before.
    """
    shown: dict[Numbers, str] = {}
    troubled: set[str] = set()
    for entry in entries:
        deletion = world.deletions.get(entry.name)
        is_gone = deletion and deletion.done_at is not None and deletion.done_at <= process.began_at
        assert not is_gone, f"deleted: {entry.name} is listed after it was deleted"
        if entry.chain:
            check_chain(world, entry.chain, world.schedule.steps)
            check_not_pruned(world, process, entry.chain)
            shown |= {(entry.name, one.increment): one.operation for one in entry.chain.commits}
        if entry.problem:
            troubled.add(entry.name)
            excused = deletion or Fault.TRUNCATED in process.faults
            assert excused, f"whole: {entry.name} is called broken: {entry.problem}"
    # A stale listing may miss a name; but of a name that it has, everything is read by key.
    for number, operation in known_before(world, process.began_at).items():
        name = number[0]
        if name in troubled or may_be_gone(world, number):
            continue
        is_missed = Fault.STALE in process.faults and (name, 0) not in shown
        is_there = is_missed or shown.get(number) == operation
        assert is_there, f"kept: {number} of {operation} is committed and not listed"


def may_be_gone(world: RepositoryWorld, number: Numbers) -> bool:
    """Whether somebody has begun to take it away."""
    name, increment = number
    return name in world.deletions or (increment > 0 and name in world.prunings)


def check_not_pruned(world: RepositoryWorld, process: Process, chain: Chain) -> None:
    """Assert that no increment is read of a chain whose increments were pruned when the reading began."""
    pruning = world.prunings.get(chain.name)
    is_gone = pruning and pruning.done_at is not None and pruning.done_at <= process.began_at
    assert not (is_gone and chain.increments), f"pruned: {chain.name} has increments"


def check_open(world: RepositoryWorld, operations: Iterable[OpenOperation]) -> None:
    """Assert that what a reader says of operations without an outcome agrees with what their processes were told."""
    for one in operations:
        attempt = world.attempts.get(one.id)
        assert not (one.committed and attempt and attempt.told == "no"), f"refused: {one.text}"


def known_before(world: RepositoryWorld, before: int) -> Mapping[Numbers, str]:
    """What exists for sure since before a step: somebody was told so, or has seen it."""
    known = {number: operation for number, (operation, at) in world.seen.items() if at < before}
    for one in world.attempts.values():
        if one.told == "yes" and one.told_at < before:
            known[one.snapshot, one.increment] = one.operation
    return known


def check_restored(world: RepositoryWorld, process: Process, chain: Chain, state: Mapping[str, list[int]]) -> None:
    """Assert that what was restored is the fleet's state at the cut."""
    check_chain(world, chain, world.schedule.steps)
    check_not_pruned(world, process, chain)
    deletion = world.deletions.get(chain.name)
    is_gone = deletion and deletion.done_at is not None and deletion.done_at <= process.began_at
    assert not is_gone, f"deleted: {chain.name} is restored after it was deleted"
    attempt = world.attempts[chain.last.operation]
    for node in NODES:
        truth = list(range(1, attempt.positions[node] + 1))
        assert state[node] == truth, f"restores: {chain.name} {attempt.increment}: {node} has {state[node]}"


def check_newest(world: RepositoryWorld, process: Process, chain: Chain) -> None:
    """Assert that nothing is committed after the end of a chain that was read whole."""
    for (name, increment), _operation in known_before(world, process.began_at).items():
        is_there = name != chain.name or increment <= chain.last.increment or may_be_gone(world, (name, increment))
        assert is_there, f"kept: {name} {increment} is committed, and {chain.last.increment} was read as its newest"


def check_attempts(world: RepositoryWorld) -> None:
    """Assert that what was told, what was seen and what is settled agree; at the end, with no process left."""
    store = FaultyStore(world.bucket, Weather())
    seen = {operation for operation, _ in world.seen.values()}
    for one in world.attempts.values():
        what = f"{one.snapshot} {one.increment} of {one.operation}"
        assert one.told != "no" or one.operation not in seen, f"refused: {what} was seen, and its process told no"
        if may_be_gone(world, (one.snapshot, one.increment)):
            continue
        outcome = read_outcome(store, one.operation)
        if outcome is None:
            continue
        is_done = outcome.state == "done"
        assert is_done == (one.operation in seen), f"settled: {what} is settled otherwise than it was seen"


def check_nothing_open(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that nothing is left unsettled, no slot but those of the chains that go on, and no object changed ever."""
    store = FaultyStore(world.bucket, Weather())
    left = [one.id for one in pending_operations(store) if one.kind != "restore"]
    assert not left, f"settled: operations are open after the next command: {left}"
    slots = {slot_name(one.chain.full.chain) for one in entries.values() if one.chain and goes_on(one)}
    assert world.nodes.slots.keys() == slots, f"slots: {world.nodes.slots.keys() ^ slots}"
    check_never_overwritten(world.bucket)


def goes_on(entry: Entry) -> bool:
    """Whether the snapshot is to get increments."""
    return not entry.lost and not entry.is_only_full


def check_no_garbage(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that gc has left all that is listed, and data of nothing else but of the chains that are."""
    chains = {one.chain.full.chain: one for one in entries.values() if one.chain}
    listed = {
        key for one in chains.values() if one.chain for commit in one.chain.commits for key in commit.object_sizes
    }
    stored = set(world.bucket.stored.list("snapshots"))
    assert listed <= stored, f"garbage: gc has removed {sorted(listed - stored)}"
    for key in stored - listed:
        if key.endswith(".parquet"):
            owner = key.split("/")[4]
            is_next = "/wal/" in key and owner in chains and goes_on(chains[owner])
            assert is_next, f"garbage: gc has left {key}"


def check_never_overwritten(bucket: Bucket) -> None:
    """Assert that every object is what it was when it was created."""
    for key in bucket.stored.list(""):
        is_first = digest(bucket.stored.read(key)) == bucket.first[key]
        assert is_first, f"overwritten: {key} is not what it was"


def tally_of(attempts: Iterable[Attempt]) -> dict[str, int]:
    """How many creates were told what."""
    tally: dict[str, int] = {}
    for one in attempts:
        name = f"told {one.told or 'nothing'}"
        tally[name] = tally.get(name, 0) + 1
    return tally
