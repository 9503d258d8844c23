"""Ask a store for the sizes of many objects."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from storage.store import ObjectMissingError, ObjectStore

ASKING_THREADS_MAX = 16


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
