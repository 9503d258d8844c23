"""What a kind of damage is, and the outcomes that a kind can be declared to have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from tests.damage_matrix.damaged import Damaged

# Shards with a standby each, shards of a primary alone, a restore point, which has no rows, and a chain with standbys
# that begins with a merge. Also the snapshots' names.
FleetName: TypeAlias = Literal["pairs", "single", "point", "merged"]
PAIRS: FleetName = "pairs"
SINGLE: FleetName = "single"
POINT: FleetName = "point"
MERGED: FleetName = "merged"
CHAINS = (PAIRS, SINGLE)
# A conflict about the damaged object itself, for the `object` of Found.
DAMAGED = "(the damaged object)"


@dataclass(frozen=True, slots=True)
class Found:
    """A check exits with 1 and names the damage: a conflict of one of these kinds, at this place.

    `node` is the node or the other node of the conflict, `group` its table, and `object` its object (DAMAGED: an object
    that the damage changed). An empty place is not compared.
    """

    kinds: frozenset[str]
    node: str = ""
    group: str = ""
    object: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """A check refuses with this error and exit code, before it checks anything."""

    error: str
    code: int


@dataclass(frozen=True, slots=True)
class Hidden:
    """No reader of the store can detect the damage, for this reason: a check accepts the store, and a restore succeeds.

    If `is_same`, it restores what the clean chain restores; otherwise it restores something else.
    """

    reason: str
    is_same: bool = False


@dataclass(frozen=True, slots=True)
class Doubted:
    """A check warns of the damage with a doubt of one of these kinds, and accepts the store.

    The `reason` says what else would explain it, for which a conflict would be a false alarm. `is_same` is as in
    Hidden.
    """

    kinds: frozenset[str]
    reason: str
    is_same: bool = False


@dataclass(frozen=True, slots=True)
class Restorable:
    """A check accepts the store, and `check --restorable` finds the damage: a conflict of kind `restore` at this place.

    A restore refuses the store. The `reason` says why a check can't tell at its price. `node` and `group` are as in
    Found.
    """

    reason: str
    node: str = ""
    group: str = ""


@dataclass(frozen=True, slots=True)
class Drilled:
    """A check accepts the store, for this reason, and a restore refuses it: only a server can tell, as in a drill."""

    reason: str


Expected: TypeAlias = Found | Refused | Doubted | Hidden | Restorable | Drilled


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of damage: a stable name, its family and fleet, what it does to a store, and the expected outcome.

    `increment` is the increment that is checked and restored; None means the newest.
    """

    name: str
    family: str
    fleet: FleetName
    damage: Callable[[Damaged], None]
    expected: Expected
    increment: int | None = None

    @property
    def id(self) -> str:
        """The name by which the program and the tests select the kind."""
        return f"{self.family} / {self.fleet} / {self.name}"


def doubted(*kinds: str, reason: str, is_same: bool = False) -> Doubted:
    """Return the expectation that a check warns of the damage."""
    return Doubted(frozenset(kinds), reason, is_same)


def found(*kinds: str, node: str = "", group: str = "", object: str = "") -> Found:
    """Return the expectation that a check finds the damage."""
    return Found(frozenset(kinds), node, group, object)
