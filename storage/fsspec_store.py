"""An object store behind any file system that fsspec knows.

Reading and listing are the same for all of them. How an object is put conditionally, and what a failure
means, differs; a `Dialect` knows that. Whether a server keeps its promises only the probe can tell.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from storage.digest import digest_of, pieces_of
from storage.errors import SnapshotError
from storage.store import (
    AnswerLostError,
    CredentialsExpiredError,
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


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in terms of the store: what is wrong, and what an operator may conclude."""

    reason: str
    is_missing: bool = False
    is_beyond_end: bool = False
    is_forbidden: bool = False
    is_expired: bool = False
    hint: str = ""

    def unreachable(self, url: str) -> StoreUnreachableError:
        """Return this as the error of the store at `url`."""
        kind = CredentialsExpiredError if self.is_expired else StoreUnreachableError
        return kind(url=url, reason=self.reason, hint=self.hint)


class Dialect(Protocol):
    """What one kind of file system does in its own way."""

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """Do what ObjectStore.create promises."""
        ...

    def create_in_parts(self, store: FsspecStore, key: str, body: bytes) -> None:
        """Do what ObjectStore.create promises as it is done for a large object, whatever the size of this one."""
        ...

    def delete(self, store: FsspecStore, key: str) -> None:
        """Do what ObjectStore.delete promises; may also raise what `explain` explains."""
        ...

    def unfinished(self, store: FsspecStore) -> Leftovers:
        """Do what ObjectStore.unfinished promises."""
        ...

    def abandon(self, store: FsspecStore, leftover: Unfinished) -> None:
        """Do what ObjectStore.abandon promises."""
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

    def create_in_parts(self, key: str, body: bytes) -> None:
        """See CreatesInParts."""
        self.dialect.create_in_parts(self, check_key(key), body)

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
        return [one.key for one in self.inventory(prefix)]

    def inventory(self, prefix: str) -> Inventory:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        try:
            with self._asking(folder):
                found = self.filesystem.find(self.path(folder), detail=True)
        except ObjectMissingError:
            return []
        start, skip = f"{self.path(folder)}/", len(self.root) + 1
        # A name with a slash at its end is the placeholder by which consoles show an empty folder.
        return sorted(
            Listed(path[skip:], int(status["size"]), time_of(status))
            for path, status in found.items()
            if path.startswith(start) and not path.endswith("/")
        )

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
        with suppress(ObjectMissingError), self._asking(check_key(key)):
            try:
                self.dialect.delete(self, key)
            except SnapshotError:
                raise
            except Exception as error:
                fault = self.dialect.explain(error)
                if fault.is_forbidden:
                    raise DeletionRefusedError(url=self.url, key=key, reason=fault.reason) from error
                raise

    def unfinished(self) -> Leftovers:
        """See ObjectStore."""
        return self.dialect.unfinished(self)

    def abandon(self, leftover: Unfinished) -> None:
        """See ObjectStore."""
        self.dialect.abandon(self, leftover)

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
            raise fault.unreachable(self.url) from error


@dataclass(frozen=True, slots=True)
class PlainDialect:
    """A file system of which nothing is known but fsspec's interface.

    Many of them look first and then write, which the probe refuses.
    """

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See ObjectStore."""
        if looks_first(store.filesystem):
            lack = "its fsspec file system looks whether there is an object, and then writes one"
            raise StoreUnfitError(url=store.url, lack=lack)
        try:
            self._put(store, store.path(key), body)
        except FileExistsError as error:
            raise ObjectExistsError(url=store.url, key=key) from error
        except (NotImplementedError, TypeError) as error:
            raise StoreUnfitError(url=store.url, lack="its fsspec file system creates no file exclusively") from error
        except PermissionError as error:
            raise WritingRefusedError(url=store.url, reason=self.explain(error).reason) from error
        except ConnectionRefusedError as error:
            raise self.explain(error).unreachable(store.url) from error
        except Exception as error:
            raise AnswerLostError(url=store.url, key=key, reason=self.explain(error).reason) from error

    def _put(self, store: FsspecStore, path: str, body: bytes) -> None:
        try:
            store.filesystem.pipe_file(path, body, mode="create")
        except FileNotFoundError:
            # Its folders are real, so they have to be made, and nothing is stored yet.
            store.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            store.filesystem.pipe_file(path, body, mode="create")

    def create_in_parts(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See Dialect. The file system decides by itself how it sends what."""
        self.create(store, key, body)

    def explain(self, error: Exception) -> Fault:
        """See Dialect."""
        missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError))
        code = getattr(error, "errno", None)
        name = errno.errorcode.get(code, "") if isinstance(code, int) else ""
        forbidden = isinstance(error, PermissionError)
        return Fault(name or type(error).__name__, is_missing=missing, is_forbidden=forbidden)

    def delete(self, store: FsspecStore, key: str) -> None:
        """See Dialect."""
        store.filesystem.rm_file(store.path(key))

    def unfinished(self, store: FsspecStore) -> Leftovers:  # noqa: ARG002  # a Dialect's
        """See Dialect. Nothing in fsspec's interface tells of it."""
        return []

    def abandon(self, store: FsspecStore, leftover: Unfinished) -> None:
        """See Dialect."""


def looks_first(filesystem: Any) -> bool:
    """Tell whether a create is fsspec's own, in two steps: two creators get past it together now and then."""
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    while isinstance(getattr(filesystem, "fs", None), AbstractFileSystem):
        filesystem = filesystem.fs  # it only renames
    return getattr(filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file


def time_of(status: Mapping[str, Any]) -> datetime:
    """Return when an object was created; now where the file system doesn't tell, so that nobody takes it for old."""
    for name in ("LastModified", "last_modified", "mtime", "created", "updated"):
        found = status.get(name)
        if isinstance(found, datetime):
            return found if found.tzinfo else found.replace(tzinfo=UTC)
        if isinstance(found, (int, float)):
            return datetime.fromtimestamp(found, UTC)
    return datetime.now(UTC)
