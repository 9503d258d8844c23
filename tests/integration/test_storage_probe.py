from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cutline.storage.open import open_store
from cutline.storage.probe import probe_store
from cutline.storage.store import StoreUnfitError, StoreUnreachableError
from tests.s3.server import S3Server, overwriting_s3_server


@pytest.fixture(scope="module")
def overwriting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("rclone")
    (directory / "bucket").mkdir()
    with overwriting_s3_server(directory) as running:
        yield running


def test_a_server_that_overwrites_is_refused_and_left_clean(overwriting: S3Server) -> None:
    store = open_store("s3://bucket/folder", overwriting.options)
    with pytest.raises(StoreUnfitError, match="second conditional put was accepted") as raised:
        probe_store(store)
    assert raised.value.exit_code == 3
    assert "conditional puts" in raised.value.hint
    assert store.list("") == []


def test_a_server_that_refuses_the_credentials_is_unreachable(overwriting: S3Server) -> None:
    store = open_store("s3://bucket", overwriting.options | {"secret": "a-wrong-secret"})
    with pytest.raises(StoreUnreachableError, match="403") as raised:
        probe_store(store)
    assert "a-wrong-secret" not in f"{raised.value.message} {raised.value.hint} {raised.value.details}"


def test_a_folder_that_can_not_be_created_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnreachableError, match="not a directory"):
        probe_store(open_store(f"file://{tmp_path}/file/store", {}))
