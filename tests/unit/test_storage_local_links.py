"""What a folder store finds below its root and did not put there: links, pipes, folders in the place of files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cutline.storage.local import INCOMING, LocalStore
from cutline.storage.store import (
    DeletionRefusedError,
    ObjectMissingError,
    StoreUnreachableError,
)
from tests.run.bounded import ended_after

KEY = "snapshots/nightly/snapshot.json"
BODY = b"the body" * 1000


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


def test_nothing_is_removed_through_a_link_in_the_place_of_the_folder_of_unfinished_objects(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not in the store")
    store = LocalStore(tmp_path / "store")
    store.root.mkdir()
    (store.root / INCOMING).mkdir()
    (store.root / INCOMING / "file").write_text("of a create that died")
    (found,) = store.unfinished()
    # It is planted after gc has listed what is to be removed.
    (store.root / INCOMING).rename(tmp_path / "real")
    (store.root / INCOMING).symlink_to(elsewhere)
    store.abandon(found)
    assert (elsewhere / "file").exists()
    assert store.unfinished() == []


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "link to a file", "link to nothing", "loop"])
def test_what_is_no_regular_file_is_no_object_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    store = LocalStore(tmp_path / "store")
    store.create("a/object", b"x")
    planted = store.root / "a/planted"
    if kind == "pipe":
        os.mkfifo(planted)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener, in_directory(planted.parent):
            listener.bind("planted")
    elif kind == "folder":
        planted.mkdir()
    else:
        (tmp_path / "outside").write_text("not in the store")
        planted.symlink_to({"link to a file": tmp_path / "outside", "loop": planted}.get(kind, "nothing"))
    asks: list[Callable[[str], object]] = [store.read, store.size, lambda key: store.read_range(key, 0, 1)]
    with ended_after(5):
        for ask in asks:
            with pytest.raises(ObjectMissingError):
                ask("a/planted")
        assert not store.exists("a/planted")
        assert store.list("") == [one.key for one in store.inventory("")] == ["a/object"]
        assert store.list_children("a") == ["object"]


@contextmanager
def in_directory(folder: Path) -> Iterator[None]:
    """Be in `folder`: the path of a socket may have only about a hundred characters."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def test_no_link_below_the_root_is_followed_but_the_root_may_be_one(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not in the store")
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to("real")
    store = LocalStore(tmp_path / "store")
    store.create(KEY, BODY)
    (tmp_path / "real/probes").symlink_to(elsewhere)
    assert store.read(KEY) == BODY
    assert store.list("") == [KEY]
    assert store.list_children("") == ["snapshots"]
    assert store.list("probes") == store.list_children("probes") == []
    with pytest.raises(ObjectMissingError):
        store.read("probes/file")
    with pytest.raises(StoreUnreachableError, match="probes is a symbolic link"):
        store.create("probes/a/object", BODY)
    store.delete(KEY)
    assert not (tmp_path / "real/snapshots").exists()
    assert [path.name for path in elsewhere.iterdir()] == ["file"]


@pytest.mark.parametrize("way", ["delete", "abandon"])
def test_nothing_is_removed_through_a_link_that_replaces_a_folder_meanwhile(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("not in the store")
    store = LocalStore(tmp_path / "store")
    store.create("a/file", b"x")
    folder = store.root / ("a" if way == "delete" else INCOMING)
    (folder / "file").touch()
    leftovers = store.unfinished()

    def swap_and_unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if not folder.is_symlink():
            folder.rename(tmp_path / "moved")
            folder.symlink_to(elsewhere)
        os_unlink(path, dir_fd=dir_fd)

    os_unlink = os.unlink
    monkeypatch.setattr("cutline.storage.local.os.unlink", swap_and_unlink)
    if way == "delete":
        store.delete("a/file")
    else:
        store.abandon(leftovers[0])
    assert (elsewhere / "file").exists()
    assert not (tmp_path / "moved/file").exists()


def test_a_folder_among_the_unfinished_objects_is_left_and_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    (tmp_path / INCOMING / "evil").mkdir(parents=True)
    (found,) = store.unfinished()
    assert found.key == f"{INCOMING}/evil"
    store.abandon(found)
    assert (tmp_path / INCOMING / "evil").is_dir()


def test_a_file_name_that_is_not_utf_8_is_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("a/object", b"x")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/a/\xff")).touch()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).touch()
    assert store.list("") == ["a/object"]
    assert store.list_children("") == ["a"]
    with pytest.raises(ValueError, match="not a valid object key"):
        store.read("a/\udcff")
