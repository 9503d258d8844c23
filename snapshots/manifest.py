"""What a full snapshot or an increment says of itself, and a chain of them read as one.

A commit lists every object of its snapshot or increment with size and digest. It is written once, as the last
step; nothing in the store exists for Cutline unless a commit lists it (docs/architecture.md, invariant 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Group
from fleet.left_out import LeftOut, LeftOutKind, append_only_of
from fleet.table_state import TableState
from storage.errors import SnapshotError
from wal.archive import Segment, check_contiguous
from wal.cut_values import Cut


class ManifestError(SnapshotError):
    """A commit file can't be understood."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a base copy or of a node's schema; `rows` counts rows by group number."""

    key: str
    kind: str
    node: str
    size: int
    digest: str
    rows: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object's entry in a commit."""
        return asdict(self) | {"rows": {str(group): count for group, count in self.rows.items()}}


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence's value, read after the cut: at or beyond what the state at the cut has used."""

    schema: str
    name: str
    last_value: int | None


@dataclass(frozen=True, slots=True)
class CutRecord:
    """A resolved cut, and how it came about: `causes` says why each attempt before was inconsistent.

    `seconds` from the first start marker to the last finish marker.
    """

    id: str
    attempts: int
    seconds: float
    cut: Cut
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """A full snapshot (increment 0) or an increment. `segments` are those after the commit before.

    `left_out` names what of the primaries' databases is not in it; None in a commit that was written before it did.
    """

    snapshot: str
    increment: int
    operation: str
    chain: str
    created_at: str
    seconds: float
    cut: CutRecord
    segments: Mapping[str, tuple[Segment, ...]]
    sequences: Mapping[str, tuple[Sequence, ...]]
    counts: Mapping[str, int]
    comment: str = ""
    full: FullPart | None = None
    left_out: tuple[LeftOut, ...] | None = None

    @property
    def object_sizes(self) -> dict[str, int]:
        """Every object that this commit adds, by key, with its size in bytes."""
        sizes = {segment.key: segment.size for found in self.segments.values() for segment in found}
        if self.full:
            sizes |= {stored.key: stored.size for stored in self.full.objects}
        return sizes


@dataclass(frozen=True, slots=True)
class FullPart:
    """What only a full snapshot's commit says. Groups by shard; positions and roles by node.

    `rules` chose the groups. `tables` is empty in commits of before it was there.
    """

    fleet_id: str
    global_id_form: str
    baseline: Mapping[str, NodeIdentity]
    groups: Mapping[str, tuple[Group, ...]]
    base: Mapping[str, int]
    objects: tuple[StoredObject, ...]
    roles: Mapping[str, tuple[str, ...]]
    rules: GroupRules
    tables: Mapping[str, Mapping[str, TableState]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chain:
    """A snapshot with its increments up to some number: what a state is folded from."""

    full: Commit
    increments: tuple[Commit, ...] = ()

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return self.full.snapshot

    @property
    def part(self) -> FullPart:
        """What the full snapshot's commit says."""
        if self.full.full is None:
            raise RuntimeError("the first commit of a chain is a full one")
        return self.full.full

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The full snapshot's commit and the increments' in order."""
        return (self.full, *self.increments)

    @property
    def last(self) -> Commit:
        """The newest commit."""
        return self.commits[-1]

    @property
    def nodes(self) -> tuple[NodeIdentity, ...]:
        """The nodes that the chain has copies of."""
        return tuple(self.part.baseline.values())

    def shard_of(self, node: str) -> str:
        """The primary whose rows `node` holds."""
        return self.part.baseline[node].backup_of or node

    def up_to(self, increment: int) -> Chain:
        """The chain as it was at `increment`."""
        return replace(self, increments=self.increments[:increment])

    def segments(self, node: str) -> tuple[Segment, ...]:
        """The node's archive as the commits list it."""
        return tuple(segment for commit in self.commits for segment in commit.segments.get(node, ()))

    def position(self, node: str) -> int:
        """Where the node's part of the state ends: its primary's position at the last cut."""
        return self.last.cut.cut.nodes[self.shard_of(node)].position

    def excluded(self, node: str) -> frozenset[int]:
        """Positions of the transactions before `position` that are not part of the state."""
        shard = self.shard_of(node)
        left_out = {entry.lsn for entry in self.last.cut.cut.nodes[shard].undecided}
        undone = {lsn for commit in self.commits for lsn in commit.cut.cut.nodes[shard].rolled_back}
        return frozenset(left_out | undone)

    def groups(self, node: str) -> tuple[Group, ...]:
        """The groups that the node holds."""
        return self.part.groups[self.shard_of(node)]

    def sequence_names(self, shard: str) -> frozenset[str]:
        """The sequences, as `schema.name`, that the full snapshot's DDL makes; no other can be set."""
        unlogged = (one for one in self.full.left_out or () if one.kind == LeftOutKind.UNLOGGED_SEQUENCE)
        followed = {f"{one.schema}.{one.name}" for one in self.full.sequences[shard]}
        return frozenset(followed | {one.name for one in unlogged if one.node == shard})

    def sequences(self, shard: str) -> tuple[Sequence, ...]:
        """The shard's sequences with their values at the last cut. Those that are new since are left out, and named."""
        known = self.sequence_names(shard)
        return tuple(one for one in self.last.sequences[shard] if f"{one.schema}.{one.name}" in known)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What of the databases is not in the newest commit's state; at least the append-only tables' updates."""
        return append_only_of(self.part.groups) if self.last.left_out is None else self.last.left_out

    @property
    def append_only(self) -> list[str]:
        """The groups that are followed for inserts and truncates only, on any shard: every output says so."""
        return sorted({one.name for one in append_only_of(self.part.groups)})

    def check_archive(self) -> None:
        """Raise ArchiveError unless every node's segments are without a hole from its base on."""
        for node in self.part.baseline:
            check_contiguous(node, self.part.base[node], self.segments(node))
