"""fleet.json: whose store this is. Written once, by `init`."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from fleet.config import Fleet
from snapshots.chain import Chain
from snapshots.commits import commit_key
from snapshots.documents import check_schema, read_document, sealed, understood
from snapshots.value_types import check_types
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore
from storage.storing import create_or_find

FLEET_KEY = "fleet.json"
FLEET_SCHEMA = "cutline/fleet/1"
FORMAT = 1
# It names publications, too.
FLEET_ID = re.compile("[0-9a-f]{1,16}")


class StoreNotInitialisedError(RefusedError):
    """The store has no fleet.json yet."""


class StoreOfAnotherFleetError(RefusedError):
    """The store belongs to a fleet of another name."""


class ForeignSnapshotError(RefusedError):
    """The store holds a snapshot of another fleet."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The fleet that a store belongs to; `fleet_id` also names the fleet's publications."""

    fleet_id: str
    name: str


def read_identity(store: ObjectStore, fleet: Fleet) -> StoreIdentity:
    """Whose store it is; raise StoreNotInitialisedError, StoreOfAnotherFleetError, ManifestError."""
    try:
        document = read_document(store, FLEET_KEY)
    except ObjectMissingError as error:
        raise StoreNotInitialisedError(
            f"store {store.url} has no fleet yet", hint="run: snapshot init", details={"store": store.url}
        ) from error
    with understood(FLEET_KEY, "description of a store"):
        check_schema(document, FLEET_SCHEMA)
        identity = StoreIdentity(document["fleet"], document["name"])
        check_types(identity, StoreIdentity, "")
        check_types(document.get("format", FORMAT), int, "format")
        if document.get("format", FORMAT) != FORMAT or not FLEET_ID.fullmatch(identity.fleet_id):
            raise ValueError(f"format {document.get('format')!r}, fleet {identity.fleet_id!r}")
    if identity.name != fleet.name:
        raise StoreOfAnotherFleetError(
            f"store {store.url} belongs to fleet {identity.name!r}, and fleet.toml describes {fleet.name!r}",
            hint="give every fleet a store of its own, or correct name or store in fleet.toml",
            details={"store": store.url},
        )
    return identity


def check_of_fleet(chain: Chain, identity: StoreIdentity) -> None:
    """Raise ForeignSnapshotError if the snapshot is of another fleet than the store; its increments name it."""
    if chain.part.fleet_id != identity.fleet_id:
        raise foreign_snapshot(chain.name, chain.part.fleet_id, identity.fleet_id)


def foreign_snapshot(name: str, fleet_id: str, stores: str) -> ForeignSnapshotError:
    """The error for a snapshot of another fleet."""
    key = commit_key(name, 0)
    return ForeignSnapshotError(
        f"object {key} is of fleet {fleet_id}, and {FLEET_KEY} says that the store is of fleet {stores}",
        hint="somebody copied objects from another store by hand: each fleet's belong into a store of its own",
        details={"snapshot": name, "object": key, "fleet": fleet_id},
    )


def ensure_identity(store: ObjectStore, fleet: Fleet) -> tuple[StoreIdentity, bool]:
    """Write fleet.json if there is none; also tell whether it was written now."""
    fleet_id = secrets.token_hex(4)
    body = {"schema": FLEET_SCHEMA, "fleet": fleet_id, "name": fleet.name, "format": FORMAT}
    try:
        if not store.exists(FLEET_KEY):
            create_or_find(store, FLEET_KEY, sealed(body))
            return StoreIdentity(fleet_id, fleet.name), True
    except ObjectExistsError:
        pass
    return read_identity(store, fleet), False
