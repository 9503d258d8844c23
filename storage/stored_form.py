"""The form in which a store keeps objects: as written, or encrypted (storage/encryption)."""

from __future__ import annotations

from typing import Protocol, cast

from msgspec import Struct

from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore

# The last bytes of every encrypted object. No JSON document and no Parquet file ends with them.
ENCRYPTED_END = b"cutline\x01"


class StoredForm(Protocol):
    """The form in which a store keeps objects.

    `written` are the bytes passed to ObjectStore.create; `stored` are the resulting bytes in `raw`. Commits contain the
    digests of the stored bytes, which anybody can verify. The encrypted copy of an unencrypted store is an exception:
    its commits are those of the first store, so its form is AsWritten, and `raw` is the store that decrypts.
    """

    @property
    def raw(self) -> ObjectStore:
        """The underlying store, which contains the stored bytes."""
        ...

    def encode(self, key: str, written: bytes) -> bytes:
        """Return the stored bytes; equal arguments give equal bytes."""
        ...

    def decode(self, key: str, stored: bytes, start: int = 0) -> bytes:
        """Return the written bytes from `start` on; `stored` begins at `stored_offset(start)` and ends with the object.

        Raises UndecryptableError.
        """
        ...

    def stored_offset(self, start: int) -> int:
        """Return the offset of the first stored byte that is needed to read from `start` on."""
        ...

    def stored_size(self, written_size: int) -> int:
        """Return the number of stored bytes in an object of `written_size` bytes."""
        ...


class AsWritten(Struct, frozen=True):
    """The StoredForm of a store that keeps objects as written."""

    raw: ObjectStore

    def encode(self, key: str, written: bytes) -> bytes:  # noqa: ARG002  # required by StoredForm
        return written

    def decode(self, key: str, stored: bytes, start: int = 0) -> bytes:  # noqa: ARG002  # required by StoredForm
        return stored

    def stored_offset(self, start: int) -> int:
        return start

    def stored_size(self, written_size: int) -> int:
        return written_size


def stored_form(store: ObjectStore) -> StoredForm:
    """Return the form in which `store` keeps objects."""
    # An isinstance check against a Protocol takes longer than reading a small object from memory.
    own = getattr(store, "own_form", None)
    return AsWritten(store) if own is None else cast("StoredForm", own)


class UndecryptableError(RefusedError):
    """An object was not encrypted with this fleet's key for this place."""

    def __init__(self, *, url: str, key: str, problem: str) -> None:
        super().__init__(
            f"store {url}: object {key} {problem}",
            hint="put it back from a copy of the store: it is damaged, or was written by someone without the key",
            details={"store": url, "object": key},
        )
