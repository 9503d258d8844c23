"""The work of a full snapshot: slots, base copies, the first cut, the commit.

In this order, so that nothing is lost whatever the last line executed was: a slot keeps every change from its
position on; the base copy shows what was there before it; the cut archives what came since. Until the commit
is stored nothing of it exists, and an error takes the slots away again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from fleet.config import Node
from fleet.progress import Progress
from fleet.publications import publication_names
from fleet.sessions import in_parallel
from snapshots.base_copy import copy_ranges
from snapshots.base_plan import plan_copy
from snapshots.commits import publish
from snapshots.continuable import check_tables
from snapshots.counting import counts_of
from snapshots.create import Taking
from snapshots.cutting import Before, CutPlan, MadeCut, make_cut
from snapshots.exclusive import check_exclusive
from snapshots.jobs import SparkSource, raise_first, run_tasks, started
from snapshots.manifest import Commit, FullPart, Sequence, StoredObject
from snapshots.points import Point
from snapshots.prepared import await_prepared
from snapshots.schema import read_roles, read_sequences, schema_prefix, store_schema
from wal.drain import DrainTask
from wal.slots import ExportedSlot, create_exported_slot


def take_full(taking: Taking, spark: SparkSource, progress: Progress, began: float) -> Commit:
    """Take the snapshot and commit it; `began` is when the command did (time.monotonic)."""
    progress.reached(Point.INTENT_STORED)
    with _exported_slots(taking, progress) as slots:
        base = {node: slot.position for node, slot in slots.items()}
        objects = _copy_base(taking, slots, spark, progress)
    progress.reached(Point.SNAPSHOTS_RELEASED)
    await_prepared(taking.sessions, taking.request.wait_seconds, progress)
    progress.reached(Point.PREPARED_OVER)
    made = make_cut(taking.lock, _cut_plan(taking, base), spark, taking.store, progress)
    progress.step("commit")
    sequences = taking.sessions.ask_primaries(read_sequences)
    progress.reached(Point.SEQUENCES_READ)
    part = _full_part(taking, base, objects)
    check_tables(taking.sessions, part)
    commit = _commit(taking, part, made, sequences, time.monotonic() - began)
    check_exclusive(taking.lock, taking.store, taking.operation)
    publish(taking.store, commit)
    progress.reached(Point.COMMITTED)
    return commit


@contextmanager
def _exported_slots(taking: Taking, progress: Progress) -> Iterator[dict[str, ExportedSlot]]:
    """Slots on all nodes; while the block runs, their exported snapshots can be used."""
    progress.step("slots", total=len(taking.plan.nodes), unit="nodes")

    abandoned = threading.Event()

    def create(node: Node) -> ExportedSlot:
        primary = taking.fleet.node(node.shard)
        waiting = (taking.request.wait_seconds, progress, abandoned)
        slot = create_exported_slot(node, primary, taking.slot, *waiting)
        progress.advance(1)
        progress.reached(Point.SLOT_MADE, node=node.id)
        return slot

    with ExitStack() as stack, ThreadPoolExecutor(max_workers=len(taking.plan.nodes)) as threads:
        futures = {node.id: threads.submit(create, node) for node in taking.plan.nodes}
        problem: BaseException | None = None
        slots: dict[str, ExportedSlot] = {}
        for node, future in futures.items():
            try:
                slots[node] = future.result()
                stack.callback(slots[node].connection.close)
            except BaseException as error:  # noqa: BLE001  # raised below, once all are collected
                problem = problem or error
                abandoned.set()
        if problem:
            raise problem
        yield slots


def _copy_base(
    taking: Taking, slots: Mapping[str, ExportedSlot], spark: SparkSource, progress: Progress
) -> list[StoredObject]:
    """Copy all rows in a Spark job, and the DDL of every shard beside it."""
    fleet, snapshot, operation = taking.fleet, taking.request.name, taking.operation.id
    work = {node.id: (node, slots[node.id].snapshot, taking.plan.tables[node.shard]) for node in taking.plan.nodes}
    tasks = plan_copy(work, snapshot, operation, (fleet.store_url, fleet.store_options))
    primaries = [node for node in taking.plan.nodes if node.backup_of is None]

    def dump(node: Node) -> list[StoredObject]:
        prefix = schema_prefix(snapshot, node.id, operation)
        return store_schema(taking.store, node, prefix, slots[node.id].snapshot, taking.sessions.watch)

    with ThreadPoolExecutor(max_workers=1) as threads:
        schemas = threads.submit(in_parallel, dump, primaries)
        session = started(spark, progress)
        progress.step("copy", total=len(tasks), unit="tasks")
        reports = run_tasks(session, copy_ranges, tasks, progress, taking.sessions.watch)
        raise_first([report.problem for report in reports])
        progress.reached(Point.BASE_COPIED)
        copied = [stored for report in reports for stored in report.objects]
        copied += [stored for found in schemas.result() for stored in found]
        progress.reached(Point.SCHEMA_STORED)
        return copied


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
            oids={state.oid: name for name, state in plan.states[node.shard].items()},
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


def _full_part(taking: Taking, base: Mapping[str, int], objects: list[StoredObject]) -> FullPart:
    sessions, plan = taking.sessions, taking.plan
    return FullPart(
        fleet_id=plan.fleet_id,
        global_id_form=taking.fleet.global_id,
        baseline=sessions.identities,
        groups={node: tuple(table.group for table in found) for node, found in plan.tables.items()},
        base=base,
        objects=tuple(objects),
        roles=sessions.ask_primaries(read_roles),
        rules=plan.rules,
        tables=plan.states,
    )


def _commit(
    taking: Taking, part: FullPart, made: MadeCut, sequences: Mapping[str, tuple[Sequence, ...]], seconds: float
) -> Commit:
    return Commit(
        snapshot=taking.request.name,
        increment=0,
        operation=taking.operation.id,
        chain=taking.operation.id,
        created_at=taking.operation.began_at,
        seconds=seconds,
        cut=made.record,
        segments=made.segments,
        sequences=sequences,
        counts=counts_of(taking.plan.nodes, made, part.objects),
        comment=taking.request.comment,
        full=part,
        left_out=taking.plan.left_out,
    )
