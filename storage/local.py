"""An object store in a folder of this machine, or of a file system that machines share.

An object is written to a file that no listing shows, made durable, and then linked to its name: link(2)
fails if the name is taken, which is the conditional put. A create that dies leaves at most such a hidden
file, which blocks nobody. Must not import fsspec: `list` and `show` on a folder have to answer at once.
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

from storage.digest import digest_of, pieces_of
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

# Inside the store, because a link can't lead from one file system to another; no key begins with a dot.
INCOMING = ".incoming"
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS}
LINK_ATTEMPTS_MAX = 100


@dataclass(frozen=True, slots=True)
class LocalStore:
    """An ObjectStore in the folder `root`, which the first create makes. A folder not there is empty."""

    root: Path

    @property
    def url(self) -> str:
        """See ObjectStore."""
        return f"file://{self.root}"

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore."""
        target = self.root / check_key(key)
        incoming = self.root / INCOMING / uuid.uuid4().hex
        with self._asking(), self._writing():
            make_root(self.root)
            incoming.parent.mkdir(exist_ok=True)
            try:
                write_durably(incoming, body)
                self._link(incoming, target, key)
            except BaseException:
                with suppress(OSError):  # a hidden file more; why there is no object matters more
                    incoming.unlink(missing_ok=True)
                raise
        # The object is there from here on, so nothing below may say that it is not.
        try:
            incoming.unlink(missing_ok=True)
            self._keep_name(target)
        except OSError as error:
            raise AnswerLostError(url=self.url, key=key, reason=why(error)) from error

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._asking(key):
            return (self.root / check_key(key)).read_bytes()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See ObjectStore."""
        check_range(start, length)
        with self._asking(key), (self.root / check_key(key)).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def size(self, key: str) -> int:
        """See ObjectStore."""
        path = self.root / check_key(key)
        with self._asking(key):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissingError(url=self.url, key=key)
        return status.st_size

    def digest(self, key: str) -> str:
        """See ObjectStore."""
        return digest_of(pieces_of(self, key))

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        try:
            self.size(key)
        except ObjectMissingError:
            return False
        return True

    def list(self, prefix: str) -> Keys:
        """See ObjectStore."""
        with self._asking():
            return sorted(walk(self.root, check_prefix(prefix)))

    def list_children(self, prefix: str) -> Keys:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        with self._asking():
            # A folder may be empty for a moment, or for good where its creator died before the link.
            return sorted(
                entry.name
                for entry in entries(self.root / folder)
                if entry.is_file() or any(walk(self.root, f"{folder}/{entry.name}".lstrip("/")))
            )

    def inventory(self, prefix: str) -> Inventory:
        """See ObjectStore."""
        found: Inventory = []
        with self._asking():
            for key in self.list(prefix):
                with suppress(FileNotFoundError, NotADirectoryError):  # deleted since
                    status = (self.root / key).stat()
                    found.append(Listed(key, status.st_size, time_of(status)))
        return found

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        target = self.root / check_key(key)
        with self._asking():
            with suppress(FileNotFoundError, NotADirectoryError), self._removing(key):
                target.unlink()
                sync_folder(target.parent)
            for folder in self._folders(target):
                if folder == self.root or not drop_if_empty(folder):
                    break

    def unfinished(self) -> Leftovers:
        """See ObjectStore. A hidden file does not say which object it was to become."""
        found: Leftovers = []
        with self._asking(), suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted((self.root / INCOMING).iterdir()):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append(Unfinished("", path.name, status.st_size, time_of(status)))
        return found

    def abandon(self, leftover: Unfinished) -> None:
        """See ObjectStore."""
        with self._asking(), self._removing(f"{INCOMING}/{leftover.id}"):
            (self.root / INCOMING / leftover.id).unlink(missing_ok=True)

    @contextmanager
    def _removing(self, key: str) -> Iterator[None]:
        """Say that a file may not be removed in the store's terms."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            raise DeletionRefusedError(url=self.url, key=key, reason=why(error)) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say that no file may be made in the store's terms."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            hint = "check the folder's permissions, and whether its file system is mounted to be read only"
            raise WritingRefusedError(url=self.url, reason=why(error), hint=hint) from error

    def _link(self, incoming: Path, target: Path, key: str) -> None:
        """Give the written file its name, or raise ObjectExistsError."""
        for _ in range(LINK_ATTEMPTS_MAX):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(incoming, target)
            except FileNotFoundError:
                continue  # a delete removed the emptied folder between the two calls
            except OSError as error:
                # NFS may repeat a link whose answer got lost and then report that the name is taken, by us.
                if incoming.stat().st_nlink > 1:
                    return
                if isinstance(error, FileExistsError):
                    raise ObjectExistsError(url=self.url, key=key) from error
                if error.errno in NO_LINKS:
                    lack = f"the folder's file system makes no hard links ({why(error)})"
                    raise StoreUnfitError(url=self.url, lack=lack) from error
                raise
            return
        raise StoreUnreachableError(url=self.url, reason=f"the folder of {key} is removed again and again")

    def _keep_name(self, target: Path) -> None:
        """Make the object's name durable, with every folder above it: any of them may be new."""
        for folder in self._folders(target):
            with suppress(FileNotFoundError):  # deleted by another process since
                sync_folder(folder)

    def _folders(self, target: Path) -> Iterator[Path]:
        """Yield the folders from the object's own up to the store's."""
        for folder in target.parents:
            yield folder
            if folder == self.root:
                return

    @contextmanager
    def _asking(self, key: str | None = None) -> Iterator[None]:
        """Say an OSError in the store's terms; with `key`, a missing file is a missing object."""
        try:
            yield
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
            if key is not None and missing:
                raise ObjectMissingError(url=self.url, key=key) from error
            hint = "check the folder's permissions, its disk and the space left on it"
            raise StoreUnreachableError(url=self.url, reason=why(error), hint=hint) from error


def why(error: OSError) -> str:
    """Return the system's words for an error, without the path."""
    return (error.strerror or type(error).__name__).lower()


def time_of(status: os.stat_result) -> datetime:
    """Return when a file was written."""
    return datetime.fromtimestamp(status.st_mtime, UTC)


def make_root(root: Path) -> None:
    """Make the store's folder where it is missing, and its name durable, with those made above it."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def write_durably(path: Path, body: bytes) -> None:
    """Write a new file and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_if_empty(folder: Path) -> bool:
    """Remove the folder if nothing is in it; tell whether it is gone."""
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
    """Yield what is in the folder and not hidden; nothing if there is no such folder."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        yield from (entry for entry in found if not entry.name.startswith("."))


def walk(root: Path, folder: str) -> Iterator[str]:
    """Yield the keys below `folder`, in no order. Unreadable folders raise rather than being left out."""
    for entry in entries(root / folder):
        key = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_dir():
            yield from walk(root, key)
        else:
            yield key
