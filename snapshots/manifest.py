"""What a full snapshot or an increment says of itself.

A commit lists every object of its snapshot or increment with size and digest. It is written once, as the last
step; nothing in the store exists for Cutline unless a commit lists it (docs/architecture.md, invariant 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Group
from fleet.left_out import LeftOut
from fleet.table_state import TableState
from wal.archive import Segment
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
