from __future__ import annotations

from pathlib import Path

import pytest

from cutline.storage.encryption.fleet_encryption import DataKey
from cutline.storage.local import LocalStore
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from tests.stores.contract import ObjectStoreContract


class TestLocalStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "not" / "there" / "yet")


class TestInMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return InMemoryStore("memory://test")


class TestEncryptedFolder(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return DataKey(bytes(range(32))).over(LocalStore(tmp_path / "encrypted"))


class TestEncryptedMemory(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return DataKey(bytes(range(32))).over(InMemoryStore("memory://encrypted"))
