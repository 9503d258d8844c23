"""An object store on any fsspec file system, used only through fsspec's interface.

Many of these file systems check for the object and then write it, which is not atomic, so they are refused. Only the
probe can find out whether a server keeps its promises.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

from msgspec import Struct

from cutline.storage.clock import utc_now
from cutline.storage.digest import digest_of, read_pieces
from cutline.storage.store import (
    AnswerLostError,
    DeletionRefusedError,
    Fault,
    Inventory,
    Keys,
    Leftovers,
    Listed,
    ObjectExistsError,
    ObjectMissingError,
    StoreUnfitError,
    Unfinished,
    WritingRefusedError,
    check_key,
    check_prefix,
    check_range,
    has_size,
    hint_of_status,
    is_key,
    store_errors,
)


class FsspecStore(Struct, frozen=True):
    """An ObjectStore in the folder `root` of an fsspec file system, which must not cache listings."""

    url: str
    root: str
    filesystem: Any

    def path(self, key: str) -> str:
        """Return the file system's path of an object, or of the root for ""."""
        return f"{self.root}/{key}" if key else self.root

    def expect_answers(self) -> None:
        """Do nothing: the file system itself decides how long to wait."""

    def create(self, key: str, body: bytes) -> None:
        path = self.path(check_key(key))
        if creates_in_two_steps(self.filesystem):
            lack = "its fsspec file system checks whether the object exists and then writes it, which is not atomic"
            raise StoreUnfitError(url=self.url, lack=lack)
        try:
            self._put(path, body)
        except FileExistsError as error:
            raise ObjectExistsError(url=self.url, key=key) from error
        except (NotImplementedError, TypeError) as error:
            lack = "its fsspec file system can't create a file exclusively"
            raise StoreUnfitError(url=self.url, lack=lack) from error
        except PermissionError as error:
            raise WritingRefusedError(url=self.url, reason=explain(error).reason) from error
        except ConnectionRefusedError as error:
            raise explain(error).unreachable(self.url) from error
        except Exception as error:
            raise AnswerLostError(url=self.url, key=key, reason=explain(error).reason) from error

    def _put(self, path: str, body: bytes) -> None:
        try:
            self.filesystem.pipe_file(path, body, mode="create")
        except FileNotFoundError:
            # This file system has real folders, which must be created first; nothing is stored yet.
            self.filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.filesystem.pipe_file(path, body, mode="create")

    def read(self, key: str) -> bytes:
        with store_errors(self.url, check_key(key), explain):
            return bytes(self.filesystem.cat_file(self.path(key)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        with store_errors(self.url, check_key(key), explain):
            try:
                return bytes(self.filesystem.cat_file(self.path(key), start=start, end=start + length))
            except Exception as error:
                if explain(error).is_beyond_end:
                    return b""
                raise

    def size(self, key: str) -> int:
        with store_errors(self.url, check_key(key), explain):
            status = self.filesystem.info(self.path(key))
        if status["type"] != "file":
            raise ObjectMissingError(url=self.url, key=key)
        return int(status["size"])

    def digest(self, key: str) -> str:
        return digest_of(read_pieces(self, key))

    def exists(self, key: str) -> bool:
        return has_size(self, key)

    def list(self, prefix: str) -> Keys:
        return [listed.key for listed in self.inventory(prefix)]

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        folder = check_prefix(prefix)
        try:
            with store_errors(self.url, folder, explain):
                statuses = self.filesystem.find(self.path(folder), detail=True)
        except ObjectMissingError:
            return []
        if not isinstance(statuses, Mapping):
            return []  # an object has the folder's name: adlfs then returns a list
        start, skip = f"{self.path(folder)}/", len(self.root) + 1
        # Consoles create placeholders for empty folders: their names end with a slash, so they are not keys.
        return sorted(
            Listed(path[skip:], int(status["size"]), time_of(status))
            for path, status in statuses.items()
            if path.startswith(start) and is_key(path[skip:]) and path[skip:] > after
        )

    def list_children(self, prefix: str) -> Keys:
        folder = check_prefix(prefix)
        try:
            with store_errors(self.url, folder, explain):
                paths = self.filesystem.ls(self.path(folder), detail=False)
        except ObjectMissingError:
            return []
        start = f"{self.path(folder)}/"
        names = {path[len(start) :].rstrip("/") for path in paths if path.startswith(start)}
        return sorted(name for name in names if is_key(name))

    def delete(self, key: str) -> None:
        path = self.path(check_key(key))
        with suppress(ObjectMissingError), store_errors(self.url, key, explain):
            try:
                self.filesystem.rm_file(path)
            except Exception as error:
                fault = explain(error)
                if fault.is_forbidden:
                    raise DeletionRefusedError(url=self.url, key=key, reason=fault.reason) from error
                raise

    def unfinished(self) -> Leftovers:
        """Return an empty list: fsspec's interface can't list unfinished objects."""
        return []

    def abandon(self, leftover: Unfinished) -> None:
        pass


def explain(error: Exception) -> Fault:
    """Classify a failed request without quoting the file system's text, which could contain a secret."""
    code, status = getattr(error, "errno", None), http_status(error)
    name = errno.errorcode.get(code, "") if isinstance(code, int) else ""
    return Fault(
        f"{type(error).__name__}, HTTP status {status}" if status else name or type(error).__name__,
        is_missing=isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)),
        is_beyond_end=status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        is_forbidden=isinstance(error, PermissionError) or status == HTTPStatus.FORBIDDEN,
        hint=hint_of_status(status),
    )


def http_status(error: Exception) -> int:
    """Return the HTTP status behind a file system's error; 0 if it is unknown."""
    # adlfs raises the errors of Azure's library, which have `status_code`. gcsfs's errors have `code`, except for 403,
    # which is an OSError with this text.
    named = (getattr(error, name, None) for name in ("status_code", "code"))
    if (status := next((value for value in named if isinstance(value, int)), 0)) != 0:
        return status
    return HTTPStatus.FORBIDDEN if isinstance(error, OSError) and str(error).startswith("Forbidden: ") else 0


def creates_in_two_steps(filesystem: Any) -> bool:
    """Whether exclusive creation is fsspec's default, which checks and then writes: two creators may both succeed."""
    from fsspec import AbstractFileSystem  # type: ignore[import-untyped]

    while isinstance(getattr(filesystem, "fs", None), AbstractFileSystem):
        filesystem = filesystem.fs  # a wrapper that only renames paths
    return getattr(filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file


def time_of(status: Mapping[str, Any]) -> datetime:
    """Return when an object was created, or the current time if that is unknown, so it does not count as old."""
    for name in ("LastModified", "last_modified", "mtime", "created", "updated"):
        value = status.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
    return utc_now()
