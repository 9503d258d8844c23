"""A full snapshot and its increments read as one: what the state at the last of them is made of.

Each commit says only what is not as at the one before; here that is put together, by node or by shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fleet.baseline import NodeIdentity
from fleet.groups import Group
from fleet.left_out import LeftOut, LeftOutKind, append_only_of
from fleet.table_state import TableState
from snapshots.manifest import BASE, DDL, Commit, FullPart, SchemaPart, Sequence, StoredObject
from wal.archive import Segment, check_contiguous

T = TypeVar("T")


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

    @property
    def schemas(self) -> tuple[SchemaPart, ...]:
        """What the commits say of definitions that changed before their cuts, in order."""
        return tuple(commit.schema for commit in self.commits if commit.schema)

    def definitions(self, node: str) -> dict[int, Group]:
        """Every definition that the node's objects may be in, by number: also those that ended."""
        shard = self.shard_of(node)
        found = [self.part.groups[shard], *(schema.groups.get(shard, ()) for schema in self.schemas)]
        return {group.number: group for groups in found for group in groups}

    def groups(self, node: str) -> tuple[Group, ...]:
        """The groups that the node holds at the last commit, by name."""
        shard = self.shard_of(node)
        gone = {number for schema in self.schemas for number in schema.gone.get(shard, ())}
        found = [group for number, group in self.definitions(node).items() if number not in gone]
        return tuple(sorted(found, key=lambda group: (group.schema, group.table)))

    def successions(self, node: str) -> dict[int, int]:
        """By number of a definition the number of the one before that it carries on."""
        shard = self.shard_of(node)
        return {new: old for schema in self.schemas for new, old in schema.successions.get(shard, {}).items()}

    def began(self, node: str) -> dict[int, int]:
        """By number of a definition that was copied anew the position from which its changes count."""
        carried = self.successions(node)
        found = {number: at for schema in self.schemas for number, at in schema.begun.get(node, {}).items()}
        return {number: at for number, at in found.items() if number not in carried}

    def tables(self, shard: str) -> dict[str, TableState]:
        """The states of the shard's tables at the last commit, by name."""
        found = dict(self.part.tables.get(shard, {}))
        for schema in self.schemas:
            found |= schema.tables.get(shard, {})
        return {group.name: found[group.name] for group in self.groups(shard) if group.name in found}

    def roles(self, shard: str) -> tuple[str, ...]:
        """The roles that the shard's DDL names at the last commit."""
        return _newest([self.part.roles, *(schema.roles for schema in self.schemas)], shard)

    def fingerprint(self, shard: str) -> str:
        """What tells the shard's catalogs at the last commit from others."""
        return _newest([self.part.fingerprints, *(schema.fingerprints for schema in self.schemas)], shard)

    def schema_objects(self, shard: str) -> tuple[StoredObject, ...]:
        """The sections of the shard's DDL at the last commit."""
        for commit in reversed(self.commits):
            if found := tuple(one for one in commit.objects if one.kind in DDL and one.node == shard):
                return found
        return ()

    def base_objects(self, node: str) -> tuple[StoredObject, ...]:
        """The objects of all base copies of the node: of the full snapshot, and of tables copied anew since."""
        return tuple(one for commit in self.commits for one in commit.objects if one.kind == BASE and one.node == node)

    def sequences(self, shard: str) -> tuple[Sequence, ...]:
        """The shard's sequences with their values at the last cut."""
        return self.last.sequences[shard]

    @property
    def all_groups(self) -> dict[str, tuple[Group, ...]]:
        """The groups of every shard at the last commit."""
        return {shard: self.groups(shard) for shard in self.part.groups}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """What of the databases is not in the newest commit's state; at least the append-only tables' updates."""
        return append_only_of(self.all_groups) if self.last.left_out is None else self.last.left_out

    @property
    def too_old(self) -> tuple[LeftOut, ...]:
        """The standbys that can't decode their WAL, so that the chain has no copies of them: every output says so."""
        return tuple(one for one in self.full.left_out or () if one.kind == LeftOutKind.STANDBY_COPY)

    @property
    def append_only(self) -> list[str]:
        """The groups that are followed for inserts and truncates only, on any shard: every output says so."""
        return sorted({one.name for one in append_only_of(self.all_groups)})

    def check_archive(self) -> None:
        """Raise ArchiveError unless every node's segments are without a hole from its base to the last cut's finish."""
        for node in self.part.baseline:
            finish = self.last.cut.cut.nodes[self.shard_of(node)].finish
            check_contiguous(node, self.part.base[node], self.segments(node), finish)


def _newest(found: list[Mapping[str, T]], shard: str) -> T:
    return next(by_shard[shard] for by_shard in reversed(found) if shard in by_shard)
