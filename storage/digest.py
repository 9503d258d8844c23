"""The digest by which an object's content is named in a commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.store import ObjectStore

PIECE_BYTES = 8 * 2**20


def digest(body: bytes) -> str:
    """Return the SHA-256 of `body` as 64 lower case hex digits."""
    return hashlib.sha256(body).hexdigest()


def digest_of(pieces: Iterator[bytes]) -> str:
    """Return the same of a body that comes in pieces."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def pieces_of(store: ObjectStore, key: str) -> Iterator[bytes]:
    """Yield an object's bytes by ranges of PIECE_BYTES; raises ObjectMissingError."""
    size = store.size(key)
    for start in range(0, size, PIECE_BYTES):
        yield store.read_range(key, start, PIECE_BYTES)
