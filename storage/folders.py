"""Files and folders of LocalStore: accessible only to their owner, and flushed to disk.

Anybody with write access to the store may replace a folder in it with a symbolic link at any time. So every path below
the root is opened folder by folder, and every operation is relative to the open folder: no link below the root is
followed. The root itself may be a link.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from cutline.storage.store import is_key

FOLDER_MODE, FILE_MODE = 0o700, 0o600
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK, opening a named pipe would wait for a writer.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class LinkedFolderError(NotADirectoryError):
    """A folder below the root is a symbolic link."""

    def __init__(self, folder: str) -> None:
        super().__init__(errno.ENOTDIR, f"{folder} is a symbolic link, which is never followed inside the store")


class NameInFolder(NamedTuple):
    """An entry of a folder: a regular file, a folder, or something else, such as a link or a pipe."""

    name: str
    is_file: bool
    is_folder: bool


def make_root(root: Path) -> None:
    """Create the store's folder and its parents if they are missing, and flush their names to disk."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    make_folder(root)
    for folder in missing:
        sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents if they are missing, for the owner only: it will contain whole databases."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


@contextmanager
def opened(root: Path, folders: Sequence[str], *, make: bool = False) -> Iterator[list[int]]:
    """Open the root, then each of `folders` inside the previous one; with `make`, create missing folders.

    Yields the descriptors, the root's first. Raises LinkedFolderError.
    """
    with ExitStack() as stack:
        descriptors = [os.open(root, OPEN_FOLDER)]
        stack.callback(os.close, descriptors[0])
        for depth, name in enumerate(folders, 1):
            above = descriptors[-1]
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, FOLDER_MODE, dir_fd=above)
            try:
                descriptor = os.open(name, OPEN_FOLDER | os.O_NOFOLLOW, dir_fd=above)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP) and is_link(name, above):
                    raise LinkedFolderError("/".join(folders[:depth])) from error
                raise
            stack.callback(os.close, descriptor)
            descriptors.append(descriptor)
        yield descriptors


def is_link(name: str, folder: int) -> bool:
    """Whether the name in the open folder is a symbolic link."""
    return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)


def status_of(root: Path, key: str) -> os.stat_result:
    """Return the status of the object's file; raise FileNotFoundError if it is not a regular file."""
    *folders, name = key.split("/")
    with opened(root, folders) as descriptors:
        return check_regular(os.stat(name, dir_fd=descriptors[-1], follow_symlinks=False), key)


def open_object(root: Path, key: str) -> int:
    """Open the object's file for reading; raise FileNotFoundError if it is not a regular file."""
    *folders, name = key.split("/")
    with opened(root, folders) as descriptors:
        try:
            descriptor = os.open(name, OPEN_FILE, dir_fd=descriptors[-1])
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a socket
                raise FileNotFoundError(errno.ENOENT, "not a regular file", key) from error
            raise
    try:
        check_regular(os.fstat(descriptor), key)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_regular(status: os.stat_result, key: str) -> os.stat_result:
    """Return the status of a regular file; raise FileNotFoundError for anything else."""
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", key)
    return status


def write_durably(name: str, body: bytes, folder: int) -> None:
    """Write a new file, readable only by its owner, in the open folder, and flush it to disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, FILE_MODE, dir_fd=folder), "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the folder's names to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(root: Path, folders: Sequence[str]) -> None:
    """Flush the names in `folders` and in the root to disk, deepest folder first; skip folders that no longer exist."""
    try:
        with opened(root, folders) as descriptors:
            for descriptor in reversed(descriptors):
                os.fsync(descriptor)
    except FileNotFoundError:
        if folders:
            sync_names(root, folders[:-1])


def remove(root: Path, key: str) -> None:
    """Delete the object's file, durably, if it exists. Raises LinkedFolderError."""
    *folders, name = key.split("/")
    with suppress(FileNotFoundError), opened(root, folders) as descriptors:
        os.unlink(name, dir_fd=descriptors[-1])
        os.fsync(descriptors[-1])


def drop_empty(root: Path, folders: Sequence[str]) -> None:
    """Remove the last of `folders` if it is empty, then its parents likewise; stop at a link or a non-empty folder."""
    if not folders:
        return
    *above, name = folders
    try:
        with opened(root, above) as descriptors:
            os.rmdir(name, dir_fd=descriptors[-1])
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return
        raise
    drop_empty(root, above)


def entries(root: Path, folder: str) -> list[NameInFolder]:
    """Return the folder's entries whose names are valid in a key; empty if it does not exist or is a link."""
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        opened(root, folder.split("/") if folder else []) as descriptors,
        os.scandir(descriptors[-1]) as listed,
    ):
        return [
            NameInFolder(entry.name, entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False))
            for entry in listed
            if is_key(entry.name)
        ]
    return []


def walk(root: Path, folder: str) -> Iterator[str]:
    """Yield the keys below `folder`, in no particular order; raise OSError for a folder that can't be read."""
    for entry in entries(root, folder):
        key = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            yield from walk(root, key)
        elif entry.is_file:
            yield key
