"""The copies of a chain: the nodes of each shard, and the positions from which their copies can be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from msgspec import Struct, field

from cutline.check.own_types import OwnTypes
from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.schema_at_cut import mapping_to_cut
from cutline.snapshots.records.chain import Chain


class Copies(Struct, frozen=True):
    """A chain's copies that reach its last cut: their nodes, and the shard of each node.

    The other fields are facts about rows from the DDL, by shard. `own_types` are those of columns, by group number
    and by the place of the column. `fed` are the groups at the
    last commit whose keys come from a sequence. `required` are the places of columns that are NOT NULL at the last
    commit, by group, and `required_since` the positions since which they have been.
    If it `compares_all`, the rows are compared with those of another chain: all of them are hashed, even if no other
    copy of the shard has them, or all copies have them in equal objects.
    """

    nodes: tuple[str, ...]
    shard: Mapping[str, str]
    chain: Chain
    own_types: Mapping[str, OwnTypes] = field(default_factory=dict)
    fed: Mapping[str, Collection[int]] = field(default_factory=dict)
    required: Mapping[str, Mapping[int, frozenset[int]]] = field(default_factory=dict)
    required_since: Mapping[str, Mapping[int, Mapping[int, Lsn]]] = field(default_factory=dict)
    compares_all: bool = False

    @classmethod
    def of(
        cls,
        chain: Chain,
        own_types: Mapping[str, OwnTypes] | None = None,
        fed: Mapping[str, Collection[int]] | None = None,
        required: Mapping[str, Mapping[int, frozenset[int]]] | None = None,
        required_since: Mapping[str, Mapping[int, Mapping[int, Lsn]]] | None = None,
        *,
        compares_all: bool = False,
    ) -> Copies:
        """Return the copies of `chain`."""
        nodes = chain.present
        shards = {node: chain.shard_of(node) for node in nodes}
        return cls(nodes, shards, chain, own_types or {}, fed or {}, required or {}, required_since or {}, compares_all)

    def since(self, node: str) -> Lsn:
        """Return the latest base position of the shard's copies; all copies have the same WAL from there on."""
        return max(self.chain.bases[other] for other in self.same_shard(node))

    def recopied_since(self, node: str) -> dict[int, Lsn]:
        """Return, for each group that was copied again, the position from which all copies have the same changes."""
        mapping = mapping_to_cut(self.chain, node, self.same_shard(node))
        return {number: position for number, position in mapping.since.items() if number in mapping.unchanged}

    def same_shard(self, node: str) -> list[str]:
        """Return all nodes that have a copy of the node's shard, including the node itself."""
        return [other for other in self.nodes if self.shard[other] == self.shard[node]]

    def group_name(self, node: str, number: int) -> str | None:
        """Return the name of the group with this number; None if there is no such group, as for events."""
        return {group.number: group.name for group in self.chain.groups(node)}.get(number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """A pair (primary, backup) for every standby that has a copy."""
        return [(self.shard[node], node) for node in self.nodes if self.shard[node] != node]

    @property
    def counts(self) -> Counter[str]:
        """The number of copies of every shard."""
        return Counter(self.shard.values())

    @property
    def alone(self) -> frozenset[int]:
        """The numbers of the nodes whose rows are compared with no other copy."""
        if self.compares_all:
            return frozenset()
        counts = self.counts
        return frozenset(number for number, node in enumerate(self.nodes) if counts[self.shard[node]] == 1)
