"""A stored object that is not what its commit says."""

from __future__ import annotations

from storage.errors import RefusedError


class ObjectDamagedError(RefusedError):
    """A stored object is not what its commit says. `kind` is missing, size, digest or unreadable."""

    def __init__(self, *, key: str, kind: str, node: str, detail: str) -> None:
        super().__init__(
            f"object {key} of node {node}: {detail}",
            hint="run: snapshot check   and take a new full snapshot: snapshot create NAME",
            details={"object": key, "kind": kind, "node": node},
        )
        self.kind, self.key, self.node, self.detail = kind, key, node, detail
