"""What a create does about the schema before its cut: plan, let new tables be followed, copy what can't be carried on.

Nothing of it counts until the commit lists it; a slot that is left is dropped with the operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet.config import GroupRules, Node
from fleet.progress import Progress
from fleet.sessions import in_parallel
from snapshots.attempts import ChangedError, void_if
from snapshots.copying import Copying, check_exported, copy_tables, drop_copy_slots, exported_slots
from snapshots.create import Creating
from snapshots.cutting import Before
from snapshots.jobs import SparkSource
from snapshots.manifest import StoredObject
from snapshots.points import Point
from snapshots.schema_changes import Catalogs, Known, SchemaPlan, changed_since, current, plan_schema, publish_new, tell
from wal.archive import Segment, archive_prefix, segment_key
from wal.segments import unlisted_segments
from wal.slots import copy_slot_name
from wal.versions import Version


@dataclass(frozen=True, slots=True)
class Work:
    """What the cut of a create goes on from.

    `chain` is the operation that began the chain. `known` is what the commit before knows of the tables, `seen` the
    primaries' catalogs as they were read last. By node: `base` is where the archive begins, `segments` are those that
    commits list, `before` is the cut before.
    """

    creating: Creating
    fleet_id: str
    rules: GroupRules
    chain: str
    known: Known
    seen: Mapping[str, Catalogs]
    base: Mapping[str, int]
    segments: Mapping[str, tuple[Segment, ...]]
    before: Mapping[str, Before]

    @property
    def where(self) -> tuple[str, GroupRules]:
        """What tells the fleet's groups."""
        return self.fleet_id, self.rules


@dataclass(frozen=True, slots=True)
class Carried:
    """What an attempt has done before its cut: the plan, the base copies and from where they count, by node."""

    plan: SchemaPlan
    planned: Mapping[str, int]
    objects: tuple[StoredObject, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)


def carry(work: Work, moved: Mapping[str, set[int]], spark: SparkSource, progress: Progress) -> Carried:
    """Plan, let new tables be followed, and copy what can't be carried on."""
    creating = work.creating
    archived, planned = _archived(work)
    catalogs = current(creating.sessions, work.where, work.seen)
    plan = plan_schema(catalogs, work.known, archived, moved)
    if plan.unpublished:
        publish_new(creating.sessions, plan.unpublished, work.where, creating.request.wait_seconds, progress)
        progress.reached(Point.TABLES_PUBLISHED)
        plan = plan_schema(current(creating.sessions, work.where, catalogs), work.known, archived, moved)
        if plan.unpublished:
            raise ChangedError("a table came while others were published")
    tell(plan, progress)
    if not plan.copied:
        return Carried(plan, planned)
    objects, positions = _copied(work, plan, spark, progress)
    return Carried(plan, planned, tuple(objects), positions)


def _archived(work: Work) -> tuple[dict[str, list[Version]], dict[str, int]]:
    """The definitions in segments that no commit lists, by shard, and the number of the last segment, by node."""
    creating = work.creating

    def read(node: Node) -> tuple[list[Version], int]:
        prefix = archive_prefix(creating.operation.snapshot, node.id, work.chain)
        last = len(work.segments.get(node.id, ()))
        if not creating.store.exists(segment_key(prefix, last + 1)):
            return [], last
        found = list(unlisted_segments(creating.store, prefix, last))
        return [version for one in found for version in one.definitions], last + len(found)

    archived: dict[str, list[Version]] = {}
    planned: dict[str, int] = {}
    for node, (versions, last) in zip(creating.sessions.nodes, in_parallel(read, creating.sessions.nodes), strict=True):
        archived.setdefault(node.shard, []).extend(versions)
        planned[node.id] = last
    return archived, planned


def _copied(
    work: Work, plan: SchemaPlan, spark: SparkSource, progress: Progress
) -> tuple[list[StoredObject], dict[str, int]]:
    """Copy the tables that can't be carried on: the objects, and from which position their changes count."""
    creating = work.creating
    tables = plan.copied
    nodes = tuple(node for node in creating.sessions.nodes if node.shard in tables)
    copying = Copying(creating, nodes, tables, copy_slot_name(creating.operation.id))

    def changed() -> str:
        return changed_since(creating.sessions, plan.catalogs, work.where)

    try:
        with void_if(changed), exported_slots(copying, progress) as slots:
            check_exported(copying, slots, plan.fingerprints)
            objects = copy_tables(copying, slots, spark, progress)
            positions = {node: found.position for node, found in slots.items()}
    except ChangedError:
        drop_copy_slots(copying, progress)
        raise
    drop_copy_slots(copying, progress)
    return objects, positions
