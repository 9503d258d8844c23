"""A full snapshot and its increments read as one: what the state at the last of them is made of.

Each commit says only what is not as at the one before; here that is put together, by node or by shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fleet.lsn import Lsn
from fleet.nodes.baseline import NodeIdentity
from fleet.tables.groups import Group
from fleet.tables.left_out import LeftOut, LeftOutKind, append_only_of
from fleet.tables.table_state import TableState
from snapshots.records.commit import (
    BASE,
    DDL,
    Commit,
    DefinitionChanges,
    FullSnapshot,
    Increment,
    Sequence,
    StoredObject,
)
from wal.segments.archive import Segment, check_contiguous

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chain:
    """A snapshot with its increments up to some number: what a state is folded from."""

    full: FullSnapshot
    increments: tuple[Increment, ...] = ()

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return self.full.snapshot

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
        return self.full.baseline

    @property
    def baseline(self) -> dict[str, NodeIdentity]:
        """What each node was at the full snapshot."""
        return {identity.node: identity for identity in self.full.baseline}

    def shard_of(self, node: str) -> str:
        """The primary whose rows `node` holds; KeyError where the chain has no copy of it."""
        return self.full.parts[node] or node

    def up_to(self, increment: int) -> Chain:
        """The chain as it was at `increment`."""
        return replace(self, increments=self.increments[:increment])

    def segments(self, node: str) -> tuple[Segment, ...]:
        """The node's archive as the commits list it."""
        return tuple(segment for commit in self.commits for segment in commit.segments.get(node, ()))

    def position(self, node: str) -> Lsn:
        """Where the node's part of the state ends: its primary's position at the last cut."""
        return self.last.cut.of(self.shard_of(node)).position

    def excluded(self, node: str) -> frozenset[Lsn]:
        """Positions of the transactions before `position` that are not part of the state."""
        shard = self.shard_of(node)
        left_out = {entry.lsn for entry in self.last.cut.of(shard).undecided}
        undone = {lsn for commit in self.commits for lsn in commit.cut.of(shard).rolled_back}
        return frozenset(left_out | undone)

    @property
    def definition_changes(self) -> tuple[DefinitionChanges, ...]:
        """What the commits say of definitions that changed before their cuts, in order."""
        return tuple(commit.definition_changes for commit in self.commits if commit.definition_changes)

    def definitions(self, node: str) -> dict[int, Group]:
        """Every definition that the node's objects may be in, by number: also those that ended."""
        shard = self.shard_of(node)
        found = [self.full.groups[shard], *(changes.groups.get(shard, ()) for changes in self.definition_changes)]
        return {group.number: group for groups in found for group in groups}

    def groups(self, node: str) -> tuple[Group, ...]:
        """The groups that the node holds at the last commit, by name."""
        shard = self.shard_of(node)
        gone = {number for changes in self.definition_changes for number in changes.gone.get(shard, ())}
        found = [group for number, group in self.definitions(node).items() if number not in gone]
        return tuple(sorted(found, key=lambda group: (group.schema, group.table)))

    def successions(self, node: str) -> dict[int, int]:
        """By number of a definition the number of the one before that it carries on."""
        shard = self.shard_of(node)
        return {
            new: old for changes in self.definition_changes for new, old in changes.successions.get(shard, {}).items()
        }

    def began(self, node: str) -> dict[int, Lsn]:
        """By number of a definition that was copied anew the position from which its changes count."""
        carried = self.successions(node)
        found = {
            number: at for changes in self.definition_changes for number, at in changes.begun.get(node, {}).items()
        }
        return {number: at for number, at in found.items() if number not in carried}

    def tables(self, shard: str) -> dict[str, TableState]:
        """The states of the shard's tables at the last commit, by name."""
        listed = [self.full.tables, *(changes.tables for changes in self.definition_changes)]
        found = {state.table: state for tables in listed for state in tables.get(shard, ())}
        return {group.name: found[group.name] for group in self.groups(shard) if group.name in found}

    def roles(self, shard: str) -> tuple[str, ...]:
        """The roles that the shard's DDL names at the last commit."""
        return _newest([self.full.roles, *(changes.roles for changes in self.definition_changes)], shard)

    def fingerprint(self, shard: str) -> str:
        """What tells the shard's catalogs at the last commit from others."""
        return _newest([self.full.fingerprints, *(changes.fingerprints for changes in self.definition_changes)], shard)

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
        return {shard: self.groups(shard) for shard in self.full.groups}

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
        for node in self.full.parts:
            finish = self.last.cut.of(self.shard_of(node)).finish
            check_contiguous(node, self.full.base[node], self.segments(node), finish)


def _newest(found: list[Mapping[str, T]], shard: str) -> T:
    return next(by_shard[shard] for by_shard in reversed(found) if shard in by_shard)
