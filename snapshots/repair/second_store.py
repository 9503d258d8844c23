"""Another store that has the same objects, such as a copy of the bucket: read only, and trusted only by digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec import Struct, structs

from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.records.commit import BASE, LARGE_OBJECTS, ObjectList, StoredObject
from cutline.snapshots.records.documents import base_prefix, ddl_prefix, list_prefix
from cutline.snapshots.records.store_identity import FLEET_KEY
from cutline.storage.digest import digest
from cutline.storage.errors import RefusedError, UsageError
from cutline.storage.location import StoreLocation, with_environment
from cutline.storage.store import ObjectStore
from cutline.storage.stored_form import AsWritten, stored_form
from cutline.storage.storing import create_or_find
from cutline.wal.segments.archive import Segment, archive_prefix, segment_key
from cutline.wal.segments.damage import read_listed

FLEET_FILE = ".toml"


class NoSecondStoreError(RefusedError):
    """There is no store at the place that was given for a second one."""


class SecondStore(Struct, frozen=True):
    """The other store: its objects must have the bytes that commits of the fleet's store list.

    Objects are decrypted only if the other store is the encrypted copy of an unencrypted store.
    """

    raw: ObjectStore

    @classmethod
    def of(cls, fleet: Fleet, place: str) -> SecondStore:
        """Open the store at the URL `place`, or that of another fleet file.

        A URL gets the options of the fleet's own store if both have the same kind of URL. A path may be relative to the
        working directory. Raises UsageError if it is the fleet's own store, and NoSecondStoreError if there is no
        store.
        """
        location = _locate(fleet, place)
        raw = location.open_raw()
        # A folder may be given by its path.
        if raw.url.rstrip("/") == fleet.store.open_raw().url.rstrip("/") and location.options == fleet.store.options:
            raise UsageError(
                f"--from names the fleet's own store, {location}", hint="name a copy of it: --from s3://bucket/folder"
            )
        if not raw.exists(FLEET_KEY):
            raise NoSecondStoreError(
                f"there is no store at {location}: it has no {FLEET_KEY}",
                hint=f"name the folder of a copy that contains {FLEET_KEY}: --from s3://bucket/folder",
            )
        if location.encryption is not None and isinstance(stored_form(fleet.store.open()), AsWritten):
            return cls(stored_form(location.open()).raw)
        return cls(raw)

    @property
    def url(self) -> str:
        """The store's URL, without secrets."""
        return self.raw.url

    def read(self, own: ObjectStore, entry: StoredObject | ObjectList | Segment) -> bytes:
        """Return the stored bytes of an object that a commit in the store `own` lists.

        Raises ObjectDamagedError unless this store has exactly the bytes that were committed.
        """
        size = stored_form(own).stored_size(entry.size)
        return read_listed(self.raw, entry.node, entry.key, (size, entry.digest))


def _locate(fleet: Fleet, place: str) -> StoreLocation:
    if place.endswith(FLEET_FILE):
        return load_fleet(Path(place)).store
    place = place if "://" in place else str(Path(place).absolute())
    is_same_kind = place.partition("://")[0] == fleet.store.url.partition("://")[0]
    return StoreLocation(place, with_environment(place, fleet.store.options if is_same_kind else {}))


def store_again(
    store: ObjectStore, snapshot: str, operation: str, entry: StoredObject | ObjectList | Segment, stored: bytes
) -> StoredObject | ObjectList | Segment:
    """Store the content of an object under a new key, which belongs to `operation`; return the entry of the new object.

    `stored` are the bytes that the commit lists. In an encrypted store the new object has other bytes, because
    encryption binds them to the key.
    """
    form, key = stored_form(store), new_key(snapshot, operation, entry)
    body = form.decode(entry.key, stored)
    encoded = form.encode(key, body)
    create_or_find(form.raw, key, encoded)
    new = structs.replace(entry, key=key, digest=digest(encoded))
    if isinstance(new, Segment) and new.events_at is not None:
        tail = memoryview(encoded)[form.stored_offset(new.events_at) :]
        new = structs.replace(new, events_digest=hashlib.sha256(tail).hexdigest())
    return new


def new_key(snapshot: str, operation: str, entry: StoredObject | ObjectList | Segment) -> str:
    """Return the key under which `operation` stores the object again."""
    if isinstance(entry, Segment):
        return segment_key(archive_prefix(snapshot, entry.node, operation), entry.number)
    name = entry.key.rpartition("/")[2]
    if isinstance(entry, ObjectList):
        return f"{list_prefix(snapshot, entry.node, operation)}/{name}"
    prefix = base_prefix if entry.kind in (BASE, LARGE_OBJECTS) else ddl_prefix
    return f"{prefix(snapshot, entry.node, operation)}/{name}"
