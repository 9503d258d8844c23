"""The digest by which an object's content is named in a commit."""

from __future__ import annotations

import hashlib


def digest(body: bytes) -> str:
    """Return the SHA-256 of `body` as 64 lower case hex digits."""
    return hashlib.sha256(body).hexdigest()
