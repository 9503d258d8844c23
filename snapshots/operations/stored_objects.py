"""Before a commit, ask the store for every object that it lists: executors stored them, perhaps somewhere else.

An executor on another machine that has the store's folder on a disk of its own stores everything there, and reports
that it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from cutline.fleet.some_names import list_some
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectMissingError, ObjectStore

NAMED_MAX = 3
ASKING_THREADS_MAX = 16
# A listing has up to 1,000 keys in a request, but may be of more keys than those that are asked for.
LISTED_MIN = 50


class ObjectsNotStoredError(RefusedError):
    """The store lacks objects that were reported as stored; nothing was committed."""


def check_stored(store: ObjectStore, sizes: Mapping[str, int]) -> None:
    """Raise ObjectsNotStoredError unless the store has all these objects, by key, in these sizes (bytes)."""
    found = listed_sizes(store, sizes)
    # A listing may be out of date.
    unsure = [key for key, size in sizes.items() if found.get(key) != size]
    asked = sizes_of(store, unsure)
    lacking = [key for key in unsure if asked[key] is None]
    others = [key for key in unsure if asked[key] not in (None, sizes[key])]
    if not lacking and not others:
        return
    whats = [f"lacks {list_some(lacking, NAMED_MAX)}"] if lacking else []
    whats += [f"has another size of {list_some(others, NAMED_MAX)}"] if others else []
    raise ObjectsNotStoredError(
        f"store {store.url} {' and '.join(whats)}, of {len(sizes)} objects that were reported as stored: nothing is"
        " committed",
        hint="executors on other machines need the same store: s3://, or a folder that all machines share under one"
        " path; then repeat the command",
        details={"store": store.url, "missing": len(lacking), "other_size": len(others), "objects": len(sizes)},
    )


def listed_sizes(store: ObjectStore, keys: Iterable[str]) -> dict[str, int]:
    """The sizes in bytes of the objects in folders of which many keys are asked for, from listings."""
    folders: dict[str, int] = {}
    for key in keys:
        folder = key.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + 1
    wanted = [folder for folder, count in folders.items() if count >= LISTED_MIN]
    return {one.key: one.size for folder in wanted for one in store.inventory(folder)}


def sizes_of(store: ObjectStore, keys: Iterable[str]) -> dict[str, int | None]:
    """The size in bytes of each object, by key; None if there is none. One request for each, several at a time."""

    def ask(key: str) -> int | None:
        try:
            return store.size(key)
        except ObjectMissingError:
            return None

    keys = list(keys)
    with ThreadPoolExecutor(ASKING_THREADS_MAX) as threads:
        return dict(zip(keys, threads.map(ask, keys), strict=True))
