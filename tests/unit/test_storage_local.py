"""LocalStore on a machine that stops before or after any of its calls to the file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from storage.errors import SnapshotError
from storage.local import INCOMING, LocalStore
from storage.store import (
    AnswerLostError,
    DeletionRefusedError,
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
            self.calls.append((name, place(arguments[-1] if name == "link" else arguments[0])))
            result = call(*arguments, **options)
            if self.stop_at is not None and len(self.calls) > self.stop_at:
                self.stopped = True
                raise PowerCutError
            return result

        return watched


def place(argument: Any) -> Path:
    return Path(Path(f"/proc/self/fd/{argument}").readlink() if isinstance(argument, int) else argument)


@contextmanager
def running_on(machine: Machine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "link", "open"):
            patch.setattr(f"storage.local.os.{name}", machine.watch(name, getattr(os, name)))
        for name in ("mkdir", "unlink"):
            patch.setattr(Path, name, machine.watch(name, getattr(Path, name)))
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
    with pytest.raises(StoreUnreachableError, match="file exists"):
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
        patch.setattr(f"storage.local.os.{call}", fail_with(error))
        with pytest.raises(situation, match=str(error.strerror).lower()):
            store.create(KEY, BODY)
    assert store.list("") == []
    assert list((tmp_path / INCOMING).iterdir()) == []


@pytest.mark.parametrize("broken", ["sync_folder", "Path.unlink"])
def test_an_error_after_the_name_leaves_open_whether_the_object_was_stored(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(f"storage.local.{broken}", fail_with(OSError(5, "Input/output error")))
        with pytest.raises(AnswerLostError, match="input/output error"):
            store.create(KEY, BODY)
    assert store.read(KEY) == BODY


def test_a_link_that_was_made_although_it_reported_an_error_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        os_link(source, target)
        raise FileExistsError(17, "File exists")

    os_link = os.link
    monkeypatch.setattr("storage.local.os.link", link)
    store = LocalStore(tmp_path)
    store.create(KEY, BODY)
    assert store.read(KEY) == BODY


def test_an_object_that_can_not_be_examined_is_not_called_missing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    asks: list[Callable[[str], object]] = [store.exists, store.size, store.read]
    for ask in asks:
        for key in ("loop", "x" * 300):
            with pytest.raises(StoreUnreachableError):
                ask(key)


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


def test_nothing_is_deleted_through_a_symbolic_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not in the store")
    store = LocalStore(tmp_path / "store")
    store.create(KEY, BODY)
    (store.root / "snapshots/x").symlink_to(elsewhere)
    with pytest.raises(DeletionRefusedError, match="snapshots/x is a symbolic link"):
        store.delete("snapshots/x/file")
    assert (elsewhere / "file").exists()
    # A link in an object's place is deleted itself.
    (store.root / "snapshots/y").symlink_to(elsewhere / "file")
    store.delete("snapshots/y")
    assert (elsewhere / "file").exists()
    assert not (store.root / "snapshots/y").is_symlink()
