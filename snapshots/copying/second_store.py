"""The second store of a copy: where it is, how it is encrypted, and its initialisation.

Both stores contain the same stored bytes. If the first store is encrypted, the second has the same data key, encrypted
with the encryption key of its own fleet file. If only the second store is encrypted, it has a data key of its own, and
decrypts objects to the bytes that the first store contains (storage/stored_form.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from msgspec import Struct, structs

from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.records.documents import read_sealed, seal
from cutline.snapshots.records.store_identity import (
    FLEET_KEY,
    StoreIdentity,
    StoreOfAnotherFleetError,
    check_identity_not_lost,
    read_identity,
)
from cutline.storage.encryption.encrypted_store import EncryptedStore, StoreKey
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.errors import RefusedError, UsageError
from cutline.storage.location import StoreLocation, with_environment
from cutline.storage.probe import probe_store
from cutline.storage.store import ObjectStore
from cutline.storage.stored_form import StoredForm, stored_form
from cutline.storage.storing import create_or_find

FLEET_FILE = ".toml"


class NotACopyError(RefusedError):
    """The second store is in use, but not as a copy of the first store."""


class CopyPlace(Struct, frozen=True):
    """The location of a second store, as `--to` or `[[copy]]` names it."""

    location: StoreLocation
    encryption: FleetEncryption | None

    @property
    def url(self) -> str:
        """The store's URL, without secrets."""
        return str(self.location)


class StorePair(Struct, frozen=True):
    """The first and the second store, opened. `is_new`: the second store has not been initialised yet."""

    first: ObjectStore
    second: ObjectStore
    is_new: bool

    @property
    def source(self) -> StoredForm:
        """The form in which the first store keeps objects; commits describe the bytes in its `raw`."""
        return stored_form(self.first)

    @property
    def target(self) -> ObjectStore:
        """The store that takes and returns the bytes that `source.raw` contains."""
        return stored_form(self.second).raw


def locate_copy(fleet: Fleet, place: str) -> CopyPlace:
    """Return the location of the second store at the URL `place`, or of the store that another fleet file names.

    A URL gets the encryption and the rate of the fleet's own store, and its options if both have the same kind of URL.
    A path may be relative to the working directory. Raises UsageError if it is the fleet's own store, FleetFileError,
    and StoreOfAnotherFleetError if the file describes another fleet.
    """
    found = _locate(fleet, place)
    own, other = fleet.store.open_raw(), found.location.open_raw()
    if other.url.rstrip("/") == own.url.rstrip("/") and found.location.options == fleet.store.options:
        raise UsageError(
            f"--to names the fleet's own store, {found.url}", hint="name a second store: --to s3://bucket/folder"
        )
    if fleet.encryption is not None and found.encryption is None and _is_encrypted_itself(fleet):
        raise UsageError(
            f"the fleet's store is encrypted, but the fleet file of {found.url} names no key",
            hint="name an encryption key for the second store under [encryption] in its fleet file",
        )
    return found


def _locate(fleet: Fleet, place: str) -> CopyPlace:
    if place.endswith(FLEET_FILE):
        try:
            path = Path(place).expanduser()
        except RuntimeError:
            raise UsageError(
                f"--to {place}: its ~ names a user without a home folder", hint="name the file by its full path"
            ) from None
        second = load_fleet(path)
        if second.name != fleet.name:
            raise StoreOfAnotherFleetError(
                f"{path} describes fleet {second.name!r}, but {fleet.path} describes fleet {fleet.name!r}",
                hint="the fleet file of a second store differs only in store, [store_options] and [encryption]",
                details={"file": str(path)},
            )
        return CopyPlace(second.store, second.encryption)
    place = place if "://" in place else str(Path(place).absolute())
    is_same_kind = place.partition("://")[0] == fleet.store.url.partition("://")[0]
    options = with_environment(place, fleet.store.options if is_same_kind else {})
    # The limit on the rate is that of the fleet's own store.
    location = replace(fleet.store, url=place, options=options, encryption=fleet.encryption)
    return CopyPlace(location, fleet.encryption)


def _is_encrypted_itself(fleet: Fleet) -> bool:
    """Whether commits in the fleet's store describe encrypted bytes; False for an encrypted copy of a plain store."""
    return _key_of(fleet.store.open()) is not None


def _key_of(store: ObjectStore) -> StoreKey | None:
    """Return the data key under which commits in the store describe the bytes, None if they describe plain bytes."""
    return store.key if isinstance(store, EncryptedStore) and not store.key.is_of_copy else None


def preview_pair(fleet: Fleet, place: CopyPlace) -> StorePair:
    """Open both stores, changing neither; raise the errors of `open_pair` that need no change."""
    first, second = fleet.store.open(), place.location.open()
    identity = read_identity(first, fleet)
    # An encrypted store without fleet.json may have no key document either.
    is_new = not place.location.open_raw().exists(FLEET_KEY)
    if not is_new:
        _check_identity(second, identity)
        _check_key(first, second)
    return StorePair(first, second, is_new)


def open_pair(fleet: Fleet, place: CopyPlace) -> StorePair:
    """Open both stores; initialise the second if it is empty.

    Raises NotACopyError or StoreOfAnotherFleetError if the second store is in use otherwise, StoreKeyError if its key
    does not open it, IdentityLostError if it has lost its fleet.json, and StoreUnfitError if it can't be used as a
    store.
    """
    pair = preview_pair(fleet, place)
    if not pair.is_new:
        return pair
    raw = place.location.open_raw()
    if place.encryption is None:
        check_identity_not_lost(raw)
    probe_store(raw)
    if place.encryption is not None:
        from cutline.storage.encryption.key_documents import ensure_data_key, new_data_key

        given = _key_of(pair.first) or new_data_key(is_of_copy=True)
        ensure_data_key(raw, place.encryption.read_key(), given)
        _check_key(pair.first, pair.second)
    identity = structs.replace(read_identity(pair.first, fleet), copy=True)
    create_or_find(pair.second, FLEET_KEY, seal(identity))
    return StorePair(pair.first, pair.second, is_new=False)


def _check_identity(second: ObjectStore, identity: StoreIdentity) -> None:
    """Raise StoreOfAnotherFleetError or NotACopyError unless the second store is a copy of this fleet's store."""
    found: StoreIdentity = read_sealed(second, FLEET_KEY, StoreIdentity)
    if (found.fleet_id, found.name) != (identity.fleet_id, identity.name):
        raise StoreOfAnotherFleetError(
            f"store {second.url} belongs to fleet {found.name!r} ({found.fleet_id}), not to {identity.name!r}"
            f" ({identity.fleet_id})",
            hint="use one second store per fleet: name an empty folder",
            details={"store": second.url},
        )
    if not found.is_copy:
        raise NotACopyError(
            f"store {second.url} is a store in which snapshots are taken, not a copy",
            hint="name an empty folder: --to s3://bucket/folder   (a store that other programs have copied can't be"
            " continued by this command)",
            details={"store": second.url},
        )


def _check_key(first: ObjectStore, second: ObjectStore) -> None:
    """Raise NotACopyError unless the second store's data key fits the first store."""
    if not isinstance(second, EncryptedStore):
        return
    key = _key_of(first)
    if (_key_of(second) != key) if key else not second.key.is_of_copy:
        raise NotACopyError(
            f"store {second.url} was encrypted for another first store: its data key is not that of {first.url}",
            hint="copy into an empty folder",
            details={"store": second.url},
        )
