"""A store that encrypts objects before they leave this process, and accepts them only if they decrypt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cutline.storage.digest import digest
from cutline.storage.store import Inventory, Keys, Leftovers, ObjectStore, Unfinished, check_range
from cutline.storage.stored_form import AsWritten, StoredForm, UndecryptableError

if TYPE_CHECKING:
    from cutline.storage.encryption.cipher import Cipher


@dataclass(frozen=True, slots=True, repr=False)
class StoreKey:
    """A store's data key. `is_of_copy`: the store is the encrypted copy of an unencrypted store (`own_form`)."""

    data_key: bytes
    is_of_copy: bool = False


@dataclass(frozen=True, repr=False)
class EncryptedStore:
    """An ObjectStore and a StoredForm on top of the store `raw`. Sizes refer to the plain bytes.

    `find_key` is called once, before the first object is encrypted or decrypted.
    """

    raw: ObjectStore
    find_key: Callable[[], StoreKey] = field(compare=False)

    @property
    def url(self) -> str:
        return self.raw.url

    @cached_property
    def key(self) -> StoreKey:
        """The store's data key; raises the errors of `find_key`."""
        return self.find_key()

    @cached_property
    def own_form(self) -> StoredForm:
        """The form in which commits describe the objects: encrypted, or as written in a copy of an unencrypted store.

        Raises the errors of `find_key`.
        """
        return AsWritten(self) if self.key.is_of_copy else self

    @cached_property
    def _cipher(self) -> Cipher:
        from cutline.storage.encryption.cipher import Cipher

        return Cipher(self.key.data_key)

    def encode(self, key: str, written: bytes) -> bytes:
        return self._cipher.encrypt(key, written)

    def decode(self, key: str, stored: bytes, start: int = 0) -> bytes:
        from cutline.storage.encryption.cipher import NotAuthenticError

        try:
            return self._cipher.decrypt(key, stored, start)
        except NotAuthenticError as error:
            raise UndecryptableError(url=self.url, key=key, problem=str(error)) from None

    def stored_offset(self, start: int) -> int:
        from cutline.storage.encryption.cipher import frame_offset

        return frame_offset(start)

    def stored_size(self, written_size: int) -> int:
        from cutline.storage.encryption.cipher import stored_size

        return stored_size(written_size)

    def expect_answers(self) -> None:
        self.raw.expect_answers()

    def create(self, key: str, body: bytes) -> None:
        self.raw.create(key, self.encode(key, body))

    def read(self, key: str) -> bytes:
        return self.decode(key, self.raw.read(key))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read from the first frame of the range to the end of the object, where the salt is."""
        check_range(start, length)
        first = min(start, max(self.size(key) - 1, 0))
        offset = self.stored_offset(first)
        stored = self.raw.read_range(key, offset, max(self.raw.size(key) - offset, 1))
        return self.decode(key, stored, first)[start - first : start - first + length]

    def size(self, key: str) -> int:
        from cutline.storage.encryption.cipher import plain_size

        return plain_size(self.raw.size(key))

    def digest(self, key: str) -> str:
        return digest(self.read(key))

    def exists(self, key: str) -> bool:
        return self.raw.exists(key)

    def list(self, prefix: str) -> Keys:
        return self.raw.list(prefix)

    def list_children(self, prefix: str) -> Keys:
        return self.raw.list_children(prefix)

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        from cutline.storage.encryption.cipher import plain_size

        return [replace(listed, size=plain_size(listed.size)) for listed in self.raw.inventory(prefix, after)]

    def delete(self, key: str) -> None:
        self.raw.delete(key)

    def unfinished(self) -> Leftovers:
        return self.raw.unfinished()

    def abandon(self, leftover: Unfinished) -> None:
        self.raw.abandon(leftover)
