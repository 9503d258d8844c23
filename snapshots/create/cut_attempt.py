"""Make the cut of a full snapshot or an increment while DDL may change tables.

An attempt prepares the tables, makes the cut, dumps the DDL of shards where it changed, and checks that no table has
changed since the plan was made. The segments of an invalid attempt are kept, since they contain their definitions, and
the next attempt continues after them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import psycopg
from msgspec import Struct

from cutline.fleet.config import Fleet, Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.nodes.encodings import UTF8, encoding_of
from cutline.nodes.groups import Group, Table, list_names
from cutline.nodes.left_out import LeftOut, read_left_out
from cutline.nodes.lock import FleetLock
from cutline.nodes.publications import publication_names
from cutline.nodes.sessions import in_parallel
from cutline.nodes.table_state import read_nested_enums
from cutline.snapshots.base_copy.copy_slots import drop_copy_slots, find_changed_groups, find_prepared
from cutline.snapshots.create.context import ChainState, CreateContext
from cutline.snapshots.create.definition_changes import collect_definition_changes
from cutline.snapshots.create.make_cut import ArchivedCut, CutPlan, make_cut
from cutline.snapshots.create.prepare_tables import PreparedTables, prepare_tables
from cutline.snapshots.create.prepared_transactions import await_included_ddl, await_lockers
from cutline.snapshots.create.printed_values import find_outdated, new_forms
from cutline.snapshots.create.rewritten_tables import find_incomplete, rewritten_text
from cutline.snapshots.create.sequences import (
    NAMED_MAX,
    SequenceReading,
    find_restarted,
    latest_sequences,
    read_sequences,
)
from cutline.snapshots.ddl.attempts import ChangedError, invalidate_if, retry_until_unchanged
from cutline.snapshots.ddl.database_facts import read_facts
from cutline.snapshots.ddl.dump import read_roles
from cutline.snapshots.ddl.fingerprint import are_same_objects
from cutline.snapshots.ddl.table_changes import DdlPlan, KnownTables, find_change
from cutline.snapshots.records.commit import DatabaseFacts, DefinitionChanges, Sequence
from cutline.spark.amount import Amount
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.store import ObjectStore
from cutline.wal.decoding.known_definitions import SchemaMovedError
from cutline.wal.drain.drain_task import DrainTask
from cutline.wal.drain.lags import is_for_spark, read_waiting
from cutline.wal.drain.slots import copy_slot_name, slot_name
from cutline.wal.segments.archive import Definition

# Ends all writes to the fleet; returns the WAL positions after which nothing may be written, keyed by primary. The
# argument is the source of the Spark session that archives the WAL afterwards, or None if this process does.
EndWrites: TypeAlias = Callable[[SparkSource | None], Mapping[str, Lsn]]


class CutResult(Struct, frozen=True):
    """A cut, its plan, and the other data in its commit.

    `definition_changes` is None if neither definitions nor DDL changed. `left_out` lists the objects that the commit
    leaves out, `databases` the facts about each shard's database, and `roles` the roles that its DDL names, all
    according to the same catalog state as the DDL dump. `ends` holds the WAL position at which writes ended on each
    primary; it is empty unless the snapshot is terminal.
    """

    archived_cut: ArchivedCut
    plan: CutPlan
    tables: DdlPlan
    definition_changes: DefinitionChanges | None
    sequences: Mapping[str, tuple[Sequence, ...]]
    left_out: tuple[LeftOut, ...]
    databases: Mapping[str, DatabaseFacts]
    roles: Mapping[str, tuple[str, ...]]
    ends: Mapping[str, Lsn]

    @property
    def copied_tables(self) -> set[tuple[str, str]]:
        """The shard and name of every table with a new base copy."""
        return {(shard, table.group.name) for shard, tables in self.tables.to_copy.items() for table in tables}


def take_cut(
    context: CreateContext,
    state: ChainState,
    spark: SparkSource,
    progress: Progress,
    end_writes: EndWrites | None = None,
    rewritten: Mapping[str, set[int]] = MappingProxyType({}),
) -> CutResult:
    """Make the cut. For a terminal snapshot `end_writes` is called once, before the first markers are written.

    `rewritten` are the oids of tables, by shard, whose base copies are incomplete: they are copied again.
    Raises SchemaChangedError if DDL invalidated all attempts (`retry_until_unchanged`). An error that a retry can't fix
    is raised immediately.
    """
    sessions = context.sessions
    moved = {shard: set(oids) for shard, oids in rewritten.items()}
    ends: Mapping[str, Lsn] | None = None
    # The primaries' tables as last found, which includes this command's own changes to publications.
    seen = dict(state.seen)

    def check_unchanged(tables: DdlPlan) -> None:
        if cause := find_change(sessions, tables.node_tables, state.selection):
            raise ChangedError(cause)

    def prepare_and_cut() -> CutResult:
        nonlocal ends
        prepared = prepare_tables(context, state, moved, seen, spark, progress)
        archiving = spark if is_for_spark(read_waiting(sessions, slot_name(state.chain))) else None
        if archiving is not None:
            archiving.begin(context.executor_needs, progress, Amount())
        if ends is None:
            ends = end_writes(archiving) if end_writes else {}
        plan = plan_cut(context, state, prepared)
        read = partial(read_sequences, seconds_max=context.request.wait_seconds, tell=progress.note)
        before = sessions.ask_named_primaries(read)
        cut = _make_cut(context.lock, plan, archiving, context.store, progress)
        if await_included_ddl(sessions, cut.record, context.request.wait_seconds, progress):
            check_unchanged(prepared.plan)
        pending = _find_pending(context.fleet, context.store, state.known, prepared, cut)
        _check_printed(context, state.known, prepared, cut)
        _check_rewritten(context, prepared, cut)
        sequences = _sequences_at_cut(before, sessions.ask_named_primaries(read))
        progress.reached(CrashPoint.SEQUENCES_READ)
        left_out = read_left_out(sessions.primaries, state.selection.rules, _groups_at_cut(prepared.plan))
        databases = sessions.ask_named_primaries(partial(_read_facts, state, prepared.plan))
        roles = sessions.ask_primaries(read_roles)
        # If this passes, everything read so far matches the catalogs at the cut. A dump may take long, and so begins
        # after it.
        check_unchanged(prepared.plan)
        changes = collect_definition_changes(context, state.known, prepared, cut, pending, roles, progress)
        return CutResult(cut, plan, prepared.plan, changes, sequences, left_out, databases, roles, ends)

    def attempt() -> CutResult:
        try:
            with invalidate_if(lambda: find_change(sessions, seen, state.selection)):
                return prepare_and_cut()
        except ChangedError as error:
            for shard, oids in error.moved.items():
                moved.setdefault(shard, set()).update(oids)
            drop_copy_slots(sessions.nodes, copy_slot_name(context.operation.id), progress)
            await_lockers(sessions, error.moved, context.request.wait_seconds, progress)
            raise

    return retry_until_unchanged(attempt, context.request.retries, context.request.ddl_seconds, progress)


def _sequences_at_cut(
    before: Mapping[str, SequenceReading], after: Mapping[str, SequenceReading]
) -> dict[str, tuple[Sequence, ...]]:
    """Return the sequences by shard; raise ChangedError if any was restarted between the two readings."""
    for shard, reading in after.items():
        if restarted := find_restarted(before[shard], reading):
            names = list_some(sorted(restarted), NAMED_MAX)
            raise ChangedError(f"node {shard}: restarted or altered during the cut: {names}", {shard: set()})
    return {shard: latest_sequences(before[shard], reading) for shard, reading in after.items()}


def _groups_at_cut(tables: DdlPlan) -> dict[str, tuple[Group, ...]]:
    return {shard: plan.groups for shard, plan in tables.shards.items()}


def _read_facts(state: ChainState, plan: DdlPlan, node: Node, connection: psycopg.Connection[Any]) -> DatabaseFacts:
    is_same = are_same_objects(plan.fingerprints[node.id], state.known.fingerprints[node.id])
    return read_facts(node, connection, state.facts.get(node.id) if is_same else None)


def plan_cut(context: CreateContext, state: ChainState, prepared: PreparedTables) -> CutPlan:
    """Return the plan for a cut of these tables, with a drain task for every node.

    If the copy of a standby is continued after it was left out, or begins again, no node of its shard counts as idle:
    the standby's slot moves to the cut, and no slot may be ahead of the primary's archive, in case the standby is
    promoted. An archive that begins with this increment, or ends before the last cut, lacks that cut's marker.
    """
    sessions = context.sessions
    returning = {node.shard for node in sessions.nodes if node.id in state.absent}
    archives = {node.id: state.archive(node.id) for node in sessions.nodes}
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(state.chain),
            publications=publication_names(state.selection.fleet_id),
            snapshot=context.operation.snapshot,
            archive=archives[node.id],
            operation=context.operation.id,
            definitions=list_definitions(node, state.known, prepared),
            unlisted_numbers=frozenset(group.number for group in prepared.plan.shards[node.shard].new_groups),
            planned=prepared.last_segments[node.id],
            global_id_form=context.fleet.global_id,
            base=state.base[node.id],
            last=state.segments[node.id][-1] if state.segments.get(node.id) else None,
            finish=ORIGIN,
            store=context.fleet.store,
            fleet_id=state.selection.fleet_id,
            may_be_idle=bool(state.segments.get(node.id)) and node.shard not in returning,
            last_marker=None if node.id in state.absent else state.last_cut[node.shard].marker,
            # The cut is on the primary's timeline, even if a standby does not show it yet.
            history=sessions.history(sessions.fleet.node(node.shard)),
        )
        for node in sessions.nodes
    }
    return CutPlan(
        state.chain,
        context.operation.run_id,
        tasks,
        state.last_cut,
        state.segments,
        context.request.retries,
        state.last_at,
        context.standby_wait_seconds,
        # The copy of a full snapshot that has begun is worth a wait.
        spares_late=context.operation.increment > 0,
    )


def list_definitions(node: Node, known: KnownTables, prepared: PreparedTables) -> tuple[Definition, ...]:
    """Return the definitions that may occur in the node's WAL; those of the same table are in order of creation."""
    plan, before = prepared.plan.shards[node.shard], known.states[node.shard]
    groups = known.groups[node.shard]
    oids = [before[name].oid for name in list_names(groups)]
    gone = set(oids).difference([state.oid for state in plan.states.values()]) if plan.states is not before else ()
    old = (
        [Definition(oid, group, is_gone=oid in gone) for oid, group in zip(oids, groups, strict=True)]
        if gone
        else map(Definition, oids, groups)
    )
    # A standby whose tables are copied later has the WAL of its primary.
    copied_from = prepared.positions.get(node.id, prepared.positions.get(node.shard))
    new = (
        Definition(table.table.oid, table.table.group, copied_from if table.after is None else None)
        for table in plan.changed
    )
    return (*old, *new)


def _make_cut(
    lock: FleetLock, plan: CutPlan, spark: SparkSource | None, store: ObjectStore, progress: Progress
) -> ArchivedCut:
    """Make the cut; raise ChangedError if WAL contains changes to a table under an unknown definition."""
    try:
        return make_cut(lock, plan, spark, store, progress)
    except SchemaMovedError as error:
        moved: dict[str, set[int]] = {}
        for table in cast("list[dict[str, Any]]", error.details["moved"]):
            moved.setdefault(lock.sessions.fleet.node(table["node"]).shard, set()).add(int(table["oid"]))
        raise ChangedError(error.message, moved) from error


def _check_printed(context: CreateContext, known: KnownTables, prepared: PreparedTables, cut: ArchivedCut) -> None:
    """Raise ChangedError if changes have values in a form that a table no longer has: it must be copied again."""
    for shard, plan in prepared.plan.shards.items():
        was = known.states[shard]
        if plan.states is was:
            continue
        connection = context.sessions.primaries[shard]
        types = {state.oid: state.types for state in plan.states.values()}
        same = {
            group.number
            for group, name in zip(known.groups[shard], list_names(known.groups[shard]), strict=True)
            if types.get(was[name].oid) == was[name].types
        }
        if not (tables := new_forms(plan, known.before(shard, same), partial(read_nested_enums, connection))):
            continue
        is_utf8 = encoding_of(connection) == UTF8
        if outdated := find_outdated(context.store, cut.segments[shard], tables, is_utf8=is_utf8):
            names = ", ".join(table.name for table in outdated)
            raise ChangedError(
                f"node {shard}: labels or types were renamed after rows of {names} were written",
                {shard: {table.oid for table in outdated}},
            )


def _check_rewritten(context: CreateContext, prepared: PreparedTables, cut: ArchivedCut) -> None:
    """Raise ChangedError if copies of tables may lack rows that the cut has: they must be copied again."""
    moved: dict[str, list[Table]] = {}
    for node, tables in prepared.rewritten.items():
        shard = context.fleet.node(node).shard
        positions = prepared.positions[node], cut.record.of(shard).position
        if left := find_incomplete(context.store, tables, cut.segments[node], *positions):
            moved.setdefault(shard, []).extend(left)
    if moved:
        texts = [f"node {shard}: {rewritten_text(tables)}" for shard, tables in moved.items()]
        raise ChangedError(
            "; ".join(texts), {shard: {table.oid for table in tables} for shard, tables in moved.items()}
        )


def _find_pending(
    fleet: Fleet, store: ObjectStore, known: KnownTables, prepared: PreparedTables, cut: ArchivedCut
) -> dict[str, tuple[Lsn, ...]]:
    """Return the transactions whose changes the copies of tables lack, although they were prepared before, by node.

    Raises ChangedError if such changes were not archived under the definition with which the copy begins.
    """

    def find(node: str) -> tuple[Lsn, ...]:
        shard, segments = fleet.node(node).shard, cut.segments[node]
        late = find_prepared(store, segments, prepared.positions[node])
        if not late:
            return ()
        tables = prepared.plan.shards[shard].to_copy
        oids, numbers = {table.oid for table in tables}, {table.group.number for table in tables}
        earlier = {before.group.number for before in known.before(shard) if before.oid in oids}
        changed = find_changed_groups(store, segments, late, numbers | earlier)
        if lost := [gid for lsn, gid in late.items() if lsn in cut.dropped[node] or changed.get(lsn, set()) & earlier]:
            some = list_some(lost, NAMED_MAX)
            raise ChangedError(f"node {node}: prepared transactions changed tables that were being copied: {some}")
        return tuple(changed)

    nodes = list(prepared.positions)
    found = dict(zip(nodes, in_parallel(find, nodes), strict=True))
    return {node: positions for node, positions in found.items() if positions}
