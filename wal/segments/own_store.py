"""Check that a store is still the fleet's: if its file system was unmounted, a different store may be in its place."""

from __future__ import annotations

import json

from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectMissingError, ObjectStore

FLEET_KEY, FOLDER_URL = "fleet.json", "file://"
FLEET_BYTES_MAX = 1 << 16
AGAIN = "then repeat the command"
SNAPSHOTS = "snapshots"


class StoreGoneError(RefusedError):
    """The store that this command started with is no longer there, or has lost its fleet.json."""


def check_own_store(store: ObjectStore, fleet_id: str) -> None:
    """Raise StoreGoneError unless the store's fleet.json contains this id; nothing else in it is checked."""
    try:
        body = store.read_range(FLEET_KEY, 0, FLEET_BYTES_MAX)
    except ObjectMissingError as error:
        if find_commits(store, 1):
            raise StoreGoneError(
                f"object {FLEET_KEY} was removed from store {store.url}, which still contains snapshots",
                hint=f"put it back from a copy of the store, or restore its last version; {AGAIN}",
                details={"store": store.url, "object": FLEET_KEY},
            ) from error
        raise store_gone_error(store, None, AGAIN) from error
    found = _id_in(body)
    if found != fleet_id:
        raise store_gone_error(store, found, AGAIN)


def find_commits(store: ObjectStore, most: int) -> list[str]:
    """Return the names of some snapshots that exist.

    Other objects prove nothing: a command that lost the store may have stored them in the folder where it was mounted.
    """
    found: list[str] = []
    for name in store.list_children(SNAPSHOTS):
        if len(found) < most and store.exists(f"{SNAPSHOTS}/{name}/snapshot.json"):
            found.append(name)
    return found


def store_gone_error(store: ObjectStore, found: str | None, then: str) -> StoreGoneError:
    """Return the error for a store that is gone; `then` is what to do once it is back.

    `found` is the fleet whose store is now at that location; None if nothing is there.
    """
    place = "nothing is there now" if found is None else f"a store of fleet {found} is there now"
    # Only a folder can be on a file system that was unmounted.
    mount = ", or mount its file system" if store.url.startswith(FOLDER_URL) else ""
    return StoreGoneError(
        f"the store that was at {store.url} is gone: {place}",
        hint=f"put the store back{mount}; {then}",
        details={"store": store.url},
    )


def _id_in(body: bytes) -> str:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return "?"
    return str(content.get("fleet", "?"))[:16] if isinstance(content, dict) else "?"
