"""A chain's copies: which node holds which shard's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fleet.lsn import Lsn
from snapshots.fold.schema_at_cut import mapping_to_cut
from snapshots.records.chain import Chain


@dataclass(frozen=True, slots=True)
class Copies:
    """A chain's copies by node: whose shard each is a copy of, its groups, where its base begins."""

    nodes: tuple[str, ...]
    shard: Mapping[str, str]
    chain: Chain

    @classmethod
    def of(cls, chain: Chain) -> Copies:
        """The copies that `chain` has."""
        nodes = tuple(chain.baseline)
        return cls(nodes, {node: chain.shard_of(node) for node in nodes}, chain)

    def since(self, node: str) -> Lsn:
        """The latest base position among the copies of the node's shard: from here on all have the same WAL."""
        return max(self.chain.full.base[other] for other in self.alike(node))

    def copied_anew(self, node: str) -> dict[int, Lsn]:
        """From where all copies have the same changes of those of the node's groups that were copied anew."""
        present = mapping_to_cut(self.chain, node, self.alike(node))
        return {number: position for number, position in present.since.items() if number in present.kept}

    def alike(self, node: str) -> list[str]:
        """The node and all others that are copies of the same shard."""
        return [other for other in self.nodes if self.shard[other] == self.shard[node]]

    def partitions(self, node: str) -> dict[int, int]:
        """How many partitions each of the node's groups has, by the numbers of all its definitions."""
        return {number: group.partitions for number, group in self.chain.definitions(node).items()}

    def group_name(self, node: str, number: int) -> str | None:
        """The name of a group; None for the events, and for a number that no group has."""
        return {group.number: group.name for group in self.chain.groups(node)}.get(number)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every primary with each of its backups."""
        return [(self.shard[node], node) for node in self.nodes if self.shard[node] != node]
