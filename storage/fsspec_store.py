"""An object store on any fsspec file system.

Reading and listing are the same for all file systems. A `Dialect` implements what differs: the conditional put, and
what a failure means. Only the probe can find out whether a server keeps its promises.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Protocol

from cutline.storage.clock import utc_now
from cutline.storage.digest import digest_of, read_pieces
from cutline.storage.errors import SnapshotError
from cutline.storage.store import (
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
    is_key,
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in terms of the store: the reason, and what it means for the request."""

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
    """What differs between kinds of file systems."""

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """Do what ObjectStore.create promises."""
        ...

    def create_in_parts(self, store: FsspecStore, key: str, body: bytes) -> None:
        """Do what ObjectStore.create promises, in the way used for large objects, whatever the size of `body`."""
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

    def expect_answers(self, store: FsspecStore) -> None:
        """Do what ObjectStore.expect_answers promises."""
        ...

    def explain(self, error: Exception) -> Fault:
        """Say what a failed read, listing or delete means; never quote text that could contain a secret."""
        ...


@dataclass(frozen=True, slots=True)
class FsspecStore:
    """An ObjectStore in the folder `root` of an fsspec file system, which must not cache listings."""

    url: str
    root: str
    filesystem: Any
    dialect: Dialect

    def path(self, key: str) -> str:
        """Return the file system's path of an object, or of the root for ""."""
        return f"{self.root}/{key}" if key else self.root

    def expect_answers(self) -> None:
        """See ObjectStore."""
        self.dialect.expect_answers(self)

    def create(self, key: str, body: bytes) -> None:
        """See ObjectStore."""
        self.dialect.create(self, check_key(key), body)

    def create_in_parts(self, key: str, body: bytes) -> None:
        """See CreatesInParts."""
        self.dialect.create_in_parts(self, check_key(key), body)

    def read(self, key: str) -> bytes:
        """See ObjectStore."""
        with self._translate_errors(check_key(key)):
            return bytes(self.filesystem.cat_file(self.path(key)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See ObjectStore."""
        check_range(start, length)
        with self._translate_errors(check_key(key)):
            try:
                return bytes(self.filesystem.cat_file(self.path(key), start=start, end=start + length))
            except Exception as error:
                if self.dialect.explain(error).is_beyond_end:
                    return b""
                raise

    def size(self, key: str) -> int:
        """See ObjectStore."""
        with self._translate_errors(check_key(key)):
            status = self.filesystem.info(self.path(key))
        if status["type"] != "file":
            raise ObjectMissingError(url=self.url, key=key)
        return int(status["size"])

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
        return [one.key for one in self.inventory(prefix)]

    def inventory(self, prefix: str) -> Inventory:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        try:
            with self._translate_errors(folder):
                found = self.filesystem.find(self.path(folder), detail=True)
        except ObjectMissingError:
            return []
        if not isinstance(found, Mapping):
            return []  # an object has the folder's name: adlfs returns a list of it
        start, skip = f"{self.path(folder)}/", len(self.root) + 1
        # A name that ends in a slash, no key, is the placeholder with which consoles show an empty folder.
        return sorted(
            Listed(path[skip:], int(status["size"]), time_of(status))
            for path, status in found.items()
            if path.startswith(start) and is_key(path[skip:])
        )

    def list_children(self, prefix: str) -> Keys:
        """See ObjectStore."""
        folder = check_prefix(prefix)
        try:
            with self._translate_errors(folder):
                found = self.filesystem.ls(self.path(folder), detail=False)
        except ObjectMissingError:
            return []
        start = f"{self.path(folder)}/"
        names = {path[len(start) :].rstrip("/") for path in found if path.startswith(start)}
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        """See ObjectStore."""
        with suppress(ObjectMissingError), self._translate_errors(check_key(key)):
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
    def _translate_errors(self, key: str) -> Iterator[None]:
        """Turn the file system's errors into the store's; fsspec's errors have no common base class."""
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
    """Any file system, used through fsspec's interface alone.

    Many of them check for the object and then write, which is not atomic: the probe refuses them.
    """

    def create(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See ObjectStore."""
        if creates_in_two_steps(store.filesystem):
            lack = "its fsspec file system checks whether the object exists and then writes it, which is not atomic"
            raise StoreUnfitError(url=store.url, lack=lack)
        try:
            self._put(store, store.path(key), body)
        except FileExistsError as error:
            raise ObjectExistsError(url=store.url, key=key) from error
        except (NotImplementedError, TypeError) as error:
            raise StoreUnfitError(
                url=store.url, lack="its fsspec file system can't create a file exclusively"
            ) from error
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
            # Its folders are real and must be created first; nothing is stored yet.
            store.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            store.filesystem.pipe_file(path, body, mode="create")

    def create_in_parts(self, store: FsspecStore, key: str, body: bytes) -> None:
        """See Dialect. The file system itself decides how to send a large object."""
        self.create(store, key, body)

    def explain(self, error: Exception) -> Fault:
        """See Dialect."""
        code, status = getattr(error, "errno", None), http_status(error)
        name = errno.errorcode.get(code, "") if isinstance(code, int) else ""
        return Fault(
            f"{type(error).__name__}, HTTP status {status}" if status else name or type(error).__name__,
            is_missing=isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)),
            is_beyond_end=status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            is_forbidden=isinstance(error, PermissionError) or status == HTTPStatus.FORBIDDEN,
            hint=hint_of_status(status),
        )

    def delete(self, store: FsspecStore, key: str) -> None:
        """See Dialect."""
        store.filesystem.rm_file(store.path(key))

    def unfinished(self, store: FsspecStore) -> Leftovers:  # noqa: ARG002  # a Dialect's
        """See Dialect. fsspec's interface can't list it."""
        return []

    def abandon(self, store: FsspecStore, leftover: Unfinished) -> None:
        """See Dialect."""

    def expect_answers(self, store: FsspecStore) -> None:
        """See Dialect. The file system itself decides how long it waits."""


def http_status(error: Exception) -> int:
    """Return the HTTP status that a file system's error stands for, 0 if it names none."""
    # adlfs passes on the errors of Azure's library, which have `status_code`. gcsfs's have `code`, but 403 is an
    # OSError with this text.
    named = (getattr(error, name, None) for name in ("status_code", "code"))
    if (status := next((value for value in named if isinstance(value, int)), 0)) != 0:
        return status
    return HTTPStatus.FORBIDDEN if isinstance(error, OSError) and str(error).startswith("Forbidden: ") else 0


def hint_of_status(status: int) -> str:
    """Return what to do about an HTTP status of a store that refused a request or failed; "" if that is not known."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "check the credentials, and what they may do: docs/storage.md, Policies"
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "let commands make fewer requests at a time, or repeat the command in some minutes"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        return "look at the store's log, or its provider's status page; repeat the command once it works"
    return ""


def creates_in_two_steps(filesystem: Any) -> bool:
    """Tell whether an exclusive create is fsspec's default, check then write: sometimes two creators both succeed."""
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    while isinstance(getattr(filesystem, "fs", None), AbstractFileSystem):
        filesystem = filesystem.fs  # a wrapper that only renames paths
    return getattr(filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file


def time_of(status: Mapping[str, Any]) -> datetime:
    """Return when an object was created; if that is unknown, now: so the object never counts as old."""
    for name in ("LastModified", "last_modified", "mtime", "created", "updated"):
        value = status.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
    return utc_now()
