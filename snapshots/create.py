"""Taking a full snapshot: slots, base copies, the first cut, the commit.

In this order, so that nothing is lost whatever the last line executed was: a slot keeps every change from its
position on; the base copy shows what was there before it; the cut archives what came since. Until the commit
is stored nothing of it exists, and an error takes the slots away again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from fleet.config import Fleet, Node
from fleet.groups import GroupRules, Table, number_groups, read_tables
from fleet.preconditions import check_nodes
from fleet.progress import Progress
from fleet.publications import check_admissible, check_published, publication_names
from fleet.sessions import Sessions, in_parallel, locked_fleet, open_sessions
from snapshots.base_copy import copy_ranges
from snapshots.base_plan import plan_copy
from snapshots.commits import SnapshotExistsError, check_name, commit_key, publish
from snapshots.counting import counts_of
from snapshots.cutting import Before, CutPlan, MadeCut, make_cut
from snapshots.jobs import SparkSource, raise_first, run_tasks
from snapshots.manifest import Commit, FullPart, StoredObject
from snapshots.operations import Operation, new_operation, recorded
from snapshots.prepared import await_prepared, prepared_transactions
from snapshots.schema import read_roles, read_sequences, schema_prefix, store_schema
from snapshots.settle import settle_operations
from snapshots.store_identity import read_identity
from storage.open import open_store
from storage.store import ObjectStore
from wal.drain import DrainTask
from wal.slots import ExportedSlot, create_exported_slot, slot_name, slots_dropped_on_error

PARTITION_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """What the user asks for. `include` and `exclude` are patterns on top of fleet.toml's."""

    name: str
    only_primary: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    retries: int = 3
    wait_seconds: float = 60.0
    comment: str = ""


@dataclass(frozen=True, slots=True)
class FullPlan:
    """What a full snapshot will copy: the nodes, and every shard's tables."""

    nodes: tuple[Node, ...]
    tables: Mapping[str, list[Table]]
    fleet_id: str


@dataclass(frozen=True, slots=True)
class Taking:
    """One full snapshot under way."""

    fleet: Fleet
    request: CreateRequest
    store: ObjectStore
    operation: Operation
    sessions: Sessions
    plan: FullPlan

    @property
    def slot(self) -> str:
        """The chain's slot on every node."""
        return slot_name(self.operation.id)


def chosen_nodes(fleet: Fleet, *, only_primary: bool) -> tuple[Node, ...]:
    """The nodes that a snapshot copies."""
    return fleet.primaries if only_primary else fleet.nodes


def plan_full(fleet: Fleet, request: CreateRequest, sessions: Sessions, store: ObjectStore) -> FullPlan:
    """Make every check of a full snapshot, changing nothing; raise the first that fails."""
    check_name(request.name)
    identity = read_identity(store, fleet)
    if store.exists(commit_key(request.name, 0)):
        raise SnapshotExistsError(
            f"snapshot {request.name} exists already",
            hint=f"its next increment: snapshot create {request.name} --incremental; or choose another name",
            details={"snapshot": request.name},
        )
    check_nodes(sessions)
    rules = narrowed(fleet.groups, request)
    tables = {node: read_tables(connection, rules) for node, connection in sessions.primaries.items()}
    check_admissible(tables)
    tables = number_groups(tables, PARTITION_ROWS)
    for node, connection in sessions.primaries.items():
        names = [table.group.name for table in tables[node]]
        check_published(connection, node, identity.fleet_id, names)
    return FullPlan(sessions.nodes, tables, identity.fleet_id)


def narrowed(rules: GroupRules, request: CreateRequest) -> GroupRules:
    """fleet.toml's rules, narrowed by --group and --exclude-group."""
    return replace(
        rules, include=request.include or rules.include, exclude=(*rules.exclude, *request.exclude)
    )


def create_full(fleet: Fleet, request: CreateRequest, spark: SparkSource, progress: Progress) -> Commit:
    """Take the full snapshot and return its commit."""
    began = time.monotonic()
    progress.step("check nodes")
    store = open_store(fleet.store_url, fleet.store_options)
    nodes = chosen_nodes(fleet, only_primary=request.only_primary)
    with open_sessions(fleet, nodes) as sessions:
        plan = plan_full(fleet, request, sessions, store)
        with locked_fleet(sessions, fleet.name):
            settle_operations(store, fleet, progress)
            operation = new_operation("create", request.name, 0, tuple(node.id for node in nodes))
            operation = replace(operation, slot=slot_name(operation.id))
            taking = Taking(fleet, request, store, operation, sessions, plan)
            with recorded(store, operation), slots_dropped_on_error(list(nodes), taking.slot):
                return _take(taking, spark, progress, began)


def _take(taking: Taking, spark: SparkSource, progress: Progress, began: float) -> Commit:
    with _exported_slots(taking, progress) as slots:
        base = {node: slot.position for node, slot in slots.items()}
        objects = _copy_base(taking, slots, spark, progress)
    prepared = {node: prepared_transactions(c) for node, c in taking.sessions.primaries.items()}
    await_prepared(taking.sessions.primaries, prepared, taking.request.wait_seconds, progress)
    made = make_cut(taking.sessions, _cut_plan(taking, base), spark, taking.store, progress)
    commit = _commit(taking, base, objects, made, time.monotonic() - began)
    progress.step("commit")
    publish(taking.store, commit)
    return commit


@contextmanager
def _exported_slots(taking: Taking, progress: Progress) -> Iterator[dict[str, ExportedSlot]]:
    """Slots on all nodes; while the block runs, their exported snapshots can be used."""
    progress.step("slots", total=len(taking.plan.nodes), unit="nodes")

    def create(node: Node) -> ExportedSlot:
        primary = taking.fleet.node(node.shard)
        slot = create_exported_slot(node, primary, taking.slot, taking.request.wait_seconds)
        progress.advance(1)
        return slot

    with ExitStack() as stack, ThreadPoolExecutor(max_workers=len(taking.plan.nodes)) as threads:
        futures = {node.id: threads.submit(create, node) for node in taking.plan.nodes}
        problem: BaseException | None = None
        slots: dict[str, ExportedSlot] = {}
        for node, future in futures.items():
            try:
                slots[node] = future.result()
                stack.callback(slots[node].connection.close)
            except BaseException as error:
                problem = problem or error
        if problem:
            raise problem
        yield slots


def _copy_base(
    taking: Taking, slots: Mapping[str, ExportedSlot], spark: SparkSource, progress: Progress
) -> list[StoredObject]:
    """Copy all rows in a Spark job, and the DDL of every shard beside it."""
    fleet, snapshot, operation = taking.fleet, taking.request.name, taking.operation.id
    work = {
        node.id: (node, slots[node.id].snapshot, taking.plan.tables[node.shard]) for node in taking.plan.nodes
    }
    tasks = plan_copy(work, snapshot, operation, (fleet.store_url, fleet.store_options))
    primaries = [node for node in taking.plan.nodes if node.backup_of is None]

    def dump(node: Node) -> list[StoredObject]:
        prefix = schema_prefix(snapshot, node.id, operation)
        return store_schema(taking.store, node, prefix, slots[node.id].snapshot)

    with ThreadPoolExecutor(max_workers=1) as threads:
        schemas = threads.submit(in_parallel, dump, primaries)
        session = spark.session()
        progress.step("copy", total=len(tasks), unit="tasks")
        reports = run_tasks(session, copy_ranges, tasks, progress)
        raise_first([report.problem for report in reports])
        copied = [stored for report in reports for stored in report.objects]
        return copied + [stored for found in schemas.result() for stored in found]


def _cut_plan(taking: Taking, base: Mapping[str, int]) -> CutPlan:
    fleet, plan = taking.fleet, taking.plan
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=taking.slot,
            publications=publication_names(plan.fleet_id),
            snapshot=taking.request.name,
            chain=taking.operation.id,
            operation=taking.operation.id,
            groups={table.group.name: table.group for table in plan.tables[node.shard]},
            global_id_form=fleet.global_id,
            base=base[node.id],
            known=(),
            finish=0,
            store_url=fleet.store_url,
            store_options=fleet.store_options,
        )
        for node in plan.nodes
    }
    before = {node.id: Before(base[node.id]) for node in plan.nodes if node.backup_of is None}
    return CutPlan(taking.operation.id, taking.operation.id, tasks, before, taking.request.retries)


def _commit(
    taking: Taking, base: Mapping[str, int], objects: list[StoredObject], made: MadeCut, seconds: float
) -> Commit:
    sessions, plan = taking.sessions, taking.plan
    part = FullPart(
        fleet_id=plan.fleet_id,
        global_id_form=taking.fleet.global_id,
        baseline=sessions.identities,
        groups={node: tuple(table.group for table in found) for node, found in plan.tables.items()},
        base=base,
        objects=tuple(objects),
        roles={node: read_roles(connection) for node, connection in sessions.primaries.items()},
    )
    return Commit(
        snapshot=taking.request.name,
        increment=0,
        operation=taking.operation.id,
        chain=taking.operation.id,
        created_at=taking.operation.began_at,
        seconds=seconds,
        cut=made.record,
        segments=made.segments,
        sequences={node: read_sequences(connection) for node, connection in sessions.primaries.items()},
        counts=counts_of(plan.nodes, made, objects),
        comment=taking.request.comment,
        full=part,
    )
