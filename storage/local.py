"""An object store in a folder, local or on a file system that machines share.

An object is written to a hidden file, flushed to disk, and then linked to its name. link(2) fails if the name is taken;
that is the conditional put. A create that dies leaves at most a hidden file, which blocks nothing. Never import fsspec
here: `list` and `show` on a folder must answer at once.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from storage.digest import digest_of, read_pieces
from storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    Inventory,
    Keys,
    Leftovers,
    Listed,
    ObjectExistsError,
    ObjectMissingError,
    StoreUnfitError,
    StoreUnreachableError,
    Unfinished,
    WritingRefusedError,
    check_key,
    check_prefix,
    check_range,
)

# Inside the store, because a hard link can't cross file systems. No key begins with a dot.
INCOMING = ".incoming"
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS}
LINK_ATTEMPTS_MAX = 100
FOLDER_MODE, FILE_MODE = 0o700, 0o600


@dataclass(frozen=True, slots=True)
class LocalStore:
    """An ObjectStore in the folder `root`, which the first create makes. A missing folder is an empty store."""

    root: Path

    @property
    def url(self) -> str:
        """See ObjectStore."""
        return f"file://{self.root}"

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore."""
        target = self.root / check_key(key)
        incoming = self.root / INCOMING / uuid.uuid4().hex
        with self._translate_errors(), self._translate_refused_writes():
            make_root(self.root)
            make_folder(incoming.parent)
            try:
                write_durably(incoming, body)
                self._link(incoming, target, key)
            except BaseException:
                with suppress(OSError):  # the first error matters more than a leftover hidden file
                    incoming.unlink(missing_ok=True)
                raise
        # The object exists from here on, so no error below may claim that it was not stored.
        try:
            incoming.unlink(missing_ok=True)
            self._keep_name(target)
        except OSError as error:
            raise AnswerLostError(url=self.url, key=key, reason=reason_of(error)) from error

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._translate_errors(key):
            return (self.root / check_key(key)).read_bytes()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See ObjectStore."""
        check_range(start, length)
        with self._translate_errors(key), (self.root / check_key(key)).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        """See ObjectStore."""
        path = self.root / check_key(key)
        with self._translate_errors(key):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissingError(url=self.url, key=key)
        return status.st_size

    def digest(self, key: str) -> str:
        """See ObjectStore."""
        return digest_of(read_pieces(self, key))

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        try:
            self.size(key)
        except ObjectMissingError:
            return False
        return True

    def list(self, prefix: str) -> Keys:
        """See ObjectStore."""
        with self._translate_errors():
            return sorted(walk(self.root, check_prefix(prefix)))

    def list_children(self, prefix: str) -> Keys:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        with self._translate_errors():
            # A folder may be empty: until its creator links the object, or for good if the creator died.
            return sorted(
                entry.name
                for entry in entries(self.root / folder)
                if entry.is_file() or any(walk(self.root, f"{folder}/{entry.name}".lstrip("/")))
            )

    def inventory(self, prefix: str) -> Inventory:
        """See ObjectStore."""
        listed: Inventory = []
        with self._translate_errors():
            for key in self.list(prefix):
                with suppress(FileNotFoundError, NotADirectoryError):  # deleted after it was listed
                    status = (self.root / key).stat()
                    listed.append(Listed(key, status.st_size, time_of(status)))
        return listed

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        target = self.root / check_key(key)
        if linked := next(
            (folder for folder in self._folders(target) if folder != self.root and folder.is_symlink()), None
        ):
            # Whoever can write here could otherwise have any file of ours deleted.
            reason = f"{linked.relative_to(self.root)} is a symbolic link, and nothing is deleted through one"
            raise DeletionRefusedError(url=self.url, key=key, reason=reason)
        with self._translate_errors():
            with suppress(FileNotFoundError, NotADirectoryError), self._translate_refused_deletions(key):
                target.unlink()
                sync_folder(target.parent)
            for folder in self._folders(target):
                if folder == self.root or not drop_if_empty(folder):
                    break

    @property
    def others_may(self) -> str:
        """What other users of the machine may do with the folder: "read" or "write" it, "" for neither."""
        with self._translate_errors():
            mode = self.root.stat().st_mode if self.root.exists() else 0
        return "write" if mode & (stat.S_IWGRP | stat.S_IWOTH) else "read" if mode & 0o077 else ""

    def unfinished(self) -> Leftovers:
        """See ObjectStore. A hidden file does not show which object it would have become."""
        leftovers: Leftovers = []
        if (self.root / INCOMING).is_symlink():
            return []
        with self._translate_errors(), suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted((self.root / INCOMING).iterdir()):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    leftovers.append(Unfinished("", path.name, status.st_size, time_of(status)))
        return leftovers

    def abandon(self, leftover: Unfinished) -> None:
        """See ObjectStore."""
        if (self.root / INCOMING).is_symlink():
            return
        with self._translate_errors(), self._translate_refused_deletions(f"{INCOMING}/{leftover.id}"):
            (self.root / INCOMING / leftover.id).unlink(missing_ok=True)

    @contextmanager
    def _translate_refused_deletions(self, key: str) -> Iterator[None]:
        """Raise DeletionRefusedError if the block may not remove a file."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            raise DeletionRefusedError(url=self.url, key=key, reason=reason_of(error)) from error

    @contextmanager
    def _translate_refused_writes(self) -> Iterator[None]:
        """Raise WritingRefusedError if the block may not create a file."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            hint = "check the folder's permissions, and whether its file system is mounted read-only"
            raise WritingRefusedError(url=self.url, reason=reason_of(error), hint=hint) from error

    def _link(self, incoming: Path, target: Path, key: str) -> None:
        """Give the written file its name, or raise ObjectExistsError."""
        for _ in range(LINK_ATTEMPTS_MAX):
            make_folder(target.parent)
            try:
                os.link(incoming, target)
            except FileNotFoundError:
                continue  # a delete removed the emptied folder between the two calls
            except OSError as error:
                # NFS may repeat a link whose answer was lost, and then report that the name is taken: by this link.
                if incoming.stat().st_nlink > 1:
                    return
                if isinstance(error, FileExistsError):
                    raise ObjectExistsError(url=self.url, key=key) from error
                if error.errno in NO_LINKS:
                    lack = f"the folder's file system does not support hard links ({reason_of(error)})"
                    raise StoreUnfitError(url=self.url, lack=lack) from error
                raise
            return
        raise StoreUnreachableError(url=self.url, reason=f"another process keeps removing the folder of {key}")

    def _keep_name(self, target: Path) -> None:
        """Make the object's name durable, and those of all folders above it, as any of them may be new."""
        for folder in self._folders(target):
            with suppress(FileNotFoundError):  # another process has deleted it
                sync_folder(folder)

    def _folders(self, target: Path) -> Iterator[Path]:
        """Yield the folders from the object's parent up to the store's root."""
        for folder in target.parents:
            yield folder
            if folder == self.root:
                return

    @contextmanager
    def _translate_errors(self, key: str | None = None) -> Iterator[None]:
        """Turn an OSError into the store's error; with `key`, a missing file is a missing object."""
        try:
            yield
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
            if key is not None and missing:
                raise ObjectMissingError(url=self.url, key=key) from error
            hint = "check the folder's permissions, its disk and the space left on it"
            raise StoreUnreachableError(url=self.url, reason=reason_of(error), hint=hint) from error


def reason_of(error: OSError) -> str:
    """Return the operating system's message, without the path."""
    return (error.strerror or type(error).__name__).lower()


def time_of(status: os.stat_result) -> datetime:
    """Return when a file was written."""
    return datetime.fromtimestamp(status.st_mtime, UTC)


def make_root(root: Path) -> None:
    """Create the store's folder if it is missing, with its parents, and make their names durable."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    make_folder(root)
    for folder in missing:
        sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Create the folder and its parents if they are missing: whole databases are in it, so nobody else may enter."""
    try:
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)


def write_durably(path: Path, body: bytes) -> None:
    """Write a new file, which nobody else may read, and flush it to disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
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


def drop_if_empty(folder: Path) -> bool:
    """Remove the folder if it is empty; return whether it no longer exists."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the folder's entries that are not hidden; none if the folder does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as listed:
        yield from (entry for entry in listed if not entry.name.startswith("."))


def walk(root: Path, folder: str) -> Iterator[str]:
    """Yield the keys below `folder`, in no order; raise OSError for a folder that can't be read."""
    for entry in entries(root / folder):
        key = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir():
            yield from walk(root, key)
        else:
            yield key
