"""The work of a full snapshot: slots, base copies, the first cut, the commit.

In this order, so that nothing is lost whatever the last line executed was: a slot keeps every change from its
position on; the base copy shows what was there before it; the cut archives what came since, and carries what was
changed of the schema meanwhile. Until the commit is stored nothing of it exists, and an error takes the slots away
again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from fleet.append_only import SNAPSHOT_BEGAN
from fleet.config import Node
from fleet.left_out import read_left_out, standby_copies
from fleet.progress import Progress
from fleet.sessions import in_parallel
from snapshots.attempts import ChangedError, until_unchanged, void_if
from snapshots.carrying import Work
from snapshots.copying import (
    Copying,
    check_exported,
    copy_tables,
    drop_copy_slots,
    exported_slots,
)
from snapshots.counted import check_counted, counted_states
from snapshots.counting import counts_of
from snapshots.create import Creating, FullPlan
from snapshots.cutting import Before
from snapshots.exclusive import check_exclusive
from snapshots.jobs import SparkSource, raise_first, run_tasks
from snapshots.large_objects import with_stored
from snapshots.manifest import Commit, FullPart, StoredObject
from snapshots.operations import commit_operation
from snapshots.points import Point
from snapshots.prepared import await_prepared
from snapshots.schema import read_roles, schema_prefix, store_schema
from snapshots.schema_changes import Known, changed_since, current, publish_new, read_all, unpublished
from snapshots.taking import Taken, take_cut
from snapshots.terminal import check_final, end_writes
from wal.slots import ExportedSlot, slot_name


def take_full(creating: Creating, plan: FullPlan, spark: SparkSource, progress: Progress, began: float) -> Commit:
    """Take the snapshot and commit it; `began` is when the command did (time.monotonic)."""
    progress.reached(Point.INTENT_STORED)
    plan, base, objects = _based(creating, plan, spark, progress)
    wait = creating.request.wait_seconds
    await_prepared(creating.sessions, wait, progress)
    progress.reached(Point.PREPARED_OVER)

    def close() -> Mapping[str, int]:
        return end_writes(creating.lock, creating.store, creating.operation, plan.fleet_id, wait, progress)

    work = _work(creating, plan, base)
    taken = take_cut(work, spark, progress, close if creating.request.terminal else None)
    progress.step("commit")
    part = _full_part(creating, plan, base, objects)
    untold = check_counted(creating.sessions, counted_states(taken.tables, work.known), SNAPSHOT_BEGAN)
    commit = _commit(creating, part, taken, time.monotonic() - began)
    commit = replace(commit, left_out=(*with_stored(commit.left_out or (), commit), *untold))
    check_final(taken.plan, taken.made, taken.ends, creating.sessions, creating.store)
    check_exclusive(creating.lock, creating.store, creating.operation)
    commit_operation(creating.store, creating.operation, commit)
    progress.reached(Point.COMMITTED)
    return commit


def _based(
    creating: Creating, plan: FullPlan, spark: SparkSource, progress: Progress
) -> tuple[FullPlan, dict[str, int], list[StoredObject]]:
    """Make the slots and copy everything: the plan that was copied, the slots' positions by node, and the objects.

    What is changed of the schema before a slot is there makes the attempt void, before anything is copied; so does what
    a copy meets, a table that was dropped say.
    """
    where = (plan.fleet_id, plan.rules)

    def changed() -> str:
        return changed_since(creating.sessions, plan.catalogs, where)

    def attempt() -> tuple[FullPlan, dict[str, int], list[StoredObject]]:
        seen = current(creating.sessions, where, plan.catalogs)
        now = _published(creating, replace(plan, catalogs=seen), progress)
        copying = Copying(creating, now.nodes, now.tables, slot_name(creating.operation.id))
        try:
            with void_if(changed), exported_slots(copying, progress) as slots:
                check_exported(copying, slots, now.fingerprints)
                objects = _copied(copying, slots, spark, progress)
        except ChangedError:
            drop_copy_slots(copying, progress)
            raise
        progress.reached(Point.SNAPSHOTS_RELEASED)
        return now, {node: slot.position for node, slot in slots.items()}, objects

    return until_unchanged(attempt, creating.request.retries, progress)


def _published(creating: Creating, plan: FullPlan, progress: Progress) -> FullPlan:
    """The same with all tables in a publication: those that came since `init` are put into one."""
    where = (plan.fleet_id, plan.rules)
    if not (names := unpublished(plan.catalogs)):
        return plan
    publish_new(creating.sessions, names, where, creating.request.wait_seconds, progress)
    progress.reached(Point.TABLES_PUBLISHED)
    return replace(plan, catalogs=read_all(creating.sessions, where))


def _copied(
    copying: Copying, slots: Mapping[str, ExportedSlot], spark: SparkSource, progress: Progress
) -> list[StoredObject]:
    """Copy all rows in a Spark job, and the DDL of every shard beside it."""
    creating = copying.creating
    primaries = [node for node in copying.nodes if node.backup_of is None]

    def dump(node: Node) -> list[StoredObject]:
        prefix = schema_prefix(creating.request.name, node.id, creating.operation.id)
        return store_schema(creating.store, node, prefix, slots[node.id].snapshot, creating.sessions.watch)

    with ThreadPoolExecutor(max_workers=1) as threads:
        schemas = threads.submit(in_parallel, dump, primaries)
        copied = copy_tables(copying, slots, spark, progress)
        if creating.request.large_objects:
            copied += _copied_large(creating, slots, spark, progress)
        copied += [stored for found in schemas.result() for stored in found]
        progress.reached(Point.SCHEMA_STORED)
        return copied


def _copied_large(
    creating: Creating, slots: Mapping[str, ExportedSlot], spark: SparkSource, progress: Progress
) -> list[StoredObject]:
    """Copy the large objects of all primaries in a Spark job."""
    # Imported where it is asked for, as few ask.
    from snapshots.large_copy import copy_large, plan_large

    fleet, connections = creating.fleet, creating.sessions.primaries
    work = {id_: (fleet.node(id_), slots[id_].snapshot, connection) for id_, connection in connections.items()}
    tasks = plan_large(work, creating.request.name, creating.operation.id, (fleet.store_url, fleet.store_options))
    progress.step("copy large objects", total=len(tasks), unit="tasks")
    reports = run_tasks(spark.session(), copy_large, tasks, progress, creating.sessions.watch)
    raise_first([report.problem for report in reports])
    return [stored for report in reports for stored in report.objects]


def _work(creating: Creating, plan: FullPlan, base: Mapping[str, int]) -> Work:
    groups = {node: tuple(table.group for table in found) for node, found in plan.tables.items()}
    highest = max((group.number for found in groups.values() for group in found), default=0)
    return Work(
        creating,
        plan.fleet_id,
        plan.rules,
        creating.operation.id,
        Known(groups, plan.states, plan.fingerprints, highest),
        plan.catalogs,
        base,
        {},
        {node.id: Before(base[node.id]) for node in plan.nodes if node.backup_of is None},
    )


def _full_part(creating: Creating, plan: FullPlan, base: Mapping[str, int], objects: list[StoredObject]) -> FullPart:
    sessions = creating.sessions
    return FullPart(
        fleet_id=plan.fleet_id,
        global_id_form=creating.fleet.global_id,
        baseline=sessions.identities,
        groups={node: tuple(table.group for table in found) for node, found in plan.tables.items()},
        base=base,
        objects=tuple(objects),
        roles=sessions.ask_primaries(read_roles),
        rules=plan.rules,
        tables=plan.states,
        fingerprints=plan.fingerprints,
    )


def _commit(creating: Creating, part: FullPart, taken: Taken, seconds: float) -> Commit:
    objects = (*part.objects, *(taken.schema.objects if taken.schema else ()))
    return Commit(
        snapshot=creating.request.name,
        increment=0,
        operation=creating.operation.id,
        chain=creating.operation.id,
        created_at=creating.operation.began_at,
        seconds=seconds,
        cut=taken.made.record,
        segments=taken.made.segments,
        sequences=taken.sequences,
        counts=counts_of(creating.sessions.nodes, taken.made, objects),
        comment=creating.request.comment,
        full=part,
        schema=taken.schema,
        terminal=creating.request.terminal,
        left_out=read_left_out(creating.sessions.primaries, part.rules, taken.groups)
        + standby_copies(creating.sessions.too_old, creating.sessions.identities),
    )
