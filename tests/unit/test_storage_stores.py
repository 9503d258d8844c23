from __future__ import annotations

from pathlib import Path

import pytest

from storage.local import LocalStore
from storage.memory import InMemoryStore
from storage.store import ObjectStore
from tests.stores.contract import ObjectStoreContract


class TestLocalStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return LocalStore(tmp_path / "not" / "there" / "yet")


class TestInMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return InMemoryStore("memory://test")
