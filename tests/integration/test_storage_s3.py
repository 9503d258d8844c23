from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from storage.open import open_store
from storage.store import ObjectStore
from tests.object_store_contract import ObjectStoreContract
from tests.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, server: S3Server) -> ObjectStore:
        return open_store(server.bucket(f"test-{uuid.uuid4().hex}") + "/a/folder", server.options)
