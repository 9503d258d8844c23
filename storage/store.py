"""The interface that Cutline requires of an object store, and the store's errors.

ObjectStoreContract tests every sentence of `ObjectStore` for every implementation. Nothing here opens a connection or
imports fsspec.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from http import HTTPStatus
from typing import Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from cutline.storage.errors import IndeterminateError, RefusedError, SnapshotError, UnreachableError

# `ObjectStore.list` shadows the builtin inside the class, so its methods use these names.
Keys: TypeAlias = list[str]
Inventory: TypeAlias = "list[Listed]"
Leftovers: TypeAlias = "list[Unfinished]"

# No key contains these characters, in any store: fsspec interprets ? * [ ] # (patterns, versions), LocalStore hides
# unfinished objects behind a leading dot, and Python represents file names that are not UTF-8 with surrogates.
SEGMENT = r"[^\x00-\x1f\x7f/\\?*\[\]#%\ud800-\udfff.][^\x00-\x1f\x7f/\\?*\[\]#%\ud800-\udfff]*"
KEY = re.compile(f"{SEGMENT}(?:/{SEGMENT})*")
# Not a thread-local, because a thread that stores objects for another thread runs in that thread's context.
_stopped: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


class Listed(Struct, frozen=True, order=True):
    """An object in a listing: its size in bytes, and when it was created, according to the store's clock."""

    key: str
    size: int
    created_at: datetime


class Unfinished(Struct, frozen=True, order=True):
    """The leftover from a dead create. It is not an object and is not listed, but it takes up space.

    `id` is meaningful only to the store. `key` is the key of the create, "" if unknown. `size_bytes` is the known size.
    `began_at` is when the create began, or when the last part arrived if the store reports that.
    """

    key: str
    id: str
    size_bytes: int
    began_at: datetime


class ObjectStore(Protocol):
    """Objects under keys like `snapshots/nightly/snapshot.json`, each created completely and exactly once.

    A key is one or more segments joined by `/`. No segment is empty or begins with a dot (ValueError). No key may be
    the folder of another key. Other programs' objects whose names are not valid keys are neither listed nor deleted.
    All methods are thread-safe, always ask the store and never a cache, and raise StoreUnreachableError if the store
    does not answer.
    """

    @property
    def url(self) -> str:
        """The store's address, without credentials, for messages."""
        ...

    def expect_answers(self) -> None:
        """Assume that the store has already answered another process of the command.

        From then on, a missing folder is not created, and a server that does not answer is assumed to be temporarily
        down.
        """
        ...

    def create(self, key: str, body: bytes) -> None:
        """Create `key` completely or not at all, durably, by one atomic conditional put.

        Raises ObjectExistsError if the key is taken by an object that this call did not write. Raises AnswerLostError
        if it is unknown whether the object was stored; the caller must then read the key back. Raises
        StoreUnreachableError if nothing was stored, or its subclass WritingRefusedError if writing is forbidden. Raises
        EncryptionIgnoredError if the object was stored, but the server did not encrypt it as requested.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return the whole object; raise ObjectMissingError if it does not exist."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start`, or fewer if the object ends earlier.

        Raises ObjectMissingError, and ValueError if `start` is negative or `length` is not positive.
        """
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes; raise ObjectMissingError if it does not exist."""
        ...

    def digest(self, key: str) -> str:
        """Return the SHA-256 of the object's bytes as 64 hex digits, reading them in pieces.

        Raises ObjectMissingError.
        """
        ...

    def exists(self, key: str) -> bool:
        """Whether there is an object under exactly this key."""
        ...

    def list(self, prefix: str) -> Keys:
        """Return every key below the folder `prefix` at any depth, sorted; "" is the whole store.

        `a/b` lists `a/b/c` but neither `a/bc` nor an object `a/b` itself. All objects created before the call are
        listed; unfinished objects are not.
        """
        ...

    def list_children(self, prefix: str) -> Keys:
        """Return the sorted names one level below `prefix`: objects, and folders that contain objects."""
        ...

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        """Return the objects that `list` lists, with their sizes and times; only those whose keys sort after `after`.

        Where the store's API permits it, the others are not even listed.
        """
        ...

    def delete(self, key: str) -> None:
        """Delete the object, if it exists.

        Raises DeletionRefusedError if a policy or a lock protects the object, which is then unchanged.
        """
        ...

    def unfinished(self) -> Leftovers:
        """Return the unfinished objects of dead and running creates, sorted by key."""
        ...

    def abandon(self, leftover: Unfinished) -> None:
        """Remove a leftover, if it still exists. If its create is still running, the create fails.

        Raises DeletionRefusedError.
        """
        ...


@runtime_checkable
class CreatesInParts(Protocol):
    """A store that uses multipart uploads for large objects.

    Servers may honour the condition on a put but not on an upload.
    """

    def create_in_parts(self, key: str, body: bytes) -> None:
        """Create the object by multipart upload, as `create` does for large objects; `body` may be of any size."""
        ...


class ObjectExistsError(RefusedError):
    """The key of a create is already taken by another object."""

    def __init__(self, *, url: str, key: str) -> None:
        super().__init__(
            f"store {url}: object {key} already exists",
            hint="another operation created it; see: snapshot list",
            details={"store": url, "object": key},
        )


class ObjectMissingError(SnapshotError):
    """An object that should exist is missing."""

    exit_code = RefusedError.exit_code

    def __init__(self, *, url: str, key: str) -> None:
        super().__init__(
            f"store {url}: object {key} does not exist",
            hint="check that this is the right store, and that nothing else deletes objects from it",
            details={"store": url, "object": key},
        )


class AnswerLostError(IndeterminateError):
    """The answer to a create was lost: the object may be stored, now or a little later."""

    def __init__(self, *, url: str, key: str, reason: str) -> None:
        super().__init__(
            f"store {url}: the answer to creating {key} was lost ({reason})",
            hint="repeat the command: it first finds out whether the object was stored",
            details={"store": url, "object": key},
        )
        self.reason = reason


class EncryptionIgnoredError(RefusedError):
    """The store stored the object, but did not encrypt it as [store_options] asks."""

    def __init__(self, *, url: str, key: str, asked: str, found: str) -> None:
        super().__init__(
            f"store {url}: object {key} is stored {found}, although server_side_encryption requests {asked}",
            hint="use a server and a key that support this, or remove server_side_encryption and kms_key_id from"
            " [store_options]; see docs/storage.md, Encryption at rest by the server",
            details={"store": url, "object": key},
        )


class StoreUnreachableError(UnreachableError):
    """The store does not answer or refuses the request; nothing was stored."""

    def __init__(self, *, url: str, reason: str, hint: str = "") -> None:
        super().__init__(
            f"store {url}: {reason}",
            hint=hint or "check store and [store_options] in fleet.toml, and the network",
            details={"store": url},
        )


class CredentialsExpiredError(StoreUnreachableError):
    """The store no longer accepts the credentials, and there are no newer credentials; nothing was stored."""


class WritingRefusedError(StoreUnreachableError):
    """A policy or the folder's permissions forbid writing to the store; nothing was stored."""

    def __init__(self, *, url: str, reason: str, hint: str = "") -> None:
        hint = hint or "use credentials that are allowed to create objects: docs/storage.md, Policies"
        super().__init__(url=url, reason=f"creating objects was refused: {reason}", hint=hint)


class DeletionRefusedError(RefusedError):
    """A policy or a lock forbids deleting the object; `until` is the end of the lock, if known."""

    def __init__(self, *, url: str, key: str, reason: str, until: datetime | None = None) -> None:
        details: dict[str, object] = {"store": url, "object": key}
        super().__init__(
            f"store {url}: object {key} can't be deleted: {reason}",
            hint="repeat the command after the lock has expired, or with credentials that are allowed to delete",
            details=details | ({"until": until.isoformat()} if until else {}),
        )
        self.until = until


class Fault(Struct, frozen=True):
    """A failed request, described independently of the store's library."""

    reason: str
    is_missing: bool = False
    is_beyond_end: bool = False
    is_forbidden: bool = False
    is_expired: bool = False
    hint: str = ""

    def unreachable(self, url: str) -> StoreUnreachableError:
        """Return the error to raise for this fault of the store at `url`."""
        kind = CredentialsExpiredError if self.is_expired else StoreUnreachableError
        return kind(url=url, reason=self.reason, hint=self.hint)


@contextmanager
def store_errors(url: str, key: str, explain: Callable[[Exception], Fault]) -> Iterator[None]:
    """Translate errors that libraries raise in this block into store errors; they have no common base class."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        fault = explain(error)
        if fault.is_missing:
            raise ObjectMissingError(url=url, key=key) from error
        raise fault.unreachable(url) from error


def hint_of_status(status: int) -> str:
    """Return the hint for the HTTP status of a failed request; "" if there is none for this status."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "check the credentials and their permissions: docs/storage.md, Policies"
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "run fewer commands at a time to make fewer requests; or repeat the command in a few minutes"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        return "check the store's log or its provider's status page; repeat the command once the store works again"
    return ""


class StoreUnfitError(RefusedError):
    """The store lacks a capability that snapshots depend on."""

    def __init__(self, *, url: str, lack: str) -> None:
        super().__init__(
            f"store {url}: {lack}",
            hint="use a store that honours conditional puts (If-None-Match: *), such as AWS S3, or a folder",
            details={"store": url},
        )


class RequestStoppedError(UnreachableError):
    """The command was stopped while it waited for the store's answer."""

    def __init__(self) -> None:
        super().__init__("the store had not answered when the command was stopped", hint="repeat the command")


def has_size(store: ObjectStore, key: str) -> bool:
    """Whether the object exists, for stores that can't answer this faster than they return the object's size."""
    try:
        store.size(key)
    except ObjectMissingError:
        return False
    return True


def is_key(key: str) -> bool:
    """Whether `key` is valid in every store."""
    return KEY.fullmatch(key) is not None


def check_key(key: str) -> str:
    """Return `key` if it is valid in every store; raise ValueError if not."""
    if not is_key(key):
        raise ValueError(f"not a valid object key: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Return the folder `prefix` without a trailing slash; "" is the root. Raises ValueError."""
    folder = prefix.removesuffix("/")
    return check_key(folder) if folder else ""


def check_range(start: int, length: int) -> None:
    """Raise ValueError if `start` is negative or `length` is not positive."""
    if start < 0 or length < 1:
        raise ValueError(f"not a valid range: {length} bytes from {start}")


@contextmanager
def stoppable_requests() -> Iterator[Callable[[], None]]:
    """Yield a function with which another thread can end the requests that this thread makes in the block.

    An interrupt reaches only the main thread, which may be waiting for this thread. Ended requests raise
    RequestStoppedError; the store may have carried them out. Only requests to S3 stores can be ended.
    """
    stopped = threading.Event()
    before = _stopped.set(stopped)
    try:
        yield stopped.set
    finally:
        _stopped.reset(before)


def check_not_stopped() -> None:
    """Raise RequestStoppedError if this thread's requests were ended (`stoppable_requests`)."""
    stopped = _stopped.get()
    if stopped is not None and stopped.is_set():
        raise RequestStoppedError
