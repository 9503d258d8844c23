"""A location's encryption: from fleet.toml's `[encryption]` table or, in a task's process, from the data key itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from cutline.storage.encryption.encrypted_store import EncryptedStore, StoreKey
from cutline.storage.encryption.key_source import KeySource
from cutline.storage.store import ObjectStore

if TYPE_CHECKING:
    from cutline.storage.encryption.key_documents import EncryptionKey


class FleetEncryption(Struct, frozen=True):
    """The source of the fleet's encryption key. Key documents authenticate the fleet's name, too."""

    source: KeySource
    fleet: str

    def read_key(self) -> EncryptionKey:
        """Read the encryption key; raise EncryptionKeyError or KeyCommandError."""
        from cutline.storage.encryption.key_documents import EncryptionKey

        return EncryptionKey(self.source.read(), self.fleet)

    def over(self, raw: ObjectStore) -> EncryptedStore:
        def find() -> StoreKey:
            from cutline.storage.encryption.key_documents import find_data_key

            return find_data_key(raw, self.read_key())

        return EncryptedStore(raw, find)

    def for_tasks(self, opened: EncryptedStore) -> DataKey:
        return DataKey(opened.key.data_key, opened.key.is_of_copy)


@dataclass(frozen=True, slots=True, repr=False)
class DataKey:
    """A store's data key, as sent to tasks: they need neither the encryption key nor the key documents."""

    data_key: bytes
    is_of_copy: bool = False

    def over(self, raw: ObjectStore) -> EncryptedStore:
        return EncryptedStore(raw, lambda: StoreKey(self.data_key, self.is_of_copy))

    def for_tasks(self, opened: EncryptedStore) -> DataKey:  # noqa: ARG002  # required by StoreEncryption
        return self
