"""Lost chains: their restore points can be restored, but no further increment can follow.

A chain is lost once its mark is in the store. The mark is created once and never changes. The chain's slots are dropped
after that, so a command that finds a slot of a marked chain drops it (docs/architecture.md, invariant 9). The mark
names the chain, not only the snapshot, so it never applies to another chain under the same name.

A damaged mark proves nothing. Nothing is added to its chain or removed from it until an operator has looked at the
object. Its restore points are read as if there were no mark.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cutline.fleet.messages import NEW_CHAIN, list_some
from cutline.fleet.own_process import read_label
from cutline.fleet.record import Count, Record, Time, fields_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import NEWER_HINT, ManifestError, check_about, read_sealed, seal
from cutline.snapshots.records.tombstones import is_only_full, only_full_key
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

DAMAGED_HINT = (
    "put it back from a copy of the store, or remove it: the next increment will show whether the chain ended"
)

NODES_NAMED_MAX = 5


class ChainLostError(RefusedError):
    """A command has ended the chain, or another has taken its place."""


class LostChain(Record, frozen=True, tag_field="schema", tag="cutline/lost/1"):
    """The mark of a lost chain: why, and since when, no increment can follow.

    `restore` is the operation that set aside the chain's databases on `nodes`; `node` is the first of them. `successor`
    is the snapshot with which `watch` replaced this one, and `slot_problem` is the problem with the chain's slot on
    `node` at that time ("" if none is known). `ended_by` is the label of the command with which an operator ended the
    chain. If these fields are empty, the node retained too much WAL.
    """

    snapshot: str
    chain: str
    after_increment: Count
    node: str
    at: Time
    restore: str = ""
    successor: str = ""
    slot_problem: str = ""
    nodes: tuple[str, ...] = ()
    ended_by: str = ""

    @property
    def text(self) -> str:
        """The chain's last restore point and the reason for its end, in the words of `list` and all messages."""
        after = f"increment {self.after_increment}" if self.after_increment else "the full snapshot"
        if self.restore:
            nodes = self.nodes or (self.node,)
            databases = "databases on nodes" if len(nodes) > 1 else "database on node"
            aside = f"set aside its {databases} {list_some(nodes, NODES_NAMED_MAX)}"
            return f"can't be continued after {after}: restore {self.restore} {aside}"
        if self.ended_by:
            label = read_label(self.ended_by)
            who = f"{label.user}@{label.host}" if label else "an unknown user"
            problem = f"; node {self.node}: {self.slot_problem}" if self.slot_problem else ""
            return f"can't be continued after {after}: ended by {who}{problem}"
        problem = f"node {self.node}: {self.slot_problem}; " if self.slot_problem else ""
        return f"can't be continued after {after}: {problem}{self.successor} has taken its place"

    def details(self) -> dict[str, Any]:
        """Return the fields of the mark that appear in `list` and in errors."""
        hidden = ("schema", "snapshot", "chain")
        return {name: value for name, value in fields_of(self).items() if name not in hidden}


def lost_key(snapshot: str, chain: str) -> str:
    """Return the key of a chain's mark."""
    return f"snapshots/{snapshot}/lost/{chain}.json"


def is_lost(store: ObjectStore, snapshot: str, chain: str) -> bool:
    """Whether the chain is marked as lost; raise ManifestError if another document is in the mark's place."""
    return read_lost(store, snapshot, chain) is not None


def mark_lost(store: ObjectStore, lost: LostChain) -> None:
    """Mark the chain as lost. An existing mark stays: the first reason counts."""
    with suppress(ObjectExistsError):
        create_or_find(store, lost_key(lost.snapshot, lost.chain), seal(lost))


def read_lost(store: ObjectStore, snapshot: str, chain: str) -> LostChain | None:
    """Return the chain's mark, or None if it is missing; raise ManifestError."""
    key = lost_key(snapshot, chain)
    try:
        lost: LostChain = read_sealed(store, key, LostChain)
        check_about(key, f"chain {lost.chain} of snapshot {lost.snapshot}", f"chain {chain} of snapshot {snapshot}")
    except ObjectMissingError:
        return None
    except ManifestError as error:
        if NEWER_HINT not in error.hint:
            error.hint = DAMAGED_HINT
        raise
    return lost


@dataclass(frozen=True, slots=True)
class DamagedMark:
    """A mark that can't be read, with the message and hint of the error."""

    key: str
    message: str
    hint: str

    @property
    def text(self) -> str:
        """The damage and its consequences, in the words that `list` and `prune` use."""
        kept = "until it is repaired, the snapshot gets no increments and prune keeps it; it can still be restored"
        return f"{self.message}; {kept}; {self.hint}"


@dataclass(frozen=True, slots=True)
class ChainMarks:
    """The marks of a snapshot: its chain was given up or ended, or its increments were pruned."""

    lost: LostChain | None = None
    is_only_full: bool = False
    damaged: tuple[DamagedMark, ...] = ()

    @property
    def problem(self) -> str:
        """The problem with the marks, "" if all can be read."""
        return "; ".join(mark.text for mark in self.damaged)


def read_marks(store: ObjectStore, snapshot: str, chain: str) -> ChainMarks:
    """Read the marks of a snapshot and its chain; damaged marks are in the result but have no effect."""
    lost, pruned, damaged = None, False, list[DamagedMark]()
    try:
        pruned = is_only_full(store, snapshot)
    except ManifestError as error:
        damaged.append(DamagedMark(only_full_key(snapshot), error.message, error.hint))
    try:
        lost = read_lost(store, snapshot, chain)
    except ManifestError as error:
        damaged.append(DamagedMark(lost_key(snapshot, chain), error.message, error.hint))
    return ChainMarks(lost, pruned, tuple(damaged))


def check_chain_not_lost(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainLostError if the chain is lost."""
    lost = read_lost(store, chain.name, chain.full.chain)
    if lost:
        raise chain_lost_error(lost)


def chain_lost_error(lost: LostChain) -> ChainLostError:
    """Return the error for an increment of a lost chain."""
    return ChainLostError(
        f"snapshot {lost.snapshot} {lost.text}, at {lost.at}",
        hint=f"{NEW_CHAIN}   (the restore points of snapshot {lost.snapshot} can still be restored)",
        ends_chain=ChainEnd.FOR_GOOD,
        details={"snapshot": lost.snapshot, **lost.details()},
    )
