"""Which databases the rows of each source are loaded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cutline.restore.rows.load_target import Feed, LoadTarget, LoadTargets
from cutline.restore.topology.topology import Topology
from cutline.snapshots.records.chain import Chain


def find_feeds(
    chain: Chain, shards: tuple[str, ...], topology: Topology | None, databases: Mapping[str, LoadTarget], parts: int
) -> LoadTargets:
    """The feeds of the databases that are to be loaded, by shard; with a topology, of all its sources.

    Without one, each of the `shards` has a target of its own.
    """
    if topology is None:
        feeds = {shard: Feed({number: databases[shard]}) for number, shard in enumerate(shards) if shard in databases}
        return LoadTargets(shards, feeds, parts)
    numbered = {number: databases[one] for number, one in enumerate(topology.targets) if one in databases}
    feeds = {
        source: Feed(
            {number: _for_source(chain, source, database) for number, database in numbered.items()},
            topology.routes_of(chain, source),
        )
        for source in topology.sources
    }
    return LoadTargets(topology.sources, feeds, parts)


def _for_source(chain: Chain, source: str, database: LoadTarget) -> LoadTarget:
    """The database with its groups by the numbers that the source's rows have."""
    by_name = {group.name: group for group in database.groups.values()}
    return replace(
        database, groups={one.number: by_name[one.name] for one in chain.groups(source) if one.name in by_name}
    )
