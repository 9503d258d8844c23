"""LocalStore on a machine that stops before or after any of its calls to the file system."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cutline.storage.errors import SnapshotError
from cutline.storage.local import INCOMING, LocalStore
from cutline.storage.location import StoreLocation
from cutline.storage.store import (
    AnswerLostError,
    ObjectExistsError,
    StoreUnfitError,
    StoreUnreachableError,
)

KEY = "snapshots/nightly/snapshot.json"
BODY = b"the body" * 1000


class PowerCutError(BaseException):
    """The machine stopped. Not an Exception, and every later call raises it too, so nothing cleans up."""


class Machine:
    """Counts and names the calls that change the disk, and stops before or after one of them."""

    def __init__(self, stop_at: int | None = None, *, after: bool = False) -> None:
        self.calls: list[tuple[str, Path]] = []
        self.stop_at, self.after, self.stopped = stop_at, after, False

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            if self.stopped or (len(self.calls) == self.stop_at and not self.after):
                self.stopped = True
                raise PowerCutError
            folder = options.get("dst_dir_fd" if name == "link" else "dir_fd")
            self.calls.append((name, place(arguments[-1] if name == "link" else arguments[0], folder)))
            result = call(*arguments, **options)
            if self.stop_at is not None and len(self.calls) > self.stop_at:
                self.stopped = True
                raise PowerCutError
            return result

        return watched


def place(argument: Any, folder: int | None) -> Path:
    if isinstance(argument, int):
        return Path(f"/proc/self/fd/{argument}").readlink()
    return Path(argument) if folder is None else place(folder, None) / argument


@contextmanager
def running_on(machine: Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "open", "mkdir", "unlink"):
            patch.setattr(f"cutline.storage.local.os.{name}", machine.watch(name, getattr(os, name)))
        yield


def calls_of_a_create(root: Path) -> list[tuple[str, Path]]:
    machine = Machine()
    with running_on(machine):
        LocalStore(root).create(KEY, BODY)
    return machine.calls


@pytest.mark.parametrize("after", [False, True])
def test_a_create_that_dies_anywhere_leaves_a_whole_object_or_none(tmp_path: Path, *, after: bool) -> None:
    stops = len(calls_of_a_create(tmp_path / "counted"))
    assert stops > 5
    outcomes = []
    for stop_at in range(stops):
        store = LocalStore(tmp_path / f"{stop_at}" / "store")
        with running_on(Machine(stop_at, after=after)), suppress(PowerCutError):
            store.create(KEY, BODY)
        listed = store.list("")
        assert listed in ([], [KEY])
        assert store.exists(KEY) == bool(listed)
        assert store.list_children("") == (["snapshots"] if listed else [])
        if listed:
            assert store.read(KEY) == BODY
            with pytest.raises(ObjectExistsError):
                store.create(KEY, b"another")
        else:
            store.create(KEY, b"another")
            assert store.read(KEY) == b"another"
        outcomes.append(bool(listed))
    assert outcomes == sorted(outcomes)
    assert True in outcomes
    assert False in outcomes


def test_a_body_is_durable_before_its_name_and_the_name_before_the_answer(tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    calls = calls_of_a_create(root)
    linked = calls.index(("link", root / KEY))
    synced_before = [path for name, path in calls[:linked] if name == "fsync"]
    synced_after = [path for name, path in calls[linked:] if name == "fsync"]
    assert synced_before[:-1] == [root.parent, tmp_path]
    assert synced_before[-1].parent == root / INCOMING
    assert synced_after == [root / "snapshots/nightly", root / "snapshots", root]


def test_half_written_files_are_never_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("object", b"x")
    (tmp_path / INCOMING / "half").write_bytes(b"half")
    assert store.list("") == ["object"]
    assert store.list_children("") == ["object"]


def test_failed_creates_leave_nothing_behind(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("object", b"x")
    with pytest.raises(ObjectExistsError):
        store.create("object", b"y")
    with pytest.raises(StoreUnreachableError, match="not a directory"):
        store.create("object/below", b"y")
    assert list((tmp_path / INCOMING).iterdir()) == []


@pytest.mark.parametrize(
    ("call", "error", "situation"),
    [
        ("link", PermissionError(1, "Operation not permitted"), StoreUnfitError),
        ("link", OSError(5, "Input/output error"), StoreUnreachableError),
        ("fsync", OSError(28, "No space left on device"), StoreUnreachableError),
    ],
)
def test_an_error_before_the_name_means_that_nothing_was_stored(
    tmp_path: Path, call: str, error: OSError, situation: type[SnapshotError], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"cutline.storage.local.os.{call}", fail_with(error))
        with pytest.raises(situation, match=str(error.strerror).lower()):
            store.create(KEY, BODY)
    assert store.list("") == []
    assert list((tmp_path / INCOMING).iterdir()) == []


@pytest.mark.parametrize("broken", ["sync_names", "os.unlink"])
def test_an_error_after_the_name_leaves_open_whether_the_object_was_stored(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"cutline.storage.local.{broken}", fail_with(OSError(5, "Input/output error")))
        with pytest.raises(AnswerLostError, match="input/output error"):
            store.create(KEY, BODY)
    assert store.read(KEY) == BODY


def test_a_link_that_was_made_although_it_reported_an_error_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: str, **options: Any) -> None:
        os_link(source, target, **options)
        raise FileExistsError(17, "File exists")

    os_link = os.link
    monkeypatch.setattr("cutline.storage.local.os.link", link)
    store = LocalStore(tmp_path)
    store.create(KEY, BODY)
    assert store.read(KEY) == BODY


def test_an_object_that_can_not_be_examined_is_not_called_missing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    asks: list[Callable[[str], object]] = [store.exists, store.size, store.read]
    for ask in asks:
        with pytest.raises(StoreUnreachableError, match="too long"):
            ask("x" * 300)


def fail_with(error: OSError) -> Callable[..., None]:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_what_is_stored(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = LocalStore(tmp_path / "new/store")
        store.create(KEY, BODY)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in store.root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    folders = [store.root.parent, store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert store.others_may == ""


@pytest.mark.parametrize(
    ("mode", "may"), [(0o700, ""), (0o750, "read"), (0o701, "read"), (0o720, "write"), (0o777, "write")]
)
def test_a_folder_that_others_may_enter_is_said(tmp_path: Path, mode: int, may: str) -> None:
    store = LocalStore(tmp_path / "store")
    assert store.others_may == ""
    store.root.mkdir()
    store.root.chmod(mode)
    assert store.others_may == may


def test_a_create_survives_that_a_delete_removes_the_folder_that_it_has_just_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []

    def make_and_lose(name: str, mode: int, *, dir_fd: int | None = None) -> None:
        os_mkdir(name, mode, dir_fd=dir_fd)
        if name == "above" and not removed:
            removed.append(name)
            os.rmdir(name, dir_fd=dir_fd)

    store = LocalStore(tmp_path)
    store.create("other", b"x")
    os_mkdir = os.mkdir
    monkeypatch.setattr("cutline.storage.folders.os.mkdir", make_and_lose)
    store.create("above/below/object", b"y")
    assert removed == ["above"]
    assert store.read("above/below/object") == b"y"


def test_a_read_takes_no_more_memory_than_the_object(tmp_path: Path) -> None:
    """What a document says of a size may be anything."""
    store = LocalStore(tmp_path)
    store.create(KEY, BODY)
    assert store.read_range(KEY, 8, 1 << 50) == BODY[8:]
    assert store.read_range(KEY, len(BODY) + 8, 1 << 50) == b""


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    root = tmp_path / "mounted" / "store"
    LocalStore(root).create("a", b"1")
    reader = LocalStore(root)
    assert reader.read_range("a", 0, 1) == b"1"
    location = StoreLocation(f"file://{root}")
    sent: StoreLocation = pickle.loads(pickle.dumps(location))
    shutil.move(root.parent, tmp_path / "away")
    for store in (reader, sent.open()):
        with pytest.raises(StoreUnreachableError, match="its folder is gone"):
            store.create("b", b"2")
    assert not root.parent.exists()
    shutil.move(tmp_path / "away", root.parent)
    reader.create("b", b"2")
    assert LocalStore(root).list("") == ["a", "b"]


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StoreUnreachableError, match="file too large") as raised:
            store.create(KEY, BODY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "ulimit -f" in raised.value.hint
    assert store.list("") == []
