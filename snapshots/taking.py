"""The cut of a create, full or increment, with whatever becomes of the schema meanwhile.

One attempt: plan (the catalogs against what is known of the tables), let new tables be followed, copy anew what can't
be carried on, make the cut, see that nothing was changed since the plan, dump the DDL where it is not as it was. What
an attempt archived stays, and the next one goes on from there: its definitions are in the segments. Until the commit
nothing of it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet.config import Node
from fleet.groups import Group
from fleet.progress import Progress
from fleet.publications import publication_names
from snapshots.attempts import ChangedError, until_unchanged, void_if
from snapshots.carrying import Carried, Work, carry
from snapshots.cutting import CutPlan, MadeCut, make_cut
from snapshots.jobs import SparkSource
from snapshots.late_writers import late_writers
from snapshots.manifest import SchemaPart, Sequence
from snapshots.points import Point
from snapshots.schema_changes import SchemaPlan, changed_since
from snapshots.schema_record import schema_part
from snapshots.sequences import never_back, read_sequences
from storage.errors import ReportedError
from wal.drain_values import DrainTask
from wal.slots import slot_name
from wal.versions import Version


@dataclass(frozen=True, slots=True)
class Taken:
    """A cut, and all that its commit says beside: `schema` is None where no definition and no DDL is another.

    `ends` is where every primary's writes were over, of a terminal snapshot.
    """

    made: MadeCut
    plan: CutPlan
    tables: SchemaPlan
    schema: SchemaPart | None
    sequences: Mapping[str, tuple[Sequence, ...]]
    ends: Mapping[str, int]

    @property
    def groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups of every shard at the cut."""
        return {shard: one.groups for shard, one in self.tables.shards.items()}

    @property
    def copied(self) -> set[tuple[str, str]]:
        """Shard and name of every table that was copied anew."""
        return {(shard, table.group.name) for shard, found in self.tables.copied.items() for table in found}


def take_cut(
    work: Work, spark: SparkSource, progress: Progress, close: Callable[[], Mapping[str, int]] | None = None
) -> Taken:
    """Make the cut; `close` ends all writes before the first attempt, for a terminal snapshot.

    Raises SchemaChangedError where the schema was changed during each of `retries` + 1 attempts, and what refuses a
    table or makes a cut impossible at once.
    """
    creating = work.creating
    moved: dict[str, set[int]] = {}
    ends: Mapping[str, int] | None = None

    def tried() -> Taken:
        nonlocal ends
        carried = carry(work, moved, spark, progress)
        if ends is None:
            ends = close() if close else {}
        plan = _cut_plan(work, carried)
        before = creating.sessions.ask_named_primaries(read_sequences)
        made = _made(work, plan, spark, progress)
        _check_copies(work, carried, made)
        sequences = never_back(before, creating.sessions.ask_named_primaries(read_sequences))
        progress.reached(Point.SEQUENCES_READ)
        schema = schema_part(work, carried, made, progress)
        if cause := changed_since(creating.sessions, carried.plan.catalogs, work.where):
            raise ChangedError(cause)
        return Taken(made, plan, carried.plan, schema, sequences, ends)

    def attempt() -> Taken:
        try:
            with void_if(lambda: changed_since(creating.sessions, work.seen, work.where)):
                return tried()
        except ChangedError as error:
            for shard, oids in error.moved.items():
                moved.setdefault(shard, set()).update(oids)
            raise

    return until_unchanged(attempt, creating.request.retries, progress)


def _cut_plan(work: Work, carried: Carried) -> CutPlan:
    creating = work.creating
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(work.chain),
            publications=publication_names(work.fleet_id),
            snapshot=creating.operation.snapshot,
            chain=work.chain,
            operation=creating.operation.id,
            versions=_versions(work, carried, node),
            begun=frozenset(group.number for group in carried.plan.shards[node.shard].begun),
            planned=carried.planned[node.id],
            global_id_form=creating.fleet.global_id,
            base=work.base[node.id],
            known=work.segments.get(node.id, ()),
            finish=0,
            store_url=creating.fleet.store_url,
            store_options=creating.fleet.store_options,
        )
        for node in creating.sessions.nodes
    }
    return CutPlan(work.chain, creating.operation.id, tasks, work.before, creating.request.retries)


def _versions(work: Work, carried: Carried, node: Node) -> tuple[Version, ...]:
    """The definitions that the node's WAL may show, of one table the old before the new."""
    plan = carried.plan.shards[node.shard]
    there = {state.oid for state in plan.states.values()}
    old = (Version(one.oid, one.group, is_gone=one.oid not in there) for one in work.known.before(node.shard))
    copied_from = carried.positions.get(node.id)
    new = (Version(one.table.oid, one.table.group, copied_from if one.after is None else None) for one in plan.changed)
    return (*old, *new)


def _made(work: Work, plan: CutPlan, spark: SparkSource, progress: Progress) -> MadeCut:
    creating = work.creating
    try:
        return make_cut(creating.lock, plan, spark, creating.store, progress)
    except ReportedError as error:
        # Of a SchemaMovedError (wal.versions).
        tables: Any = error.details.get("moved")
        if not tables:
            raise
        moved: dict[str, set[int]] = {}
        for table in tables:
            moved.setdefault(creating.fleet.node(table["node"]).shard, set()).add(int(table["oid"]))
        raise ChangedError(error.message, moved) from error


def _check_copies(work: Work, carried: Carried, made: MadeCut) -> None:
    """No transaction that was prepared before a copy and decided after it may have changed what was copied."""
    creating = work.creating
    for node, position in carried.positions.items():
        plan = carried.plan.shards[creating.fleet.node(node).shard]
        oids = {table.oid for table in plan.copied}
        numbers = {table.group.number for table in plan.copied}
        numbers |= {one.group.number for one in work.known.before(creating.fleet.node(node).shard) if one.oid in oids}
        if gids := late_writers(creating.store, made.segments[node], position, numbers):
            raise ChangedError(
                f"node {node}: prepared transactions changed tables while they were copied: {', '.join(gids)}"
            )
