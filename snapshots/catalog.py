"""What is in a store: snapshots and increments as their commits tell, read without opening an object."""

from __future__ import annotations

from dataclasses import dataclass

from fleet.config import Fleet
from snapshots.commits import read_chain, read_commit, snapshot_names
from snapshots.manifest import Chain, ManifestError
from snapshots.store_identity import read_identity
from storage.errors import RefusedError
from storage.open import open_store

COMPLETE, BROKEN = "complete", "broken"


@dataclass(frozen=True, slots=True)
class Entry:
    """One snapshot. Where its chain can't be read, `problem` says why and `chain` is what could be read, if any."""

    name: str
    chain: Chain | None
    problem: str | None = None

    @property
    def state(self) -> str:
        """Complete, or broken: a commit is missing or unreadable. Only `check` reads what they list."""
        return BROKEN if self.problem else COMPLETE


def list_store(fleet: Fleet) -> list[Entry]:
    """Every snapshot in the fleet's store, by name."""
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    entries: list[Entry] = []
    for name in snapshot_names(store):
        try:
            entries.append(Entry(name, read_chain(store, name)))
        except (ManifestError, RefusedError) as error:
            try:
                chain = Chain(read_commit(store, name, 0))
            except (ManifestError, RefusedError):
                entries.append(Entry(name, None, error.message))
            else:
                entries.append(Entry(name, chain, error.message))
    return entries


def show_snapshot(fleet: Fleet, name: str) -> Chain:
    """One snapshot's chain; raises SnapshotMissingError, ManifestError."""
    store = open_store(fleet.store_url, fleet.store_options)
    read_identity(store, fleet)
    return read_chain(store, name)
