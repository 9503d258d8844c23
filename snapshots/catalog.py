"""What is in a store: snapshots and increments as their commits tell, read without opening an object."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.config import Fleet
from snapshots.commits import read_chain, read_commit, snapshot_names
from snapshots.lost import Lost, read_lost
from snapshots.manifest import Chain, ManifestError
from snapshots.retained import Kept, over_limit, warning_of
from snapshots.store_identity import read_identity
from storage.errors import RefusedError
from storage.open import open_store
from storage.store import ObjectStore
from wal.retained import Answers, Asking, Retained
from wal.slots import slot_name

COMPLETE, BROKEN, LOST = "complete", "broken", "lost"


@dataclass(frozen=True, slots=True)
class Entry:
    """One snapshot. Where its chain can't be read, `problem` says why and `chain` is what could be read, if any.

    `lost` says why the chain can't be continued, where it was given up; `retained` what the nodes keep for it.
    """

    name: str
    chain: Chain | None
    problem: str | None = None
    lost: Lost | None = None
    retained: tuple[Retained, ...] = ()

    @property
    def state(self) -> str:
        """Complete; lost, that is complete without further increments; or broken: a commit is missing or unreadable.

        Only `check` reads what the commits list.
        """
        if self.problem:
            return BROKEN
        return LOST if self.lost else COMPLETE


@dataclass(frozen=True, slots=True)
class Listing:
    """The snapshots of a store by name, and what the fleet's nodes answered."""

    entries: tuple[Entry, ...]
    answers: Answers

    @property
    def warnings(self) -> list[str]:
        """A line for every chain that keeps over half of a node's limit."""
        known = {slot_name(one.chain.full.chain): one for one in self.entries if one.chain}
        found: list[str] = []
        for slot in sorted({one.slot for one in self.answers.retained}):
            entry = known.get(slot)
            kept = Kept(slot, self.answers.of_slot(slot), entry.name if entry else None)
            if entry and entry.lost:
                found.append(f"{over_limit(kept)}: the next create drops its slots")
            elif kept.worst.is_past_limit:
                found.append(f"{over_limit(kept)}: the next create gives it up")
            elif kept.worst.is_past_half:
                found.append(warning_of(kept))
        return found


def list_store(fleet: Fleet) -> Listing:
    """Every snapshot in the fleet's store; the nodes are asked meanwhile, and need not answer."""
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    asking = Asking(fleet.nodes)
    entries = [_entry(store, name) for name in snapshot_names(store)]
    answers = asking.answers()
    return Listing(tuple(_with_retained(entry, answers) for entry in entries), answers)


def _entry(store: ObjectStore, name: str) -> Entry:
    try:
        chain = read_chain(store, name)
        return Entry(name, chain, lost=read_lost(store, name, chain.full.chain))
    except (ManifestError, RefusedError) as error:
        try:
            return Entry(name, Chain(read_commit(store, name, 0)), error.message)
        except (ManifestError, RefusedError):
            return Entry(name, None, error.message)


def _with_retained(entry: Entry, answers: Answers) -> Entry:
    if entry.chain is None:
        return entry
    return replace(entry, retained=answers.of_slot(slot_name(entry.chain.full.chain)))


def show_snapshot(fleet: Fleet, name: str) -> tuple[Entry, Chain]:
    """One snapshot and its chain; raises SnapshotMissingError, ManifestError."""
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    chain = read_chain(store, name)
    return Entry(name, chain, lost=read_lost(store, name, chain.full.chain)), chain
