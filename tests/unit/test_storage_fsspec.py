"""Stores that fsspec knows and Cutline does not: what the generic store promises, and which ones it refuses."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from cutline.storage.fsspec_store import FsspecStore, explain
from cutline.storage.open import open_store
from cutline.storage.probe import probe_store
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    ObjectExistsError,
    ObjectStore,
    StoreUnfitError,
    StoreUnreachableError,
    WritingRefusedError,
)
from tests.stores.contract import ObjectStoreContract


def plain_store(filesystem: Any) -> FsspecStore:
    root = f"/{uuid.uuid4().hex}"
    return FsspecStore(f"other:/{root}", root, filesystem)


class TestFsspecStoreInMemory(ObjectStoreContract):
    """fsspec's own file system in memory, which creates exclusively."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        return plain_store(MemoryFileSystem(skip_instance_cache=True))


class Raising(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A file system whose creates raise the test's error, before anything is stored or after."""

    def __init__(self, error: Exception, *, stores: bool = False) -> None:
        super().__init__(skip_instance_cache=True)
        self.error, self.stores = error, stores

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        if self.stores:
            super().pipe_file(path, value, mode, **options)
        raise self.error


class Answering(MemoryFileSystem):  # type: ignore[misc]
    """A file system whose server refuses reads and deletions, and that finds a list of an object, as adlfs does."""

    cachable = False  # two errors may look the same

    def __init__(self, error: Exception) -> None:
        super().__init__(skip_instance_cache=True)
        self.error = error

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        raise self.error

    def rm_file(self, path: str) -> None:
        raise self.error

    def find(self, path: str, **_: Any) -> Any:
        return [path]


class AzureRefusal(Exception):  # noqa: N818  # as Azure's library names the status
    def __init__(self, status_code: int) -> None:
        super().__init__("SECRET")
        self.status_code = status_code


class GoogleRefusal(Exception):  # noqa: N818  # as gcsfs names it
    def __init__(self, code: int) -> None:
        super().__init__("SECRET")
        self.code = code


class Folders(MemoryFileSystem):  # type: ignore[misc]
    """A file system with real folders: nothing can be created in a folder that does not exist."""

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
def test_a_failed_create_reports_only_what_is_certain(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised) as seen:
        plain_store(Raising(error)).create("a/object", b"x")
    assert "SECRET" not in str(seen.value)


def test_a_create_whose_answer_was_lost_may_have_stored_the_object() -> None:
    store = plain_store(Raising(TimeoutError(), stores=True))
    with pytest.raises(AnswerLostError):
        store.create("object", b"x")
    assert store.read("object") == b"x"


def test_missing_folders_are_created() -> None:
    store = plain_store(Folders(skip_instance_cache=True))
    store.create("a/b/object", b"x")
    with pytest.raises(ObjectExistsError):
        store.create("a/b/object", b"y")
    assert store.list("") == ["a/b/object"]


@pytest.mark.parametrize("refusal", [AzureRefusal, GoogleRefusal])
def test_a_range_beyond_the_end_is_empty_whichever_way_the_file_system_says_so(refusal: type[Exception]) -> None:
    assert plain_store(Answering(refusal(416))).read_range("object", 5, 1) == b""
    with pytest.raises(StoreUnreachableError, match="Refusal, HTTP status 400") as raised:
        plain_store(Answering(refusal(400))).read_range("object", 5, 1)
    assert "SECRET" not in str(raised.value)


@pytest.mark.parametrize(
    "error", [AzureRefusal(403), OSError("Forbidden: b/o/object\nSECRET"), PermissionError("SECRET")]
)
def test_a_forbidden_deletion_is_refused(error: Exception) -> None:
    with pytest.raises(DeletionRefusedError, match="can't be deleted") as raised:
        plain_store(Answering(error)).delete("object")
    assert "SECRET" not in str(raised.value)
    with pytest.raises(StoreUnreachableError):
        plain_store(Answering(OSError("SECRET"))).delete("object")


def test_an_object_named_as_a_folder_is_not_listed_in_it() -> None:
    store = plain_store(Answering(OSError()))
    assert store.list("object") == store.inventory("object") == []


@pytest.mark.parametrize(
    "made",
    [
        lambda folder: open_store(f"dir::file://{folder}", {"file": {"auto_mkdir": True}}),
        lambda folder: plain_store(LocalFileSystem(auto_mkdir=True)),
        lambda folder: plain_store(DirFileSystem(str(folder), LocalFileSystem(auto_mkdir=True))),
    ],
)
def test_a_file_system_that_checks_first_and_then_writes_is_refused(
    made: Callable[[Path], ObjectStore], tmp_path: Path
) -> None:
    with pytest.raises(StoreUnfitError, match="checks whether the object exists and then writes") as raised:
        probe_store(made(tmp_path))
    assert raised.value.exit_code == 3
    assert not list(tmp_path.rglob("*"))


@pytest.fixture
def seldom_switching() -> Iterator[None]:
    """Threads that hardly ever interrupt each other: fsspec's file system in memory looks first and then writes."""
    seconds = sys.getswitchinterval()
    sys.setswitchinterval(1)
    yield
    sys.setswitchinterval(seconds)


@pytest.mark.usefixtures("seldom_switching")
def test_a_file_system_that_creates_exclusively_passes_the_probe_and_is_left_empty() -> None:
    store = plain_store(MemoryFileSystem(skip_instance_cache=True))
    assert probe_store(store) is None
    assert store.list("") == []
    assert store.unfinished() == []


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, "fewer requests"),
        (503, "fewer requests"),
        (500, "the store's log"),
        (403, "credentials"),
        (400, "check store"),
    ],
)
def test_the_hint_fits_what_the_server_answered(status: int, words: str) -> None:
    hint = explain(AzureRefusal(status)).unreachable("gs://bucket").hint
    assert words in hint
    assert ("credentials" in hint) == (status == 403)
