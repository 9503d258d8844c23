"""Simulated creates: the steps of snapshots.create and snapshots.increment in their order, over the model's nodes.

All that is done to the store's documents is the product's own code. The archive is the model's, drained as wal.drain
does it: read on from what is known, create the next segment, advance the slot past it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleet.baseline import NodeIdentity
from fleet.config import Fleet, GroupRules
from snapshots.chain import Chain
from snapshots.commits import check_name, check_not_pruned, commit_gone, free_turn, increment_numbers, read_chain
from snapshots.continuable import check_commits, check_objects
from snapshots.deciding import has_committed
from snapshots.documents import ManifestError
from snapshots.exclusive import check_exclusive
from snapshots.lost import check_not_lost, is_lost
from snapshots.manifest import Commit, CutRecord, FullPart, Previous, StoredObject
from snapshots.operations import Operation, commit_operation, has_failed, new_operation, read_intent, recorded
from snapshots.settle import settle_operations
from snapshots.tombstones import check_not_deleted, is_deleted, is_only_full
from storage.digest import digest
from storage.errors import BusyError, RefusedError
from storage.store import ObjectExistsError, ObjectMissingError
from storage.storing import create_or_find
from tests.simulation.repository_model import NODES, Attempt
from tests.simulation.store_processes import ModelLock, Process, exclusive
from wal.archive import ArchiveError, Segment, SegmentRange, archive_prefix, check_contiguous, segment_key
from wal.cut_values import Cut, NodeCut
from wal.slots import SlotLostError, slot_name

FLEET = Fleet(Path("fleet.toml"), "simulated", "memory://simulated", {}, (), "exact", GroupRules(), "local[1]", {})
BASELINE = {
    node: NodeIdentity(node, None, "7", 1, 5, "postgres", 180000, "UTF8", "C", "C", in_recovery=False) for node in NODES
}
CHUNK_MAX = 3


class ArchiveBusyError(BusyError):
    """Another process writes the model's archive."""


@dataclass(slots=True)
class Work:
    """One create under way, and what its cut is made of."""

    process: Process
    lock: ModelLock
    operation: Operation
    chain: str
    base: Mapping[str, int]
    known: Mapping[str, tuple[Segment, ...]]
    segments: dict[str, tuple[Segment, ...]] = field(default_factory=dict)

    @property
    def slot(self) -> str:
        return slot_name(self.chain)


def create_full(process: Process, name: str) -> None:
    """`snapshot create NAME`."""
    store, nodes = process.store, process.world.nodes
    check_name(name)
    check_not_deleted(store, name)
    free_turn(store, name, 0)
    if increment_numbers(store, name):
        raise commit_gone(name, 0)
    with exclusive(process) as lock:
        settle_operations(store, FLEET, process)
        check_not_deleted(store, name)
        guard_nodes(process)
        operation = new_operation("create", name, 0, ())
        slot = slot_name(operation.id)
        operation = replace(operation, slot=slot, turn=free_turn(store, name, 0))
        begin(process, operation)
        with recorded(store, operation, lambda: not process.drop_slots(slot)):
            process.ask_node("make slots")
            base = dict(nodes.wal)
            nodes.slots[slot] = dict(base)
            objects = [_store_base(process, operation, node, position) for node, position in base.items()]
            work = Work(process, lock, operation, operation.id, base, dict.fromkeys(NODES, ()))
            cut = make_cut(work)
            part = FullPart(
                "f",
                "exact",
                BASELINE,
                dict.fromkeys(NODES, ()),
                base,
                tuple(objects),
                dict.fromkeys(NODES, ()),
                GroupRules(),
            )
            commit_work(work, replace(_commit(work, cut), full=part))


def create_increment(process: Process, name: str) -> None:
    """`snapshot create NAME --incremental`."""
    store = process.store
    read_chain(store, name, 0)
    check_not_pruned(store, name)
    with exclusive(process) as lock:
        settle_operations(store, FLEET, process)
        guard_nodes(process)
        chain = read_chain(store, name)
        check_not_pruned(store, name)
        check_not_lost(store, chain)
        check_commits(store, chain)
        _check_slots(process, chain)
        chain.check_archive()
        check_objects(store, chain)
        number = chain.last.increment + 1
        operation = new_operation("create", name, number, ())
        operation.turn = free_turn(store, name, number)
        begin(process, operation, previous=chain.last.operation)
        with recorded(store, operation):
            known = {node: chain.segments(node) for node in NODES}
            work = Work(process, lock, operation, chain.full.chain, chain.part.base, known)
            cut = make_cut(work)
            previous = Previous(chain.last.operation, chain.last.digest)
            commit_work(work, replace(_commit(work, cut), previous=previous))


def guard_nodes(process: Process) -> None:
    """Drop the slots of what can't go on, as snapshots.retained does: of failed operations, and of lost chains."""
    store, slots = process.store, process.world.nodes.slots
    process.ask_node("what is kept")
    chains = {slot_name(operation): operation for operation in store.list_children("operations")}
    for slot, chain in [(slot, chains[slot]) for slot in slots if slot in chains]:
        with suppress(ObjectMissingError, ManifestError):
            operation = read_intent(store, chain)
            has_no_end = not has_failed(store, chain) or has_committed(store, operation)
            is_gone = is_deleted(store, operation.snapshot) or is_only_full(store, operation.snapshot)
            if has_no_end and not is_gone and not is_lost(store, operation.snapshot, chain):
                continue
            process.drop_slots(slot)


def begin(process: Process, operation: Operation, previous: str = "") -> None:
    """Keep who tries what; an operation id is never used twice."""
    world = process.world
    assert operation.id not in world.attempts, f"ids: {operation.id} is used twice"
    process.attempt = Attempt(operation.id, operation.snapshot, operation.increment, previous)
    world.attempts[operation.id] = process.attempt
    process.tell(f"is operation {operation.id}, turn {operation.turn}")


def commit_work(work: Work, commit: Commit) -> None:
    """The last steps of a create."""
    check_exclusive(work.lock, work.process.store, work.operation)  # type: ignore[arg-type]
    commit_operation(work.process.store, work.operation, commit)


def make_cut(work: Work) -> Mapping[str, int]:
    """Let the fleet write, take a position on every node, and bring the archives up to them."""
    process, world = work.process, work.process.world
    work.lock.renew()
    world.nodes.write(world.draw)
    positions = dict(world.nodes.wal)
    for node in NODES:
        work.segments[node] = drain(work, node, positions[node])
    if process.attempt:
        process.attempt.positions = positions
    return positions


def drain(work: Work, node: str, finish: int) -> tuple[Segment, ...]:
    """Bring a node's archive up to `finish`: the segments after the known ones. As wal.drain does it."""
    process, prefix = work.process, archive_prefix(work.operation.snapshot, node, work.chain)
    process.ask_node(f"slot of {node}")
    confirmed = process.world.nodes.slots.get(work.slot, {}).get(node)
    known = work.known[node]
    found: list[Segment] = []
    while True:
        try:
            found.append(_read_segment(process, prefix, len(known) + len(found) + 1))
        except ObjectMissingError:
            break
    check_contiguous(node, work.base[node], [*known, *found])
    through = max([work.base[node], *(one.range.through for one in (*known, *found))])
    if confirmed is None or confirmed > through:
        raise SlotLostError(f"node {node}: slot {work.slot} is at {confirmed}, the archive at {through}")
    _advance(work, node, through)
    while through < finish:
        after, through = through, min(finish, through + 1 + process.world.below(CHUNK_MAX))
        number = len(known) + len(found) + 1
        body = f"{node} {work.operation.id} {after} {through} .".encode()
        try:
            create_or_find(process.store, segment_key(prefix, number), body)
        except ObjectExistsError as error:
            raise ArchiveBusyError(f"node {node}: another process writes its archive") from error
        found.append(_segment(segment_key(prefix, number), number, body))
        _advance(work, node, through)
    return tuple(found)


def _advance(work: Work, node: str, through: int) -> None:
    work.process.ask_node(f"advance {node}")
    slots = work.process.world.nodes.slots.get(work.slot)
    if slots is None:
        raise SlotLostError(f"node {node}: slot {work.slot} is gone")
    if slots[node] > through:
        raise ArchiveBusyError(f"node {node}: somebody else moves slot {work.slot}")
    slots[node] = through


def _read_segment(process: Process, prefix: str, number: int) -> Segment:
    key = segment_key(prefix, number)
    return _segment(key, number, process.store.read(key))


def _segment(key: str, number: int, body: bytes) -> Segment:
    words = body.decode().split(" ")
    if words[4:] != ["."]:
        raise ArchiveError(f"object {key} is not a segment of this version")
    held = SegmentRange(words[0], words[1], int(words[2]), int(words[3]))
    return Segment(key, number, held, len(body), digest(body), 1, 1, 0, 0)


def _store_base(process: Process, operation: Operation, node: str, position: int) -> StoredObject:
    key = f"snapshots/{operation.snapshot}/base/{node}/{operation.id}/part-1.parquet"
    body = f"{node} {operation.id} 0 {position} .".encode()
    create_or_find(process.store, key, body)
    return StoredObject(key, "base", node, len(body), digest(body))


def _check_slots(process: Process, chain: Chain) -> None:
    slot = slot_name(chain.full.chain)
    process.ask_node(f"see {slot}")
    if slot not in process.world.nodes.slots:
        raise RefusedError(f"slot {slot} is gone")


def _commit(work: Work, positions: Mapping[str, int]) -> Commit:
    cuts = {node: NodeCut(position, position, position, (), (), 1) for node, position in positions.items()}
    return Commit(
        snapshot=work.operation.snapshot,
        increment=work.operation.increment,
        operation=work.operation.id,
        chain=work.chain,
        created_at=work.operation.began_at,
        seconds=1.0,
        cut=CutRecord(f"{work.operation.id}.1", 1, 0.1, Cut(cuts, 0, 0, 0)),
        segments=work.segments,
        sequences=dict.fromkeys(NODES, ()),
        counts={"bytes": 0, "changes": 0, "transactions": 0},
    )
