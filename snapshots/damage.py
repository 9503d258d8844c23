"""A stored object that is not what its commit says."""

from __future__ import annotations

from fleet.hints import NEW_CHAIN
from storage.errors import RefusedError


class ObjectDamagedError(RefusedError):
    """A stored object is not what its commit says. `kind` is missing, size, digest or unreadable."""

    def __init__(self, *, key: str, kind: str, node: str, detail: str) -> None:
        super().__init__(
            f"object {key} of node {node}: {detail}",
            hint=f"put it back from a copy of the store; or {NEW_CHAIN}   (what else is damaged: snapshot check)",
            details={"object": key, "kind": kind, "node": node},
        )
        self.kind, self.key, self.node, self.detail = kind, key, node, detail
