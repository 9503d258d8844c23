"""The digest of an object's content, as stored in commits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutline.storage.store import ObjectStore

PIECE_BYTES = 8 * 2**20


def digest(body: bytes) -> str:
    """Return the SHA-256 of `body` as 64 lowercase hex digits."""
    return hashlib.sha256(body).hexdigest()


def digest_of(pieces: Iterator[bytes]) -> str:
    """Return the SHA-256 of a body that arrives in pieces, as `digest` does."""
    hashed = hashlib.sha256()
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def read_pieces(store: ObjectStore, key: str) -> Iterator[bytes]:
    """Yield an object's bytes in ranges of PIECE_BYTES; raise ObjectMissingError."""
    size = store.size(key)
    for start in range(0, size, PIECE_BYTES):
        yield store.read_range(key, start, PIECE_BYTES)
