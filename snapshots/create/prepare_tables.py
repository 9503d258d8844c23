"""Prepare the tables for a cut: find DDL changes, publish new tables, and copy tables that can't be converted.

The copies don't count until a commit lists them. A slot that is left behind is dropped when the operation is undone or
settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import Struct, field

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.nodes.groups import Table
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.base_copy.copy_ranges import CopyDestination
from cutline.snapshots.base_copy.copy_slots import check_exported, drop_copy_slots
from cutline.snapshots.base_copy.copy_tables import TableSource, amount_to_copy, copy_tables
from cutline.snapshots.create.context import ChainState, CreateContext
from cutline.snapshots.create.readers import choose_readers, export_readers_last
from cutline.snapshots.ddl.table_changes import (
    DdlPlan,
    NodeTables,
    plan_ddl,
    publish_new_tables,
    read_current_tables,
    read_sizes,
    report_changes,
)
from cutline.snapshots.records.commit import NamedObject
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import copy_slot_name
from cutline.wal.segments.archive import ArchivedSegment, Definition, archive_prefix, last_number, segment_key
from cutline.wal.segments.segments import list_unlisted


class Archived(Struct, frozen=True):
    """The archive of failed attempts: definitions by shard, and the number of the last segment by node."""

    definitions: Mapping[str, list[Definition]]
    last_segments: Mapping[str, int]


class NodeArchived(Struct, frozen=True):
    """The archive of failed attempts on one node: its definitions, and the number of its last segment."""

    definitions: tuple[Definition, ...]
    last_segment: int


class PreparedTables(Struct, frozen=True):
    """The tables as the cut uses them.

    `last_segments` holds the number of each node's last archived segment. `entries` lists the new base copies.
    `positions` holds, by node, the position from which changes to the copied tables count. `readers` are the standbys
    on which the copied tables of primaries were read, by primary. `rewritten` lists, by node, the copied tables whose
    rows may be incomplete (snapshots/create/rewritten_tables.py).
    """

    plan: DdlPlan
    last_segments: Mapping[str, int]
    entries: tuple[NamedObject, ...] = ()
    positions: Mapping[str, Lsn] = field(default_factory=dict)
    readers: Mapping[str, str] = field(default_factory=dict)
    rewritten: Mapping[str, tuple[Table, ...]] = field(default_factory=dict)


def prepare_tables(
    context: CreateContext,
    state: ChainState,
    moved: Mapping[str, set[int]],
    seen: dict[str, NodeTables],
    spark: SparkSource,
    progress: Progress,
) -> PreparedTables:
    """Plan, publish new tables, and copy the tables that can't be converted.

    `moved` holds, by shard, the oids of tables for which an earlier attempt found an unknown definition in WAL. `seen`
    holds the primaries' tables as they were last found, even after an error: the error is due to DDL only if the tables
    have changed since. Raises ChangedError if DDL interfered. The slots of failed copies remain.
    """
    sessions = context.sessions
    archived = read_archived(context.store, context.operation.snapshot, state, sessions.nodes)
    node_tables = read_current_tables(sessions, state.selection, seen)
    seen.update(node_tables)
    plan = plan_ddl(node_tables, state.known, archived.definitions, moved)
    if unsized := _list_unsized(plan):
        # Copies are planned by the sizes of the tables.
        node_tables = read_sizes(sessions, state.selection, node_tables, unsized)
        seen.update(node_tables)
        plan = plan_ddl(node_tables, state.known, archived.definitions, moved)
    if plan.unpublished:
        publish_new_tables(sessions, seen, state.selection, context.request.wait_seconds, progress)
        plan = plan_ddl(dict(seen), state.known, archived.definitions, moved)
    report_changes(plan, progress)
    if not plan.to_copy:
        return PreparedTables(plan, archived.last_segments)
    return _copy_tables(context, PreparedTables(plan, archived.last_segments), spark, progress)


def _list_unsized(plan: DdlPlan) -> dict[str, set[int]]:
    """Return the oids of tables that are copied, but were taken from the last commit, by shard."""
    copied = {shard: {table.oid for table in tables} for shard, tables in plan.to_copy.items()}
    unsized = {
        shard: oids.difference([table.oid for table in plan.node_tables[shard].read]) for shard, oids in copied.items()
    }
    return {shard: oids for shard, oids in unsized.items() if oids}


def read_archived(
    store: ObjectStore,
    snapshot: str,
    state: ChainState,
    nodes: Iterable[Node],
    read_before: Mapping[str, ArchivedSegment] = MappingProxyType({}),
) -> Archived:
    """Read the segments that no commit lists: return their definitions, and each node's last segment number.

    Those in `read_before`, by key, are not read again.
    """
    nodes = list(nodes)

    def read(node: Node) -> NodeArchived:
        prefix = archive_prefix(snapshot, node.id, state.archive(node.id))
        last = last_number(state.segments.get(node.id, ()))
        if not store.exists(segment_key(prefix, last + 1)):
            return NodeArchived((), last)
        unlisted = list(list_unlisted(store, node.id, prefix, last, read_before))
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
    sessions, plan = context.sessions, prepared.plan
    tables, slot = plan.to_copy, copy_slot_name(context.operation.id)
    readers = {shard: reader for shard, reader in choose_readers(sessions).items() if shard in tables}
    nodes = [node for node in sessions.copied_nodes if node.shard in tables and node.id not in readers]
    # A reader's tables are read twice, so that the primary's copy and its own have objects of their own.
    spark.begin(context.executor_needs, progress, amount_to_copy([*nodes, *readers.values()], tables))
    destination = CopyDestination(context.operation.snapshot, context.operation.id, context.fleet.store)

    with export_readers_last(context, nodes, readers, slot, progress) as slots:
        check_exported(nodes, slots, plan.fingerprints)
        sources = [
            *(TableSource(node, slots[node.id].snapshot, tables[node.shard]) for node in nodes),
            *(
                TableSource(reader, slots[reader.id].snapshot, tables[shard], is_for_primary=True)
                for shard, reader in readers.items()
            ),
        ]
        copied = copy_tables(sources, destination, sessions, spark, progress)
        positions = {node: exported.position for node, exported in slots.items()}
        positions |= {shard: positions[reader.id] for shard, reader in readers.items()}
    drop_copy_slots(nodes, slot, progress)
    return PreparedTables(
        plan,
        prepared.last_segments,
        tuple(copied.entries),
        positions,
        {shard: reader.id for shard, reader in readers.items()},
        copied.list_rewritten(tables, sessions.fleet),
    )
