"""An object store in a folder, on a local or shared file system.

An object is written to a hidden file, flushed to disk, and then linked to its name. link(2) fails if the name is taken,
so it serves as the conditional put. A create that dies leaves at most a hidden file, which blocks nothing. Never import
fsspec here: `list` and `show` on a folder must answer at once.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import BinaryIO

from cutline.storage.digest import digest_of, read_pieces
from cutline.storage.folders import (
    LinkedFolderError,
    drop_empty,
    entries,
    make_root,
    open_object,
    opened,
    remove,
    status_of,
    sync_names,
    walk,
    write_durably,
)
from cutline.storage.process_limits import FULL_DISK, OPEN_FILES_HINT, is_used_up
from cutline.storage.store import (
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
    has_size,
)

# The folder of hidden files. It is inside the store because a hard link can't cross file systems.
INCOMING = ".incoming"
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK}
FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS}
LINK_ATTEMPTS_MAX = 100


@dataclass(frozen=True, slots=True)
class LocalStore:
    """An ObjectStore in the folder `root`, which is made by the first create. A missing folder is an empty store.

    A folder that existed before is not created again, because its file system may have been unmounted.
    """

    root: Path
    _was_there: Event = field(default_factory=Event, init=False, repr=False, compare=False)

    @property
    def url(self) -> str:
        return f"file://{self.root}"

    def create(self, key: str, body: bytes) -> None:
        check_key(key)
        incoming = uuid.uuid4().hex
        with ExitStack() as stack:
            with self._translate_errors(), self._translate_refused_writes():
                self._require_root()
                hidden = stack.enter_context(opened(self.root, [INCOMING], make=True))[-1]
                try:
                    write_durably(incoming, body, hidden)
                    self._link(incoming, hidden, key)
                except BaseException:
                    with suppress(OSError):  # the first error matters more than a leftover hidden file
                        os.unlink(incoming, dir_fd=hidden)
                    raise
            # The object exists from here on, so no error below may claim that it was not stored.
            try:
                with suppress(FileNotFoundError):
                    os.unlink(incoming, dir_fd=hidden)
                # Any parent folder of the object may be new.
                sync_names(self.root, key.split("/")[:-1])
            except OSError as error:
                raise AnswerLostError(url=self.url, key=key, reason=reason_of(error)) from error

    def read(self, key: str) -> bytes:
        with self._opened(key) as file:
            return file.read()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        with self._opened(key) as file:
            file.seek(start)
            # The requested length may come from a forged document: never allocate more than the size of the file.
            return file.read(min(length, max(os.fstat(file.fileno()).st_size - start, 0)))

    def size(self, key: str) -> int:
        check_key(key)
        with self._translate_errors(key):
            return status_of(self.root, key).st_size

    def digest(self, key: str) -> str:
        return digest_of(read_pieces(self, key))

    def exists(self, key: str) -> bool:
        return has_size(self, key)

    def list(self, prefix: str) -> Keys:
        with self._translate_errors():
            return sorted(walk(self.root, check_prefix(prefix)))

    def list_children(self, prefix: str) -> Keys:
        folder = check_prefix(prefix)
        with self._translate_errors():
            # A folder may be empty: until its creator links the object, or forever if the creator died.
            return sorted(
                entry.name
                for entry in entries(self.root, folder)
                if entry.is_file or (entry.is_folder and any(walk(self.root, f"{folder}/{entry.name}".lstrip("/"))))
            )

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        listed: Inventory = []
        with self._translate_errors():
            for key in [key for key in self.list(prefix) if key > after]:
                with suppress(FileNotFoundError, NotADirectoryError):  # deleted after it was listed
                    status = status_of(self.root, key)
                    listed.append(Listed(key, status.st_size, time_of(status)))
        return listed

    def delete(self, key: str) -> None:
        check_key(key)
        with self._translate_errors():
            try:
                with self._translate_refused_deletions(key):
                    remove(self.root, key)
            except LinkedFolderError as error:
                # Otherwise anybody with write access to the store could cause any of this user's files to be deleted.
                raise DeletionRefusedError(url=self.url, key=key, reason=reason_of(error)) from error
            except NotADirectoryError:
                return  # a parent folder is a file, so the object does not exist
            drop_empty(self.root, key.split("/")[:-1])

    @property
    def others_may(self) -> str:
        """The access that other users on the machine have to the folder: "write", "read" or ""."""
        with self._translate_errors():
            mode = self.root.stat().st_mode if self.root.exists() else 0
        return "write" if mode & (stat.S_IWGRP | stat.S_IWOTH) else "read" if mode & 0o077 else ""

    def unfinished(self) -> Leftovers:
        """List the hidden files, with "" as the key, because it is unknown which object each would have become.

        A folder among them does not belong to a create; its own name is its key, which shows that it is foreign.
        """
        leftovers: Leftovers = []
        with (
            self._translate_errors(),
            suppress(FileNotFoundError, NotADirectoryError),
            opened(self.root, [INCOMING]) as descriptors,
        ):
            for name in os.listdir(descriptors[-1]):  # noqa: PTH208  # of an open folder
                with suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=descriptors[-1], follow_symlinks=False)
                    key = f"{INCOMING}/{name}" if stat.S_ISDIR(status.st_mode) else ""
                    leftovers.append(Unfinished(key, name, status.st_size, time_of(status)))
        return sorted(leftovers)

    def abandon(self, leftover: Unfinished) -> None:
        with (
            self._translate_errors(),
            suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            self._translate_refused_deletions(f"{INCOMING}/{leftover.id}"),
            opened(self.root, [INCOMING]) as descriptors,
        ):
            os.unlink(leftover.id, dir_fd=descriptors[-1])

    def expect_answers(self) -> None:
        self._was_there.set()

    @contextmanager
    def _opened(self, key: str) -> Iterator[BinaryIO]:
        """Open the object for reading."""
        with self._translate_errors(key), os.fdopen(open_object(self.root, check_key(key)), "rb") as file:
            self._was_there.set()
            yield file

    def _require_root(self) -> None:
        """Create the folder if it never existed; raise StoreUnreachableError if it existed and has disappeared."""
        # Read this first: another thread may be creating the folder.
        was_there = self._was_there.is_set()
        if not self.root.exists():
            if was_there:
                hint = "mount its file system again, or put the folder back; then repeat the command"
                raise StoreUnreachableError(url=self.url, reason="its folder is gone", hint=hint)
            make_root(self.root)
        self._was_there.set()

    @contextmanager
    def _translate_refused_deletions(self, key: str) -> Iterator[None]:
        """Raise DeletionRefusedError if the block is not allowed to remove a file."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            raise DeletionRefusedError(url=self.url, key=key, reason=reason_of(error)) from error

    @contextmanager
    def _translate_refused_writes(self) -> Iterator[None]:
        """Raise WritingRefusedError if the block is not allowed to create a file."""
        try:
            yield
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise
            hint = "check the folder's permissions, and whether its file system is mounted read-only"
            raise WritingRefusedError(url=self.url, reason=reason_of(error), hint=hint) from error

    def _link(self, incoming: str, hidden: int, key: str) -> None:
        """Give the written file in the open folder `hidden` its name, or raise ObjectExistsError."""
        *folders, name = key.split("/")
        for _ in range(LINK_ATTEMPTS_MAX):
            with (
                suppress(FileNotFoundError),  # a delete removed an emptied folder between two calls
                opened(self.root, folders, make=True) as descriptors,
            ):
                try:
                    os.link(incoming, name, src_dir_fd=hidden, dst_dir_fd=descriptors[-1], follow_symlinks=False)
                except FileNotFoundError:
                    raise
                except OSError as error:
                    self._explain_link(error, os.stat(incoming, dir_fd=hidden, follow_symlinks=False), key)
                return
        raise StoreUnreachableError(url=self.url, reason=f"another process keeps removing the folder of {key}")

    def _explain_link(self, error: OSError, written: os.stat_result, key: str) -> None:
        """Raise the error for a failed link; return if the link was created after all."""
        # NFS may repeat a request whose answer was lost, and then report the name as taken, although this very link
        # took it.
        if written.st_nlink > 1:
            return
        if isinstance(error, FileExistsError):
            raise ObjectExistsError(url=self.url, key=key) from error
        if error.errno in NO_LINKS:
            lack = f"the folder's file system does not support hard links ({reason_of(error)})"
            raise StoreUnfitError(url=self.url, lack=lack) from error
        raise error

    @contextmanager
    def _translate_errors(self, key: str | None = None) -> Iterator[None]:
        """Turn an OSError into the store's error; with `key`, a missing file is a missing object."""
        try:
            yield
        except OSError as error:
            missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
            if key is not None and missing:
                raise ObjectMissingError(url=self.url, key=key) from error
            raise StoreUnreachableError(url=self.url, reason=reason_of(error), hint=_hint_of(error)) from error


def _hint_of(error: OSError) -> str:
    if is_used_up(error):
        return OPEN_FILES_HINT
    if error.errno in FULL_DISK:
        # The tombstone of a deletion is stored before anything is deleted.
        return (
            "make room in the folder's file system, or enlarge it, then repeat the command; delete and prune need room"
            " for a few small objects; to remove garbage even from a full store: snapshot gc"
        )
    if error.errno == errno.EFBIG:
        return "raise the limit on the size of files that the process may write: ulimit -f"
    return "check the folder's permissions and its disk"


def reason_of(error: OSError) -> str:
    """Return the operating system's message, without the path."""
    if isinstance(error, LinkedFolderError):
        return str(error.strerror)
    return (error.strerror or type(error).__name__).lower()


def time_of(status: os.stat_result) -> datetime:
    """Return when a file was written."""
    return datetime.fromtimestamp(status.st_mtime, UTC)
