"""Prepare the tables for a cut: find what DDL changed, publish new tables, copy those that can't be converted.

None of it counts until a commit lists it. A slot that is left behind is dropped when the operation is undone or
settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.copy_plan import TableSource
from cutline.snapshots.base_copy.copy_slots import check_exported, drop_copy_slots, export_snapshots
from cutline.snapshots.base_copy.copy_tables import copy_tables
from cutline.snapshots.base_copy.destination import CopyDestination
from cutline.snapshots.create.chain_state import ChainState
from cutline.snapshots.create.context import CreateContext
from cutline.snapshots.ddl.attempts import ChangedError
from cutline.snapshots.ddl.table_changes import (
    DdlPlan,
    NodeTables,
    add_to_publications,
    plan_ddl,
    read_current_tables,
    report_changes,
)
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.records.stored_object import NamedObject
from cutline.snapshots.tasks.spark_jobs import SparkSource
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import archive_prefix, last_number, segment_key
from cutline.wal.segments.definitions import Definition
from cutline.wal.segments.segments import list_unlisted
from cutline.wal.slots.slots import copy_slot_name


@dataclass(frozen=True, slots=True)
class Archived:
    """What failed attempts archived: definitions by shard, and the number of the last segment by node."""

    definitions: Mapping[str, list[Definition]]
    last_segments: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeArchived:
    """What failed attempts archived of one node: its definitions, and the number of its last segment."""

    definitions: tuple[Definition, ...]
    last_segment: int


@dataclass(frozen=True, slots=True)
class PreparedTables:
    """The tables as the cut uses them.

    `last_segments` are the numbers of the last archived segments, by node. `entries` are the new base copies;
    `positions`, by node, are the positions from which changes to the copied tables count.
    """

    plan: DdlPlan
    last_segments: Mapping[str, int]
    entries: tuple[NamedObject, ...] = ()
    positions: Mapping[str, Lsn] = field(default_factory=dict)


def prepare_tables(
    context: CreateContext,
    state: ChainState,
    moved: Mapping[str, set[int]],
    spark: SparkSource,
    progress: Progress,
    see: Callable[[Mapping[str, NodeTables]], object],
) -> PreparedTables:
    """Plan, publish new tables, and copy the tables that can't be converted.

    `moved` are the oids of tables, by shard, for which an earlier attempt met an unknown definition in WAL. `see` is
    given the primaries' tables whenever they are read: an error is due to DDL only if they have changed since. Raises
    ChangedError if DDL intervened. The slots of copies that failed are left.
    """
    sessions = context.sessions
    archived = read_archived(context.store, context.operation.snapshot, state, sessions.nodes)
    node_tables = read_current_tables(sessions, state.selection, state.seen)
    see(node_tables)
    plan = plan_ddl(node_tables, state.known, archived.definitions, moved)
    if plan.unpublished:
        add_to_publications(sessions, plan.unpublished, state.selection, context.request.wait_seconds, progress)
        progress.reached(CrashPoint.TABLES_PUBLISHED)
        node_tables = read_current_tables(sessions, state.selection, node_tables)
        see(node_tables)
        plan = plan_ddl(node_tables, state.known, archived.definitions, moved)
        if plan.unpublished:
            raise ChangedError("a table was created while new tables were published")
    report_changes(plan, progress)
    if not plan.to_copy:
        return PreparedTables(plan, archived.last_segments)
    return _copy_tables(context, PreparedTables(plan, archived.last_segments), spark, progress)


def read_archived(store: ObjectStore, snapshot: str, state: ChainState, nodes: Iterable[Node]) -> Archived:
    """Read the definitions in the segments that no commit lists."""
    nodes = list(nodes)

    def read(node: Node) -> NodeArchived:
        prefix = archive_prefix(snapshot, node.id, state.chain)
        last = last_number(state.segments.get(node.id, ()))
        if not store.exists(segment_key(prefix, last + 1)):
            return NodeArchived((), last)
        unlisted = list(list_unlisted(store, prefix, last))
        definitions = tuple(definition for segment in unlisted for definition in segment.definitions)
        return NodeArchived(definitions, last + len(unlisted))

    definitions: dict[str, list[Definition]] = {}
    last_segments: dict[str, int] = {}
    for node, archived in zip(nodes, in_parallel(read, nodes), strict=True):
        definitions.setdefault(node.shard, []).extend(archived.definitions)
        last_segments[node.id] = archived.last_segment
    return Archived(definitions, last_segments)


def _copy_tables(
    context: CreateContext, prepared: PreparedTables, spark: SparkSource, progress: Progress
) -> PreparedTables:
    """Copy the tables that can't be converted; return `prepared` with their copies and positions."""
    sessions, plan = context.sessions, prepared.plan
    spark.begin(context.executor_needs, progress)
    tables, slot = plan.to_copy, copy_slot_name(context.operation.id)
    nodes = tuple(node for node in sessions.nodes if node.shard in tables)
    destination = CopyDestination(context.operation.snapshot, context.operation.id, context.fleet.store)

    with export_snapshots(context.fleet, nodes, slot, context.request.wait_seconds, progress) as slots:
        check_exported(nodes, slots, plan.fingerprints)
        sources = [TableSource(node, slots[node.id].snapshot, tables[node.shard]) for node in nodes]
        entries = copy_tables(sources, destination, sessions, spark, progress)
        positions = {node: exported.position for node, exported in slots.items()}
    drop_copy_slots(nodes, slot, progress)
    return PreparedTables(plan, prepared.last_segments, tuple(entries), positions)
