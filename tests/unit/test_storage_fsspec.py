"""Stores that fsspec knows and Cutline does not: what the generic way promises, and which it refuses."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from storage.fsspec_store import FsspecStore, PlainDialect
from storage.open import open_store
from storage.probe import probe_store
from storage.store import (
    AnswerLostError,
    ObjectExistsError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
    WritingRefusedError,
)
from tests.object_store_contract import ObjectStoreContract


def plain(filesystem: Any) -> FsspecStore:
    root = f"/{uuid.uuid4().hex}"
    return FsspecStore(f"other:/{root}", root, filesystem, PlainDialect())


class TestFsspecStoreInMemory(ObjectStoreContract):
    """fsspec's own file system in memory, which creates exclusively."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        return plain(MemoryFileSystem(skip_instance_cache=True))


class Raising(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """It fails to create in a way of the test's choice, before anything is stored or after."""

    def __init__(self, error: Exception, *, stores: bool = False) -> None:
        super().__init__(skip_instance_cache=True)
        self.error, self.stores = error, stores

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if self.stores:
            super().pipe_file(path, value, mode, **options)
        raise self.error


class Folders(MemoryFileSystem):  # type: ignore[misc]
    """Its folders are real: nothing is created in one that was not made."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if not self.isdir(self._parent(path)):
            raise FileNotFoundError(path)
        super().pipe_file(path, value, mode, **options)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (FileExistsError("SECRET"), ObjectExistsError),
        (PermissionError("SECRET"), WritingRefusedError),
        (ConnectionRefusedError("SECRET"), StoreUnreachableError),
        (NotImplementedError("SECRET"), StoreUnfitError),
        (TypeError("SECRET"), StoreUnfitError),
        (TimeoutError("SECRET"), AnswerLostError),
        (OSError(5, "SECRET"), AnswerLostError),
        (RuntimeError("SECRET"), AnswerLostError),
    ],
)
def test_only_what_is_certain_is_said_of_a_create_that_failed(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised) as seen:
        plain(Raising(error)).create("a/object", b"x")
    assert "SECRET" not in str(seen.value)


def test_a_create_whose_answer_was_lost_may_have_stored() -> None:
    store = plain(Raising(TimeoutError(), stores=True))
    with pytest.raises(AnswerLostError):
        store.create("object", b"x")
    assert store.read("object") == b"x"


def test_folders_are_made_where_they_have_to_be() -> None:
    store = plain(Folders(skip_instance_cache=True))
    store.create("a/b/object", b"x")
    with pytest.raises(ObjectExistsError):
        store.create("a/b/object", b"y")
    assert store.list("") == ["a/b/object"]


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: open_store(f"dir::file://{folder}", {"file": {"auto_mkdir": True}}),
        lambda folder: plain(LocalFileSystem(auto_mkdir=True)),
        lambda folder: plain(DirFileSystem(str(folder), LocalFileSystem(auto_mkdir=True))),
    ],
)
def test_a_file_system_that_looks_first_and_then_writes_is_refused(
    made: Callable[[Path], ObjectStore], tmp_path: Path
) -> None:
    with pytest.raises(StoreUnfitError, match="checks whether the object exists and then writes") as raised:
        probe_store(made(tmp_path))
    assert raised.value.exit_code == 3
    assert not list(tmp_path.rglob("*"))


def test_one_that_creates_exclusively_passes_the_probe_and_is_left_empty() -> None:
    store = plain(MemoryFileSystem(skip_instance_cache=True))
    assert probe_store(store) is None
    assert store.list("") == []
    assert store.unfinished() == []
