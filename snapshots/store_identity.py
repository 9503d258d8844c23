"""fleet.json: whose store this is. Written once, by `init`."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

from fleet.config import Fleet
from snapshots.commits import read_json
from storage.errors import RefusedError
from storage.store import ObjectExistsError, ObjectMissingError, ObjectStore

FLEET_KEY = "fleet.json"
FLEET_SCHEMA = "cutline/fleet/1"


class StoreNotInitialisedError(RefusedError):
    """The store has no fleet.json yet."""


class StoreOfAnotherFleetError(RefusedError):
    """The store belongs to a fleet of another name, or to another version's format."""


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The fleet that a store belongs to; `fleet_id` also names the fleet's publications."""

    fleet_id: str
    name: str


def read_identity(store: ObjectStore, fleet: Fleet) -> StoreIdentity:
    """Whose store it is; raise StoreNotInitialisedError, StoreOfAnotherFleetError."""
    try:
        document = read_json(store, FLEET_KEY)
    except ObjectMissingError as error:
        raise StoreNotInitialisedError(
            f"store {store.url} has no fleet yet", hint="run: snapshot init", details={"store": store.url}
        ) from error
    if document.get("schema") != FLEET_SCHEMA or document.get("name") != fleet.name:
        raise StoreOfAnotherFleetError(
            f"store {store.url} belongs to fleet {document.get('name')!r}, and fleet.toml describes {fleet.name!r}",
            hint="give every fleet a store of its own, or correct name or store in fleet.toml",
            details={"store": store.url},
        )
    return StoreIdentity(str(document["fleet"]), str(document["name"]))


def ensure_identity(store: ObjectStore, fleet: Fleet) -> tuple[StoreIdentity, bool]:
    """Write fleet.json if there is none; also tell whether it was written now."""
    fleet_id = secrets.token_hex(4)
    body = {"schema": FLEET_SCHEMA, "fleet": fleet_id, "name": fleet.name, "format": 1}
    try:
        if not store.exists(FLEET_KEY):
            store.create(FLEET_KEY, json.dumps(body, indent=1).encode())
            return StoreIdentity(fleet_id, fleet.name), True
    except ObjectExistsError:
        pass
    return read_identity(store, fleet), False
