"""What a full snapshot or an increment says of itself, and a chain of them read as one.

A commit lists every object of its snapshot or increment with size and digest. It is written once, as the last
step; nothing in the store exists for Cutline unless a commit lists it (docs/architecture.md, invariant 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Group
from fleet.left_out import LeftOut, LeftOutKind, append_only_of
from fleet.table_state import TableState
from wal.archive import Segment, check_contiguous
from wal.cut_values import Cut

BASE, DDL = "base", ("pre-data", "post-data", "refresh", "event-triggers")
# Of these objects `rows` counts, under this number, the large objects that begin in it.
LARGE_OBJECTS, LARGE_OBJECTS_COUNT = "large_objects", 0
T = TypeVar("T")


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
    """Where a sequence stands: at or beyond every value that was handed out before the cut.

    Without `is_called` the next value is `last_value` itself.
    """

    schema: str
    name: str
    last_value: int
    is_called: bool
    increment: int
    cycles: bool


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
class Previous:
    """The commit before an increment: its operation and the digest of its file."""

    operation: str
    digest: str


@dataclass(frozen=True, slots=True)
class Commit:
    """A full snapshot (increment 0) or an increment. `segments` are those after the commit before.

    `schema` is None where no definition and no DDL changed.
    `previous` is None on a full snapshot, and on increments that were written before it was there. `digest` is the one
    in the file, "" before it is written.
    `left_out` names what of the primaries' databases is not in it; None in a commit that was written before it did.
    `terminal`: nothing was written to the fleet after it, until somebody let it accept writes again.
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
    schema: SchemaPart | None = None
    left_out: tuple[LeftOut, ...] | None = None
    previous: Previous | None = None
    terminal: bool = False
    digest: str = field(default="", compare=False)

    @property
    def object_sizes(self) -> dict[str, int]:
        """Every object that this commit adds, by key, with its size in bytes."""
        sizes = {segment.key: segment.size for found in self.segments.values() for segment in found}
        return sizes | {stored.key: stored.size for stored in self.objects}

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """The base copies and the DDL that this commit adds."""
        return (*(self.full.objects if self.full else ()), *(self.schema.objects if self.schema else ()))


@dataclass(frozen=True, slots=True)
class FullPart:
    """What only a full snapshot's commit says. Groups by shard; positions and roles by node.

    `rules` chose the groups. `fingerprints` tell the states of the catalogs that the DDL is of.
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
    fingerprints: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchemaPart:
    """What a commit says of definitions that are not as before: at the commit before, or at a full snapshot's copy.

    By shard, `begun` by node.

    `groups` are the definitions that began, `gone` the numbers of those that ended. `successions` gives for a new
    number the one that it carries on; the others of `groups` were copied anew. `begun` is from which position changes
    under a new number count (of one carried on: from where there are any). `tables` and `roles` are only those that
    changed, `roles` and `fingerprints` of the shards whose catalogs did; `objects` are base copies and DDL.
    """

    groups: Mapping[str, tuple[Group, ...]] = field(default_factory=dict)
    gone: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    successions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    begun: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, TableState]] = field(default_factory=dict)
    objects: tuple[StoredObject, ...] = ()
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


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
