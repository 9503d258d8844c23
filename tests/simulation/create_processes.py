"""Simulated creates: the steps of a full create and of an increment, in order, on the nodes of the model.

The product's own code writes all documents. The archive is the model's, and drained as in wal.drain.drain: read the
segments after the known ones, create the next one, advance the slot past it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.lsn import Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.snapshots.create.chain_objects import check_objects
from cutline.snapshots.create.continuable import check_commits
from cutline.snapshots.operations.committing import has_committed
from cutline.snapshots.operations.open_operations import has_failed
from cutline.snapshots.operations.operation import (
    Operation,
    check_exclusive,
    commit_operation,
    new_operation,
    record_operation,
)
from cutline.snapshots.operations.settling import settle_operations
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, CutRecord, FullSnapshot, Increment, Previous, StoredObject
from cutline.snapshots.records.commit_rules import count_listed
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import check_chain_not_ended, has_end
from cutline.snapshots.records.operation_records import Intent, read_intent
from cutline.snapshots.records.proven_chains import (
    check_name,
    check_not_pruned,
    commit_missing_error,
    free_turn,
    increment_numbers,
    read_continued,
    read_continued_full,
)
from cutline.snapshots.records.tombstones import check_not_deleted, is_deleted, is_only_full
from cutline.storage.digest import digest
from cutline.storage.errors import BusyError, RefusedError
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectExistsError, ObjectMissingError
from cutline.storage.storing import create_or_find
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.drain.slots import SlotLostError, slot_name
from cutline.wal.segments.archive import ArchiveError, Segment, archive_prefix, check_contiguous, segment_key
from tests.simulation.repository_model import NODES, CreateRun
from tests.simulation.store_processes import ModelLock, Process, exclusive
from tests.unit.made_commits import MARKED_AT

FLEET = Fleet(
    Path("fleet.toml"), "simulated", StoreLocation("memory://simulated"), (), "exact", GroupRules(), "local[1]", {}
)
BASELINE = tuple(
    NodeIdentity(node, None, "7", 1, 5, "postgres", 180000, "UTF8", "C", "C", in_recovery=False) for node in NODES
)
CHUNK_MAX = 3


class ArchiveBusyError(BusyError):
    """Another process writes the model's archive."""


@dataclass(slots=True)
class Work:
    """One running create, and what its cut is made from."""

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

    @property
    def idle(self) -> dict[str, Segment]:
        return {node: known[-1] for node, known in self.known.items() if known and not self.segments[node]}


def create_full(process: Process, name: str) -> None:
    """`snapshot create NAME`."""
    store, nodes = process.store, process.world.nodes
    check_name(name)
    check_not_deleted(store, name)
    free_turn(store, name, 0)
    if increment_numbers(store, name):
        raise commit_missing_error(name, 0)
    with exclusive(process) as lock:
        settle_operations(store, FLEET, process)
        check_not_deleted(store, name)
        guard_nodes(process)
        intent = new_operation("create", name, 0, ())
        slot = slot_name(intent.id)
        operation = Operation(structs.replace(intent, slot=slot, turn=free_turn(store, name, 0)))
        register_create(process, operation.intent)
        with record_operation(store, operation, lambda: not process.drop_slots(slot)):
            process.ask_node("make slots")
            base = dict(nodes.wal)
            nodes.slots[slot] = dict(base)
            objects = [_store_base(process, operation, node, position) for node, position in base.items()]
            work = Work(process, lock, operation, operation.id, base, dict.fromkeys(NODES, ()))
            cut = make_cut(work)
            commit = FullSnapshot(
                fleet_id="f",
                global_id_form="exact",
                baseline=BASELINE,
                groups=dict.fromkeys(NODES, ()),
                base={node: Lsn(position) for node, position in base.items()},
                copied=tuple(objects),
                roles=dict.fromkeys(NODES, ()),
                rules=GroupRules(),
                tables={},
                fingerprints={},
                **_common(work, cut),
            )
            commit_work(work, _counted(commit))


def create_increment(process: Process, name: str) -> None:
    """`snapshot create NAME --incremental`."""
    store = process.store
    full = read_continued_full(store, name)
    check_not_pruned(store, name)
    with exclusive(process) as lock:
        settle_operations(store, FLEET, process)
        guard_nodes(process)
        chain = read_continued(store, name, full)
        check_chain_not_ended(store, chain)
        check_commits(store, chain)
        _check_slots(process, chain)
        chain.check_archive()
        check_objects(store, chain)
        number = chain.last.increment + 1
        intent = new_operation("create", name, number, ())
        operation = Operation(structs.replace(intent, turn=free_turn(store, name, number)))
        register_create(process, operation.intent, previous=chain.last.operation)
        with record_operation(store, operation):
            known = {node: chain.newest_segments(node) for node in NODES}
            work = Work(process, lock, operation, chain.full.chain, chain.full.base, known)
            cut = make_cut(work)
            previous = Previous(chain.last.operation, chain.last.digest)
            commit = Increment(previous=previous, history=chain.next_history, idle=work.idle, **_common(work, cut))
            operation.is_idle = work.idle.keys() == set(NODES) and not commit.named
            commit_work(work, _counted(commit))


def guard_nodes(process: Process) -> None:
    """Drop the slots of chains that can't be continued, as the slot guard does: failed operations and ended chains."""
    store, slots = process.store, process.world.nodes.slots
    process.ask_node("what is kept")
    chains = {slot_name(operation): operation for operation in store.list_children("operations")}
    for slot, chain in [(slot, chains[slot]) for slot in slots if slot in chains]:
        with suppress(ObjectMissingError, ManifestError):
            operation = read_intent(store, chain)
            may_continue = not has_failed(store, chain) or has_committed(store, operation)
            is_removed = is_deleted(store, operation.snapshot) or is_only_full(store, operation.snapshot)
            if may_continue and not is_removed and not has_end(store, operation.snapshot, chain):
                continue
            process.drop_slots(slot)


def register_create(process: Process, operation: Intent, previous: str = "") -> None:
    """Record the create and its operation; assert that no operation id is used twice."""
    world = process.world
    assert operation.id not in world.create_runs, f"ids: {operation.id} is used twice"
    process.create_run = CreateRun(operation.id, operation.snapshot, operation.increment, previous)
    world.create_runs[operation.id] = process.create_run
    process.log(f"is operation {operation.id}, turn {operation.turn}")


def commit_work(work: Work, commit: Commit) -> None:
    """Run the last steps of a create."""
    check_exclusive(work.lock, work.process.store, work.operation)  # type: ignore[arg-type]
    commit_operation(work.process.store, work.operation, commit)


def make_cut(work: Work) -> Mapping[str, int]:
    """Let the fleet write, take a position on every node, and drain up to these positions."""
    process, world = work.process, work.process.world
    work.lock.renew()
    world.nodes.write(world.draw)
    positions = dict(world.nodes.wal)
    for node in NODES:
        work.segments[node] = drain(work, node, positions[node])
    if process.create_run:
        process.create_run.positions = positions
    return positions


def drain(work: Work, node: str, finish: int) -> tuple[Segment, ...]:
    """Archive a node's WAL up to `finish`, as wal.drain.drain does; return the segments after the known ones."""
    process, prefix = work.process, archive_prefix(work.operation.snapshot, node, work.chain)
    process.ask_node(f"slot of {node}")
    confirmed = process.world.nodes.slots.get(work.slot, {}).get(node)
    known = work.known[node]
    last = known[-1].number if known else 0
    found: list[Segment] = []
    while True:
        try:
            found.append(_read_segment(process, prefix, last + len(found) + 1))
        except ObjectMissingError:
            break
    begin, first = (known[0].after, known[0].number) if known else (Lsn(work.base[node]), 1)
    check_contiguous(node, begin, [*known, *found], first=first)
    through = max([work.base[node], *(one.through for one in (*known, *found))])
    if confirmed is None or confirmed > through:
        raise SlotLostError(f"node {node}: slot {work.slot} is at {confirmed}, the archive at {through}")
    _advance(work, node, through)
    while through < finish:
        after, through = through, min(finish, through + 1 + process.world.below(CHUNK_MAX))
        number = last + len(found) + 1
        body = f"{node} {work.operation.id} {int(after)} {int(through)} .".encode()
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
        raise ArchiveBusyError(f"node {node}: another process advanced slot {work.slot}")
    slots[node] = through


def _read_segment(process: Process, prefix: str, number: int) -> Segment:
    key = segment_key(prefix, number)
    return _segment(key, number, process.store.read(key))


def _segment(key: str, number: int, body: bytes) -> Segment:
    words = body.decode().split(" ")
    if words[4:] != ["."]:
        raise ArchiveError(f"object {key} is not a segment that this version can read")
    return Segment(
        key=key, number=number, size=len(body), digest=digest(body), changes=1, events=1, partials=0, truncates=0,
        node=words[0], operation=words[1], after=Lsn(int(words[2])), through=Lsn(int(words[3])), open=None,
    )  # fmt: skip


def _store_base(process: Process, operation: Operation, node: str, position: int) -> StoredObject:
    key = f"snapshots/{operation.snapshot}/base/{node}/{operation.id}/part-1.parquet"
    body = f"{node} {operation.id} 0 {position} .".encode()
    create_or_find(process.store, key, body)
    return StoredObject(key, "base", node, len(body), digest(body), {})


def _check_slots(process: Process, chain: Chain) -> None:
    slot = slot_name(chain.full.chain)
    process.ask_node(f"see {slot}")
    if slot not in process.world.nodes.slots:
        raise RefusedError(f"slot {slot} is gone")


def _counted(commit: Commit) -> Commit:
    return structs.replace(commit, counts=count_listed(set(NODES), commit))


def _common(work: Work, positions: Mapping[str, int]) -> dict[str, Any]:
    """The fields that commits of both kinds have."""
    cut = CutRecord(
        id=f"{work.operation.id}.1",
        attempts=1,
        seconds=0.1,
        nodes=tuple(
            NodeCut(node, Lsn(position), Lsn(position), Lsn(position), 1, (), (), (), MARKED_AT)
            for node, position in positions.items()
        ),
        global_transactions=0,
        included_early=0,
        in_flight=0,
        made_at=MARKED_AT,
        safe_at=MARKED_AT,
        skew_seconds=0.0,
    )
    return {
        "snapshot": work.operation.snapshot,
        "increment": work.operation.increment,
        "operation": work.operation.id,
        "chain": work.chain,
        "created_at": work.operation.began_at,
        "seconds": 1.0,
        "comment": "",
        "counts": {},
        "cut": cut,
        "sequences": dict.fromkeys(NODES, ()),
        "segments": dict(work.segments),
    }
