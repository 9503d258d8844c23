"""An object store behind any file system that fsspec knows.

Reading and listing are the same for all of them. How an object is put conditionally, and what a failure
means, differs; a `Dialect` knows that. Whether a server keeps its promises only the probe can tell.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from storage.errors import SnapshotError
from storage.store import (
    AnswerLostError,
    Keys,
    ObjectExistsError,
    ObjectMissingError,
    StoreUnreachableError,
    check_key,
    check_prefix,
    check_range,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in terms of the store: what is wrong, and what an operator may conclude."""

    reason: str
    is_missing: bool = False
    is_beyond_end: bool = False


class Dialect(Protocol):
    """What one kind of file system does in its own way."""

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """Do what ObjectStore.create promises."""
        ...

    def explain(self, error: Exception) -> Fault:
        """Say what a failed read, listing or delete means; never quote text that could hold a secret."""
        ...


@dataclass(frozen=True, slots=True)
class FsspecStore:
    """An ObjectStore in the folder `root` of an fsspec file system that caches no listings."""

    url: str
    root: str
    filesystem: Any
    dialect: Dialect

    def path(self, key: str) -> str:
        """Return the file system's path of an object, or of the root for ""."""
        return f"{self.root}/{key}" if key else self.root

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore."""
        self.dialect.create(self, check_key(key), body)

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._asking(check_key(key)):
            return bytes(self.filesystem.cat_file(self.path(key)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See ObjectStore."""
        check_range(start, length)
        with self._asking(check_key(key)):
            try:
                return bytes(self.filesystem.cat_file(self.path(key), start=start, end=start + length))
            except OSError as error:
                if self.dialect.explain(error).is_beyond_end:
                    return b""
                raise

    def size(self, key: str) -> int:
        """See ObjectStore."""
        with self._asking(check_key(key)):
            status = self.filesystem.info(self.path(key))
        if status["type"] != "file":
            raise ObjectMissingError(url=self.url, key=key)
        return int(status["size"])

    def exists(self, key: str) -> bool:
        """See ObjectStore."""
        try:
            self.size(key)
        except ObjectMissingError:
            return False
        return True

    def list(self, prefix: str) -> Keys:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        try:
            with self._asking(folder):
                found = self.filesystem.find(self.path(folder))
        except ObjectMissingError:
            return []
        start, skip = f"{self.path(folder)}/", len(self.root) + 1
        # A name with a slash at its end is the placeholder by which consoles show an empty folder.
        return sorted(path[skip:] for path in found if path.startswith(start) and not path.endswith("/"))

    def list_children(self, prefix: str) -> Keys:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        try:
            with self._asking(folder):
                found = self.filesystem.ls(self.path(folder), detail=False)
        except ObjectMissingError:
            return []
        start = f"{self.path(folder)}/"
        names = {path[len(start) :].rstrip("/") for path in found if path.startswith(start)}
        return sorted(names - {""})

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        try:
            with self._asking(check_key(key)):
                self.filesystem.rm_file(self.path(key))
        except ObjectMissingError:
            return

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        """Say a file system's error in the store's terms. fsspec gives them no base."""
        try:
            yield
        except SnapshotError:
            raise
        except Exception as error:
            fault = self.dialect.explain(error)
            if fault.is_missing:
                raise ObjectMissingError(url=self.url, key=key) from error
            raise StoreUnreachableError(url=self.url, reason=fault.reason) from error


@dataclass(frozen=True, slots=True)
class PlainDialect:
    """A file system of which nothing is known but fsspec's interface.

    Many of them look first and then write, which the probe refuses.
    """

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See ObjectStore."""
        try:
            store.filesystem.pipe_file(store.path(key), body, mode="create")
        except FileExistsError as error:
            raise ObjectExistsError(url=store.url, key=key) from error
        except (ConnectionRefusedError, PermissionError) as error:
            raise StoreUnreachableError(url=store.url, reason=self.explain(error).reason) from error
        except Exception as error:
            raise AnswerLostError(url=store.url, key=key, reason=self.explain(error).reason) from error

    def explain(self, error: Exception) -> Fault:
        """See Dialect."""
        missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        code = getattr(error, "errno", None)
        name = errno.errorcode.get(code, "") if isinstance(code, int) else ""
        return Fault(name or type(error).__name__, is_missing=missing)
