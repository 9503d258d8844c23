"""What a restore is made from: if a changed store gives the same, the restored databases are the same, too."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.targets.target import find_xml_columns
from cutline.snapshots.ddl.dump import find_ddl
from cutline.snapshots.fold.sources import SegmentSource, sources_of
from cutline.snapshots.records.commit import list_large_objects
from cutline.storage.errors import SnapshotError
from tests.mutations.world import NAME, World

# What a restore uses of a source's identity, and of a column.
DATABASE = ("encoding", "collate", "ctype", "locale_provider", "locale", "icu_rules")


def recipe_of(world: World) -> Any:
    """Everything that a restore of the chain reads and does, comparable; None if it is refused."""
    try:
        plan = plan_restore(world.fleet, world.target, RestoreRequest(NAME))
        chain, shards = plan.chain, tuple(target.shard for target in plan.targets)
        sources = sources_of(chain, shards, world.fleet.store.open())
    except SnapshotError:
        return None
    of_shards = {
        shard: (
            tuple((one.number, one.name, one.key_width, [c.name for c in one.columns]) for one in plan.groups[shard]),
            chain.sequences(shard),
            chain.roles(shard),
            find_ddl(chain, shard),
            find_xml_columns(plan.groups[shard], chain.tables(shard)),
            [getattr(chain.baseline[shard], name) for name in DATABASE],
        )
        for shard in shards
    }
    large = [(one.key, one.node, one.digest, one.size, dict(one.rows)) for one in list_large_objects(chain.full)]
    segments = tuple(map(_of_segment, sources.segments))
    return shards, of_shards, large, replace(sources, segments=()), segments


def _of_segment(one: SegmentSource) -> Any:
    """The source without what a restore does not use; an object's own metadata is compared when it is read."""
    listed = one.segment
    counts = (listed.changes, listed.events, listed.partials, listed.truncates, listed.after, listed.through)
    source = (one.source.key, one.source.digest, one.source.size, listed.node, listed.operation, listed.open)
    return source, counts, one.position, one.excluded, dict(one.truncated), one.mapping
