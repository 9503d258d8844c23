"""Reads again and again what `list` shows of a store's snapshots; of those that have not changed only listings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256

from cutline.fleet.config import Fleet
from cutline.snapshots.listing.entry import Entry
from cutline.snapshots.listing.listing import read_entry
from cutline.snapshots.records.commits import ASKING_THREADS_MAX, NAME, is_committed
from cutline.snapshots.records.cut_times import cut_time
from cutline.snapshots.records.store_identity import StoreIdentity, read_identity
from cutline.snapshots.records.tombstones import tombstone_key
from cutline.storage.store import ObjectStore

# What is kept of a snapshot is as large as its newest commits, and a kilobyte for each increment.
KEPT_MAX = 256
FULL_COMMIT, LOST_FOLDER = "snapshot.", "lost"


@dataclass(frozen=True, slots=True)
class _Listed:
    """What listings show of a snapshot: another increment, a mark or a commit that is gone changes it.

    `files` are its commit, its marks and its folders; `increments` is the digest of the names, sizes and times of its
    increments' commits.
    """

    name: str
    is_deleted: bool
    files: tuple[str, ...]
    increments: str


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of a snapshot, after it was listed; `entry` is None if it is not committed, or deleted."""

    listed: _Listed
    entry: Entry | None

    @property
    def may_stay(self) -> bool:
        """Whether it is as it was read until its listings change. What has a problem may be corrected in its place."""
        if self.entry is None:
            return True
        # The mark of another chain of its name: that of its own would change no listing.
        is_of_another = LOST_FOLDER in self.listed.files and self.entry.lost is None
        return self.entry.problem is None and not is_of_another

    @property
    def newest_at(self) -> float:
        """When its newest cut was made."""
        chain = self.entry.chain if self.entry else None
        return cut_time(chain.last).timestamp() if chain else 0.0


class EntryReader:
    """Reads the entries of all snapshots. One whose listings are as they were when it was read is not read again.

    So a full snapshot's commit that is damaged later, in its place, is not noticed here: `check` finds it. The newest
    KEPT_MAX entries are kept; others are read each time.
    """

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def read(self, store: ObjectStore, fleet: Fleet) -> tuple[Entry, ...]:
        """What `list` shows of every snapshot, except for the WAL that nodes retain.

        Raises StoreOfAnotherFleetError, StoreNotInitialisedError, ManifestError, StoreUnreachableError.
        """
        identity = read_identity(store, fleet)
        deleted = set(store.list_children("deleted"))
        names = [name for name in store.list_children("snapshots") if NAME.fullmatch(name)]
        with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
            found = list(threads.map(lambda name: self._read(store, identity, name, deleted), names))
        kept = sorted((one for one in found if one.may_stay), key=lambda one: one.newest_at, reverse=True)
        self._known = {one.listed.name: one for one in kept[:KEPT_MAX]}
        return tuple(one.entry for one in found if one.entry is not None)

    def _read(self, store: ObjectStore, identity: StoreIdentity, name: str, deleted: set[str]) -> _Known:
        # The listings come first: what is stored while it is read changes the next ones.
        listed = _list_snapshot(store, name, is_deleted=tombstone_key(name).partition("/")[2] in deleted)
        known = self._known.get(name)
        if known is not None and known.listed == listed:
            return known
        if not any(one.startswith(FULL_COMMIT) for one in listed.files) or not is_committed(store, name):
            return _Known(listed, None)
        return _Known(listed, read_entry(store, identity, name))


def read_entries(store: ObjectStore, fleet: Fleet) -> tuple[Entry, ...]:
    """What `list` shows of every snapshot, except for the WAL that nodes retain; raises as EntryReader.read."""
    return EntryReader().read(store, fleet)


def _list_snapshot(store: ObjectStore, name: str, *, is_deleted: bool) -> _Listed:
    files = tuple(store.list_children(f"snapshots/{name}"))
    increments = store.inventory(f"snapshots/{name}/increments") if "increments" in files else []
    digest = sha256()
    for one in increments:
        digest.update(f"{one.key} {one.size} {one.created_at.timestamp()}\n".encode())
    return _Listed(name, is_deleted, files, digest.hexdigest())
