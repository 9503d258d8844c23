"""The marks of chains that commands have ended: their restore points can be restored, but no increment can follow.

A chain has ended once its mark is in the store. The mark is created once and never changes. The chain's slots are
dropped after that, so a command that finds a slot of a marked chain drops it. The mark names the chain, not only the
snapshot, so it never applies to another chain under the same name.

A damaged mark proves nothing. Nothing is added to its chain or removed from it until an operator has looked at the
object. Its restore points are read as if there were no mark.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec import Struct

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


class ChainEndedError(RefusedError):
    """A command has ended the chain, or another has taken its place."""


class EndMark(Record, frozen=True, tag_field="schema", tag="cutline/ended/1"):
    """The mark of a chain that has ended: why, and since when, no increment can follow.

    `restore` is the operation that set aside the chain's databases on `nodes`; `node` is the first of them. `successor`
    is the snapshot with which `watch` replaced this one, and `slot_problem` is the problem with the chain's slot on
    `node` at that time ("" if none is known). `ended_by` is the label of the command with which an operator ended the
    chain.
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
        problem = f"node {self.node}: {self.slot_problem}" if self.slot_problem else ""
        if self.successor:
            replaced = f"{self.successor} has taken its place"
            return f"can't be continued after {after}: {'; '.join(filter(None, (problem, replaced)))}"
        label = read_label(self.ended_by)
        who = f"{label.user}@{label.host}" if label else "an unknown user"
        return f"can't be continued after {after}: {'; '.join(filter(None, (f'ended by {who}', problem)))}"

    def details(self) -> dict[str, Any]:
        """Return the fields of the mark that appear in `list` and in errors."""
        hidden = ("schema", "snapshot", "chain")
        return {name: value for name, value in fields_of(self).items() if name not in hidden}


def end_key(snapshot: str, chain: str) -> str:
    """Return the key of a chain's mark."""
    return f"snapshots/{snapshot}/ended/{chain}.json"


def has_end(store: ObjectStore, snapshot: str, chain: str) -> bool:
    """Whether the chain is marked as ended; raise ManifestError if another document is in the mark's place."""
    return read_end(store, snapshot, chain) is not None


def mark_end(store: ObjectStore, mark: EndMark) -> None:
    """Mark the chain as ended. An existing mark stays: the first reason counts."""
    with suppress(ObjectExistsError):
        create_or_find(store, end_key(mark.snapshot, mark.chain), seal(mark))


def read_end(store: ObjectStore, snapshot: str, chain: str) -> EndMark | None:
    """Return the chain's mark, or None if it is missing; raise ManifestError."""
    key = end_key(snapshot, chain)
    try:
        mark: EndMark = read_sealed(store, key, EndMark)
        check_about(key, f"chain {mark.chain} of snapshot {mark.snapshot}", f"chain {chain} of snapshot {snapshot}")
    except ObjectMissingError:
        return None
    except ManifestError as error:
        if NEWER_HINT not in error.hint:
            error.hint = DAMAGED_HINT
        raise
    return mark


class DamagedMark(Struct, frozen=True):
    """A mark that can't be read, with the message and hint of the error."""

    key: str
    message: str
    hint: str

    @property
    def text(self) -> str:
        """The damage and its consequences, in the words that `list` and `prune` use."""
        kept = "until it is repaired, the snapshot gets no increments and prune keeps it; it can still be restored"
        return f"{self.message}; {kept}; {self.hint}"


class ChainMarks(Struct, frozen=True):
    """The marks of a snapshot: its chain has ended, or its increments were pruned."""

    ended: EndMark | None = None
    is_only_full: bool = False
    damaged: tuple[DamagedMark, ...] = ()

    @property
    def problem(self) -> str:
        """The problem with the marks, "" if all can be read."""
        return "; ".join(mark.text for mark in self.damaged)


def read_marks(store: ObjectStore, snapshot: str, chain: str) -> ChainMarks:
    """Read the marks of a snapshot and its chain; damaged marks are in the result but have no effect."""
    ended, pruned, damaged = None, False, list[DamagedMark]()
    try:
        pruned = is_only_full(store, snapshot)
    except ManifestError as error:
        damaged.append(DamagedMark(only_full_key(snapshot), error.message, error.hint))
    try:
        ended = read_end(store, snapshot, chain)
    except ManifestError as error:
        damaged.append(DamagedMark(end_key(snapshot, chain), error.message, error.hint))
    return ChainMarks(ended, pruned, tuple(damaged))


def check_chain_not_ended(store: ObjectStore, chain: Chain) -> None:
    """Raise ChainEndedError if the chain has ended."""
    mark = read_end(store, chain.name, chain.full.chain)
    if mark:
        raise chain_ended_error(mark)


def chain_ended_error(mark: EndMark) -> ChainEndedError:
    """Return the error for an increment of a chain that has ended."""
    return ChainEndedError(
        f"snapshot {mark.snapshot} {mark.text}, at {mark.at}",
        hint=f"{NEW_CHAIN}   (the restore points of snapshot {mark.snapshot} can still be restored)",
        ends_chain=ChainEnd.FOR_GOOD,
        details={"snapshot": mark.snapshot, **mark.details()},
    )
