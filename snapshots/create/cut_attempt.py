"""Make the cut of a create, full or increment, while DDL may change tables.

One attempt: prepare the tables, make the cut, check that nothing changed since the plan, dump the DDL where it is new.
What an attempt archived stays, and the next attempt continues from there: its definitions are in the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from fleet.config import Fleet, Node
from fleet.lsn import ORIGIN, Lsn
from fleet.progress import Progress
from fleet.tables.groups import Group
from fleet.tables.publications import publication_names
from snapshots.create.chain_state import ChainState
from snapshots.create.context import CreateContext
from snapshots.create.definitions import collect_definition_changes
from snapshots.create.late_writers import late_writers
from snapshots.create.make_cut import CutPlan, MadeCut, make_cut
from snapshots.create.prepare_tables import PreparedTables, prepare_tables
from snapshots.create.sequences import never_back, read_sequences
from snapshots.ddl.attempts import ChangedError, until_unchanged, void_if
from snapshots.ddl.table_changes import DdlPlan, KnownTables, find_change
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.commit import DefinitionChanges, Sequence
from storage.store import ObjectStore
from wal.decoding.known_definitions import SchemaMovedError
from wal.drain.drain_task import DrainTask
from wal.segments.definitions import Definition
from wal.slots.slots import slot_name

# Ends all writes to the fleet, and returns where in each primary's WAL the last one may be.
EndWrites: TypeAlias = Callable[[], Mapping[str, Lsn]]


@dataclass(frozen=True, slots=True)
class CutResult:
    """A cut, and what its commit says besides: `definition_changes` is None where no definition and no DDL changed.

    `ends` is where the writes to each primary ended, of a terminal snapshot.
    """

    made: MadeCut
    plan: CutPlan
    tables: DdlPlan
    definition_changes: DefinitionChanges | None
    sequences: Mapping[str, tuple[Sequence, ...]]
    ends: Mapping[str, Lsn]

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups of every shard at the cut."""
        return {shard: one.groups for shard, one in self.tables.shards.items()}

    @property
    def copied(self) -> set[tuple[str, str]]:
        """Shard and name of every table that was copied anew."""
        return {(shard, table.group.name) for shard, found in self.tables.copied.items() for table in found}


def take_cut(
    context: CreateContext,
    state: ChainState,
    spark: SparkSource,
    progress: Progress,
    end_writes: EndWrites | None = None,
) -> CutResult:
    """Make the cut; `end_writes` is called before the first attempt, for a terminal snapshot.

    Raises SchemaChangedError where DDL invalidated each of `retries` + 1 attempts, and at once whatever no further
    attempt would mend.
    """
    sessions = context.sessions
    moved: dict[str, set[int]] = {}
    ends: Mapping[str, Lsn] | None = None

    def make() -> CutResult:
        nonlocal ends
        prepared = prepare_tables(context, state, moved, spark, progress)
        if ends is None:
            ends = end_writes() if end_writes else {}
        plan = _plan_cut(context, state, prepared)
        before = sessions.ask_named_primaries(read_sequences)
        made = _make_cut(context, plan, spark, progress)
        _check_copies(context.fleet, context.store, state.known, prepared, made)
        sequences = never_back(before, sessions.ask_named_primaries(read_sequences))
        progress.reached(CrashPoint.SEQUENCES_READ)
        changes = collect_definition_changes(context, state.known, prepared, made, progress)
        if cause := find_change(sessions, prepared.plan.catalogs, state.followed):
            raise ChangedError(cause)
        return CutResult(made, plan, prepared.plan, changes, sequences, ends)

    def attempt() -> CutResult:
        try:
            with void_if(lambda: find_change(sessions, state.seen, state.followed)):
                return make()
        except ChangedError as error:
            for shard, oids in error.moved.items():
                moved.setdefault(shard, set()).update(oids)
            raise

    return until_unchanged(attempt, context.request.retries, progress)


def _plan_cut(context: CreateContext, state: ChainState, prepared: PreparedTables) -> CutPlan:
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(state.chain),
            publications=publication_names(state.followed.fleet_id),
            snapshot=context.operation.snapshot,
            chain=state.chain,
            operation=context.operation.id,
            versions=versions_of(node, state.known, prepared),
            begun=frozenset(group.number for group in prepared.plan.shards[node.shard].begun),
            planned=prepared.last_segments[node.id],
            global_id_form=context.fleet.global_id,
            base=state.base[node.id],
            known=state.segments.get(node.id, ()),
            finish=ORIGIN,
            store=context.fleet.store,
        )
        for node in context.sessions.nodes
    }
    return CutPlan(state.chain, context.operation.id, tasks, state.last_cut, context.request.retries)


def versions_of(node: Node, known: KnownTables, prepared: PreparedTables) -> tuple[Definition, ...]:
    """The definitions that the node's WAL may show; those of one table in the order in which they were made."""
    plan = prepared.plan.shards[node.shard]
    there = {state.oid for state in plan.states.values()}
    old = (Definition(one.oid, one.group, is_gone=one.oid not in there) for one in known.before(node.shard))
    copied_from = prepared.positions.get(node.id)
    new = (
        Definition(one.table.oid, one.table.group, copied_from if one.after is None else None) for one in plan.changed
    )
    return (*old, *new)


def _make_cut(context: CreateContext, plan: CutPlan, spark: SparkSource, progress: Progress) -> MadeCut:
    try:
        return make_cut(context.lock, plan, spark, context.store, progress)
    except SchemaMovedError as error:
        moved: dict[str, set[int]] = {}
        for table in cast("list[dict[str, Any]]", error.details["moved"]):
            moved.setdefault(context.fleet.node(table["node"]).shard, set()).add(int(table["oid"]))
        raise ChangedError(error.message, moved) from error


def _check_copies(
    fleet: Fleet, store: ObjectStore, known: KnownTables, prepared: PreparedTables, made: MadeCut
) -> None:
    """Raise ChangedError if a transaction prepared before a copy and decided after it changed what was copied."""
    for node, position in prepared.positions.items():
        shard = fleet.node(node).shard
        plan = prepared.plan.shards[shard]
        oids = {table.oid for table in plan.copied}
        numbers = {table.group.number for table in plan.copied}
        numbers |= {one.group.number for one in known.before(shard) if one.oid in oids}
        if gids := late_writers(store, made.segments[node], position, numbers):
            raise ChangedError(
                f"node {node}: prepared transactions changed tables while they were copied: {', '.join(gids)}"
            )
