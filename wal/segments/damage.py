"""Stored objects that are not what their commit says, and reading that takes none of them for what it is not."""

from __future__ import annotations

from fleet.hints import NEW_CHAIN
from storage.digest import digest
from storage.errors import RefusedError
from storage.store import ObjectMissingError, ObjectStore, StoreUnreachableError


class ObjectDamagedError(RefusedError):
    """A stored object is not what its commit says. `kind` is missing, size, digest, unreadable, rows or partition."""

    def __init__(self, *, key: str, kind: str, node: str, detail: str) -> None:
        super().__init__(
            f"object {key} of node {node}: {detail}",
            hint=f"put it back from a copy of the store; or {NEW_CHAIN}   (what else is damaged: snapshot check)",
            details={"object": key, "kind": kind, "node": node},
        )
        self.kind, self.key, self.node, self.detail = kind, key, node, detail


def read_listed(store: ObjectStore, node: str, key: str, listed: tuple[int, str], start: int = 0) -> bytes:
    """The bytes of an object from `start` on, proven to be those that were committed.

    `listed` is the size of the whole object, and the digest of what is read here. Whatever is in the object's place, no
    more than that size is read. Raises ObjectDamagedError; StoreUnreachableError where answers are cut short.
    """
    size, wanted = listed
    try:
        body = store.read_range(key, start, size - start + 1)
        if len(body) != size - start:
            # One answer that was cut short says nothing of the object.
            body = store.read_range(key, start, size - start + 1)
        found = size if len(body) == size - start else store.size(key)
    except ObjectMissingError:
        raise ObjectDamagedError(key=key, kind="missing", node=node, detail="it is not in the store") from None
    if found != size:
        detail = f"it has {found} bytes instead of {size}"
        raise ObjectDamagedError(key=key, kind="size", node=node, detail=detail)
    if len(body) != size - start:
        raise StoreUnreachableError(url=store.url, reason=f"reading {key} ended after {len(body)} bytes")
    if digest(body) != wanted:
        detail = "its bytes are not those that were committed"
        raise ObjectDamagedError(key=key, kind="digest", node=node, detail=detail)
    return body
