"""The promises of docs/store-format.md, asserted on every listing and restore of a history, and at its end.

They are checked against what the commands reported. Every message begins with the name of the promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta

from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.operations.open_operations import OpenOperation, read_open_intents
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.operation_records import read_outcome
from cutline.snapshots.records.proven_chains import read_chain
from cutline.snapshots.removal.pruning import PrunePlan
from cutline.snapshots.removal.retention import RetentionFate
from cutline.storage.digest import digest
from cutline.wal.drain.slots import slot_name
from tests.simulation.faulty_store import Bucket, FaultyStore
from tests.simulation.repository_model import NODES, CreateRun, PinRun, RepositoryWorld
from tests.simulation.store_faults import Fault, FaultSource
from tests.simulation.store_processes import Process

Numbers = tuple[str, int]
CHECK_SPAN = timedelta(minutes=1)


def check_chain(world: RepositoryWorld, chain: Chain, at: int) -> None:
    """Assert that the chain is what processes committed, and that no two commits were ever seen under one number."""
    check_commits_seen(world, chain.name, {one.increment: one.operation for one in chain.commits}, at)


def check_commits_seen(world: RepositoryWorld, name: str, operations: Mapping[int, str], at: int) -> None:
    """Assert the same of these increments of a snapshot, each with its operation."""
    for increment, operation in operations.items():
        run = world.create_runs.get(operation)
        what = f"{name} {increment} of {operation}"
        assert run, f"committed: {what} was never created"
        assert run.reported != "no", f"refused: {what} exists, and was reported as failed"
        number = (name, increment)
        assert number == (run.snapshot, run.increment), f"numbers: {what} has the number of another"
        first, _ = world.seen.setdefault(number, (operation, at))
        assert first == operation, f"numbers: {what} has the number of {first}"
        before = operations[increment - 1] if increment else ""
        assert run.previous == before, f"predecessor: {what} was made for {run.previous} and follows {before}"


def check_listing(world: RepositoryWorld, process: Process, entries: Iterable[Entry]) -> None:
    """Assert that a listing shows only what was committed, and all of that.

    What is being removed may be shown or not. A stale listing may show an earlier state.
    """
    shown: dict[Numbers, str] = {}
    troubled: set[str] = set()
    for entry in entries:
        deletion = world.deletions.get(entry.name)
        is_gone = deletion and deletion.done_at is not None and deletion.done_at <= process.began_at
        is_unsure = entry.chain is None and Fault.TRUNCATED in process.faults
        assert not is_gone or is_unsure, f"deleted: {entry.name} is listed after it was deleted"
        if entry.chain:
            listed = {0: entry.chain.full.operation} | {one.increment: one.operation for one in entry.summaries}
            check_commits_seen(world, entry.name, listed, world.schedule.steps)
            check_not_pruned(world, process, entry.chain)
            shown |= {(entry.name, number): operation for number, operation in listed.items()}
        if entry.problem:
            troubled.add(entry.name)
            excused = Fault.TRUNCATED in process.faults
            assert excused, f"whole: {entry.name} is reported as broken: {entry.problem}"
    # A stale listing may miss a snapshot; but the commits of the ones that it shows are read by key.
    for number, operation in known_before(world, process.began_at).items():
        name = number[0]
        if name in troubled or may_be_gone(world, number):
            continue
        is_missed = Fault.STALE in process.faults and (name, 0) not in shown
        is_there = is_missed or shown.get(number) == operation
        assert is_there, f"kept: {number} of {operation} is committed and not listed"


def may_be_gone(world: RepositoryWorld, number: Numbers) -> bool:
    """Whether its removal has begun."""
    name, increment = number
    return name in world.deletions or (increment > 0 and name in world.prunings)


def check_not_pruned(world: RepositoryWorld, process: Process, chain: Chain) -> None:
    """Assert that the chain has no increments if they had been pruned when the process began."""
    pruning = world.prunings.get(chain.name)
    is_gone = pruning and pruning.done_at is not None and pruning.done_at <= process.began_at
    assert not (is_gone and chain.increments), f"pruned: {chain.name} has increments"


def check_open(world: RepositoryWorld, operations: Iterable[OpenOperation]) -> None:
    """Assert that no open operation is shown as committed that was reported as failed."""
    for one in operations:
        run = world.create_runs.get(one.id)
        assert not (one.committed and run and run.reported == "no"), f"refused: {one.text}"


def known_before(world: RepositoryWorld, before: int) -> Mapping[Numbers, str]:
    """The commits that had certainly been stored before a step: reported by their create, or seen by a reader."""
    known = {number: operation for number, (operation, at) in world.seen.items() if at < before}
    for one in world.create_runs.values():
        if one.reported == "yes" and one.reported_at < before:
            known[one.snapshot, one.increment] = one.operation
    return known


def check_restored(world: RepositoryWorld, process: Process, chain: Chain, state: Mapping[str, list[int]]) -> None:
    """Assert that a restore yields the fleet's state at the cut."""
    check_chain(world, chain, world.schedule.steps)
    check_not_pruned(world, process, chain)
    deletion = world.deletions.get(chain.name)
    is_gone = deletion and deletion.done_at is not None and deletion.done_at <= process.began_at
    assert not is_gone, f"deleted: {chain.name} is restored after it was deleted"
    run = world.create_runs[chain.last.operation]
    for node in NODES:
        truth = list(range(1, run.positions[node] + 1))
        assert state[node] == truth, f"restores: {chain.name} {run.increment}: {node} has {state[node]}"


def check_newest(world: RepositoryWorld, process: Process, chain: Chain) -> None:
    """Assert that a chain that was read as a whole ends at its newest increment."""
    for (name, increment), _operation in known_before(world, process.began_at).items():
        is_there = name != chain.name or increment <= chain.last.increment or may_be_gone(world, (name, increment))
        assert is_there, f"kept: {name} {increment} is committed, and {chain.last.increment} was read as its newest"


def check_prune_plan(world: RepositoryWorld, process: Process, plan: PrunePlan, began_at: int, *, force: bool) -> None:
    """Assert that snapshots with conflicts take no place from others, if a check had recorded them before the prune."""
    if process.faults & {Fault.STALE, Fault.TRUNCATED}:
        return
    restorable = [one for one in plan.verdicts if plan.held[one.name].is_restorable]
    fine = {one.name for one in restorable} - {one.snapshot for one in world.check_runs if one.has_conflicts}
    others = [one for one in restorable if not has_surely_conflicts(world, one.name, began_at)]
    last, only_full = (len(fine) if count == "all" else count or 0 for count in (plan.rules.last, plan.rules.only_full))
    least = min(len(fine), max(last, only_full, 0 if force else 1))
    left = [one.name for one in others if one.fate is not RetentionFate.DELETE]
    assert len(left) >= least, f"checked: of {sorted(fine)} without conflicts {left} stay by {plan.rules}"
    left = [one.name for one in others if one.fate is RetentionFate.KEEP]
    # The newest of the snapshots that stay keeps its increments under any rules.
    least = min(least, max(last, 1))
    assert len(left) >= least, f"checked: of {sorted(fine)} {left} keep their increments by {plan.rules}"


def check_pin(world: RepositoryWorld, pin: PinRun) -> None:
    """Assert that no mark that breaks the pin is stored, unless it may break pins."""
    marks = [key for key in world.bucket.stored.list("") if pin.is_broken_by(key) and key not in world.excused_marks]
    assert not marks, f"pinned: {pin.snapshot} {pin.increment} was pinned, and {marks} are stored"


def has_surely_conflicts(world: RepositoryWorld, name: str, before: int) -> bool:
    """Whether a check had recorded conflicts before a step, and none has found it valid since, by their clocks."""
    runs = [one for one in world.check_runs if one.snapshot == name]
    found = [one for one in runs if one.has_conflicts and one.stored_at is not None and one.stored_at <= before]
    newest = max((one.ended_at for one in found), default=None)
    # A check ends a few calls after its clock was read.
    return newest is not None and all(one.has_conflicts or one.ended_at < newest - CHECK_SPAN for one in runs)


def check_create_runs(world: RepositoryWorld) -> None:
    """Assert, at the end, that what creates reported, what readers saw, and the stored outcomes agree."""
    store = FaultyStore(world.bucket, FaultSource())
    seen = {operation for operation, _ in world.seen.values()}
    for one in world.create_runs.values():
        what = f"{one.snapshot} {one.increment} of {one.operation}"
        assert one.reported != "no" or one.operation not in seen, (
            f"refused: {what} was seen, and was reported as failed"
        )
        if may_be_gone(world, (one.snapshot, one.increment)):
            continue
        outcome = read_outcome(store, one.operation)
        if outcome is None:
            continue
        is_done = outcome.state == "done"
        assert is_done == (one.operation in seen), f"settled: the outcome of {what} contradicts what was seen"


def check_nothing_open(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that nothing is unsettled, only chains that continue have slots, and no object was ever changed."""
    store = FaultyStore(world.bucket, FaultSource())
    left = [one.id for one in read_open_intents(store) if one.kind != "restore"]
    assert not left, f"settled: operations are open after the next command: {left}"
    slots = {slot_name(one.chain.full.chain) for one in entries.values() if one.chain and is_continuable(one)}
    assert world.nodes.slots.keys() == slots, f"slots: {world.nodes.slots.keys() ^ slots}"
    check_never_overwritten(world.bucket)


def is_continuable(entry: Entry) -> bool:
    """Whether the snapshot can get further increments."""
    return not entry.ended and not entry.is_only_full


def check_no_garbage(world: RepositoryWorld, entries: Mapping[str, Entry]) -> None:
    """Assert that all objects of listed chains are stored, and no data except theirs and of their next increments."""
    chains = {one.chain.full.chain: one for one in entries.values() if one.chain}
    # `list` reads no more of a chain than its newest part.
    whole = [read_chain(world.bucket.stored, one.name) for one in chains.values()]
    listed = {key for chain in whole for commit in chain.commits for key in commit.object_sizes}
    stored = set(world.bucket.stored.list("snapshots"))
    assert listed <= stored, f"garbage: gc has removed {sorted(listed - stored)}"
    for key in stored - listed:
        if key.endswith(".parquet"):
            owner = key.split("/")[4]
            is_next = "/wal/" in key and owner in chains and is_continuable(chains[owner])
            assert is_next, f"garbage: gc has left {key}"


def check_never_overwritten(bucket: Bucket) -> None:
    """Assert that every object still has the bytes that it was created with."""
    for key in bucket.stored.list(""):
        is_first = digest(bucket.stored.read(key)) == bucket.first_digests[key]
        assert is_first, f"overwritten: {key} has changed"


def count_reports(runs: Iterable[CreateRun]) -> dict[str, int]:
    """How many creates reported each result."""
    tally: dict[str, int] = {}
    for one in runs:
        name = f"reported {one.reported or 'nothing'}"
        tally[name] = tally.get(name, 0) + 1
    return tally
