"""A chain's copies: which node holds a copy of which shard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cutline.fleet.lsn import Lsn
from cutline.snapshots.fold.schema_at_cut import mapping_to_cut
from cutline.snapshots.records.chain import Chain


@dataclass(frozen=True, slots=True)
class Copies:
    """A chain's copies: their nodes, and the shard that each is a copy of."""

    nodes: tuple[str, ...]
    shard: Mapping[str, str]
    chain: Chain

    @classmethod
    def of(cls, chain: Chain) -> Copies:
        """The copies of `chain`."""
        nodes = tuple(chain.baseline)
        return cls(nodes, {node: chain.shard_of(node) for node in nodes}, chain)

    def since(self, node: str) -> Lsn:
        """The latest base position of the shard's copies: from there on, all copies have the same WAL."""
        return max(self.chain.full.base[other] for other in self.same_shard(node))

    def recopied_since(self, node: str) -> dict[int, Lsn]:
        """For each group that was copied again: the position from which all copies have the same changes."""
        mapping = mapping_to_cut(self.chain, node, self.same_shard(node))
        return {number: position for number, position in mapping.since.items() if number in mapping.unchanged}

    def same_shard(self, node: str) -> list[str]:
        """All nodes that are copies of the node's shard, itself included."""
        return [other for other in self.nodes if self.shard[other] == self.shard[node]]

    def partitions(self, node: str) -> dict[int, int]:
        """The number of partitions of each of the node's groups, by the numbers of all its definitions."""
        return {number: group.partitions for number, group in self.chain.definitions(node).items()}

    def group_name(self, node: str, number: int) -> str | None:
        """The name of the group with this number; None if there is none, as for events."""
        return {group.number: group.name for group in self.chain.groups(node)}.get(number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every primary with each of its standbys that has a copy, as (primary, backup)."""
        return [(self.shard[node], node) for node in self.nodes if self.shard[node] != node]
