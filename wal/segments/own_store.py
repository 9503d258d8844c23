"""Check that a store is still the fleet's: if its file system was unmounted, a different store may be in its place."""

from __future__ import annotations

import json

from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectMissingError, ObjectStore

FLEET_KEY = "fleet.json"
FLEET_BYTES_MAX = 1 << 16
HINT = "put the store back, or mount its file system; then repeat the command"


class StoreGoneError(RefusedError):
    """The store that this command started with is no longer there."""


def check_own_store(store: ObjectStore, fleet_id: str) -> None:
    """Raise StoreGoneError unless the store's fleet.json contains this id; nothing else in it is checked."""
    try:
        body = store.read_range(FLEET_KEY, 0, FLEET_BYTES_MAX)
    except ObjectMissingError as error:
        raise store_gone_error(store, None, HINT) from error
    found = _id_in(body)
    if found != fleet_id:
        raise store_gone_error(store, found, HINT)


def store_gone_error(store: ObjectStore, found: str | None, hint: str) -> StoreGoneError:
    """Return the error for a store that is gone.

    `found` is the fleet whose store is now at that location; None if nothing is there.
    """
    place = "nothing is there now" if found is None else f"a store of fleet {found} is there now"
    return StoreGoneError(
        f"the store that was at {store.url} is gone: {place}", hint=hint, details={"store": store.url}
    )


def _id_in(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return "?"
    return str(content.get("fleet", "?"))[:16] if isinstance(content, dict) else "?"
