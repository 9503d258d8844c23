"""The identity of a store's fleet: fleet.json, and the record of the largest fleet that the store has served."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from cutline.fleet.config import Fleet
from cutline.fleet.record import END, Count, Record
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit_rules import NAMED_MAX
from cutline.snapshots.records.documents import read_sealed, seal
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments import own_store


class RecordedPrimary(Record, frozen=True):
    """A primary that granted its lock to an operation, and its server's timeline then, the latest that is known."""

    node: str
    system_identifier: str
    timeline: Count | UnsetType = UNSET


class BaselineRecord(Record, frozen=True, tag_field="schema", tag="cutline/baseline/1"):
    """The recorded primaries. `forgotten` lists nodes that were removed from the fleet (`init --forget-nodes`)."""

    id: str
    primaries: tuple[RecordedPrimary, ...]
    forgotten: tuple[str, ...]


def baseline_key(number: int) -> str:
    """Return the key of record `number`; numbers start at 1."""
    return f"baselines/{number:016d}.json"


FLEET_KEY = own_store.FLEET_KEY
FOLDER_URL = own_store.FOLDER_URL
MISSING_HINT = "if the store contains snapshots, mount its file system; if it is new, run: snapshot init"


class StoreNotInitialisedError(RefusedError):
    """The store has no fleet.json: `init` has not run."""


class IdentityLostError(StoreNotInitialisedError):
    """The store contains snapshots, but no fleet.json."""


class StoreOfAnotherFleetError(RefusedError):
    """The store belongs to a fleet with a different name."""


class StoreIsCopyError(RefusedError):
    """The store is a copy: snapshots are taken only in the store from which it was copied."""


class ForeignSnapshotError(RefusedError):
    """The store holds a snapshot of another fleet."""


class StoreIdentity(Record, frozen=True, tag_field="schema", tag="cutline/fleet/1"):
    """The fleet that a store belongs to; `fleet_id` also names the fleet's publications.

    `copy` is true in a second store (snapshots/copying): no snapshots are taken there.
    """

    fleet_id: Annotated[str, Meta(pattern=f"^[0-9a-f]{{1,16}}{END}")] = field(name="fleet")
    name: str
    format: Literal[1] = 1
    copy: bool | UnsetType = UNSET

    @property
    def is_copy(self) -> bool:
        """Whether the store is a copy of the store in which the fleet's snapshots are taken."""
        return self.copy is True


def check_takes_snapshots(identity: StoreIdentity, store: ObjectStore) -> None:
    """Raise StoreIsCopyError if the store is a copy.

    A chain's slots can feed only one store: an increment taken here would be missing from the first store's chain.
    """
    if identity.is_copy:
        raise StoreIsCopyError(
            f"store {store.url} is a copy, which snapshot copy keeps up to date: no snapshots are taken there",
            hint="use the fleet file of the first store; if that store is lost, restore from this copy and take new"
            " snapshots into a new store",
            details={"store": store.url},
        )


def is_copy(store: ObjectStore) -> bool:
    """Whether the store is a copy; False if it has no fleet.json. Raises ManifestError."""
    try:
        identity: StoreIdentity = read_sealed(store, FLEET_KEY, StoreIdentity)
    except ObjectMissingError:
        return False
    return identity.is_copy


def open_own_store(fleet: Fleet) -> ObjectStore:
    """Open the fleet's store and check that it belongs to the fleet; raise the errors of read_identity."""
    store = fleet.store.open()
    read_identity(store, fleet)
    return store


def read_identity(store: ObjectStore, fleet: Fleet) -> StoreIdentity:
    """Read fleet.json.

    Raises StoreNotInitialisedError, IdentityLostError, StoreOfAnotherFleetError or ManifestError.
    """
    try:
        identity: StoreIdentity = read_sealed(store, FLEET_KEY, StoreIdentity)
    except ObjectMissingError as error:
        check_identity_not_lost(store)
        raise _not_initialised_error(store) from error
    if identity.name != fleet.name:
        raise StoreOfAnotherFleetError(
            f"store {store.url} belongs to fleet {identity.name!r}, but {fleet.path} describes fleet {fleet.name!r}",
            hint="use one store per fleet, or correct name or store in that file",
            details={"store": store.url},
        )
    return identity


def check_identity_not_lost(store: ObjectStore) -> None:
    """Raise IdentityLostError if the store has no fleet.json, but contains snapshots."""
    if store.exists(FLEET_KEY):
        return
    if names := own_store.find_commits(store, NAMED_MAX):
        raise IdentityLostError(
            f"object {FLEET_KEY} is missing from store {store.url}, which contains snapshots: {', '.join(names)}",
            hint=(
                f"put {FLEET_KEY} back from a copy of the store, or restore its last version; if the snapshots are not"
                " needed, use a new store"
            ),
            details={"store": store.url, "object": FLEET_KEY},
        )


def _not_initialised_error(store: ObjectStore) -> StoreNotInitialisedError:
    lack = f"it has no {FLEET_KEY}"
    hint = "if the store contains snapshots, correct store in fleet.toml; if it is new, run: snapshot init"
    if store.url.startswith(FOLDER_URL):
        folder = Path(store.url.removeprefix(FOLDER_URL))
        # The folder may be a mount point whose file system is not mounted.
        hint = MISSING_HINT
        if not folder.exists():
            lack = f"there is no folder {folder}"
    return StoreNotInitialisedError(
        f"store {store.url} is not initialised: {lack}", hint=hint, details={"store": store.url}
    )


def read_fleet_id(store: ObjectStore) -> str | None:
    """Return the id of the store's fleet, or None if the store is not initialised; raise ManifestError."""
    try:
        identity: StoreIdentity = read_sealed(store, FLEET_KEY, StoreIdentity)
    except ObjectMissingError:
        return None
    return identity.fleet_id


def check_of_fleet(chain: Chain, identity: StoreIdentity) -> None:
    """Raise ForeignSnapshotError if the chain belongs to a different fleet than the store."""
    if chain.full.fleet_id != identity.fleet_id:
        raise foreign_snapshot_error(chain.name, chain.full.fleet_id, identity.fleet_id)


def foreign_snapshot_error(name: str, fleet_id: str, store_fleet_id: str) -> ForeignSnapshotError:
    """Return the error for a snapshot of another fleet."""
    key = commit_key(name, 0)
    return ForeignSnapshotError(
        f"object {key} belongs to fleet {fleet_id}, but according to {FLEET_KEY} the store belongs to"
        f" fleet {store_fleet_id}",
        hint=[
            "if the snapshot was copied here from another store, remove it: a store belongs to one fleet",
            f"if {FLEET_KEY} was replaced, put the right one back from a copy of the store",
        ],
        details={"snapshot": name, "object": key, "fleet": fleet_id},
    )


def ensure_identity(store: ObjectStore, fleet: Fleet) -> tuple[StoreIdentity, bool]:
    """Write fleet.json if the store is new. Return the identity, and whether this call wrote it.

    Raises IdentityLostError if the store is not new: a new id would make all of its snapshots foreign.
    """
    identity = StoreIdentity(secrets.token_hex(4), fleet.name)
    try:
        if not store.exists(FLEET_KEY):
            check_identity_not_lost(store)
            create_or_find(store, FLEET_KEY, seal(identity))
            return identity, True
    except ObjectExistsError:
        pass
    return read_identity(store, fleet), False
