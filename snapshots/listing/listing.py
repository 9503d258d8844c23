"""What is in a store: snapshots and increments as their commits tell, read without opening an object."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.config import Fleet
from snapshots.operations.open_operations import OpenOperation, naming_open_operations, read_open_operations
from snapshots.operations.slot_guard import KeptChain, over_limit, warning_of
from snapshots.records.chain import Chain
from snapshots.records.commits import read_chain, read_full, snapshot_names
from snapshots.records.documents import ManifestError
from snapshots.records.lost_chains import Lost, read_lost
from snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from snapshots.records.tombstones import is_only_full
from storage.errors import RefusedError
from storage.store import ObjectStore
from wal.slots.retained import Retained, RetainedAnswers, RetainedQuery
from wal.slots.slots import slot_name

COMPLETE, BROKEN, LOST, ONLY_FULL = "complete", "broken", "lost", "only-full"


@dataclass(frozen=True, slots=True)
class Entry:
    """One snapshot. Where its chain can't be read, `problem` says why and `chain` is what could be read, if any.

    `lost` says why the chain can't be continued, where it was given up; `retained` what the nodes keep for it.
    `is_only_full`: its increments were pruned.
    """

    name: str
    chain: Chain | None
    problem: str | None = None
    lost: Lost | None = None
    retained: tuple[Retained, ...] = ()
    is_only_full: bool = False

    @property
    def state(self) -> str:
        """Complete; lost or only-full, that is without further increments; broken: a commit is missing or unreadable.

        Only `check` reads what the commits list.
        """
        if self.problem:
            return BROKEN
        if self.is_only_full:
            return ONLY_FULL
        return LOST if self.lost else COMPLETE

    @property
    def remark(self) -> str:
        """What a person is told of its state, "" if there is nothing to say."""
        pruned = "its increments were pruned: it gets no others" if self.is_only_full else ""
        return self.problem or pruned or (self.lost.text if self.lost else "")


@dataclass(frozen=True, slots=True)
class Listing:
    """The snapshots of a store by name, what the fleet's nodes answered, and the operations without an outcome."""

    entries: tuple[Entry, ...]
    answers: RetainedAnswers
    open_operations: tuple[OpenOperation, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """A line for every chain that keeps over half of a node's limit."""
        known = {slot_name(one.chain.full.chain): one for one in self.entries if one.chain}
        found: list[str] = []
        for slot in sorted({one.slot for one in self.answers.retained}):
            entry = known.get(slot)
            kept = KeptChain(slot, self.answers.of_slot(slot), entry.name if entry else None)
            if entry and entry.lost:
                found.append(f"{over_limit(kept)}: the next create drops its slots")
            elif kept.worst.is_past_limit:
                found.append(f"{over_limit(kept)}: the next create gives it up")
            elif kept.worst.is_past_half:
                found.append(warning_of(kept))
        return found


def list_store(fleet: Fleet) -> Listing:
    """Every snapshot in the fleet's store; the nodes are asked meanwhile, and need not answer."""
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    asking = RetainedQuery(fleet.nodes)
    open_operations = read_open_operations(store)
    entries = [_entry(store, identity, name) for name in snapshot_names(store)]
    answers = asking.answers()
    return Listing(tuple(_with_retained(entry, answers) for entry in entries), answers, open_operations)


def _entry(store: ObjectStore, identity: StoreIdentity, name: str) -> Entry:
    try:
        chain = read_chain(store, name)
        check_of_fleet(chain, identity)
        return entry_of(store, chain)
    except (ManifestError, RefusedError) as error:
        try:
            full = Chain(read_full(store, name))
            check_of_fleet(full, identity)
        except (ManifestError, RefusedError):
            return Entry(name, None, error.message)
        return Entry(name, full, error.message)


def entry_of(store: ObjectStore, chain: Chain) -> Entry:
    """The entry of a chain that can be read."""
    lost = read_lost(store, chain.name, chain.full.chain)
    return Entry(chain.name, chain, lost=lost, is_only_full=is_only_full(store, chain.name))


def _with_retained(entry: Entry, answers: RetainedAnswers) -> Entry:
    if entry.chain is None:
        return entry
    return replace(entry, retained=answers.of_slot(slot_name(entry.chain.full.chain)))


def show_snapshot(fleet: Fleet, name: str) -> tuple[Entry, Chain, tuple[OpenOperation, ...]]:
    """One snapshot, its chain, and its operations without an outcome; raises SnapshotMissingError, ManifestError."""
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    open_operations = read_open_operations(store, name)
    with naming_open_operations(open_operations):
        chain = read_chain(store, name)
    check_of_fleet(chain, identity)
    return entry_of(store, chain), chain, open_operations
