"""The interface that Cutline needs of an object store, and the store's errors.

ObjectStoreContract tests every sentence of `ObjectStore` for every implementation. Nothing here opens a connection or
imports fsspec.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Protocol, TypeAlias, runtime_checkable

from cutline.storage.errors import IndeterminateError, RefusedError, SnapshotError, UnreachableError

# `ObjectStore.list` shadows the builtin inside the class, so its methods use these names.
Keys: TypeAlias = list[str]
Inventory: TypeAlias = "list[Listed]"
Leftovers: TypeAlias = "list[Unfinished]"

# fsspec interprets ? * [ ] # (patterns, versions), and LocalStore hides unfinished objects behind a leading dot. So
# keys have none of these, in any store. A surrogate is how Python reads a file name that is not UTF-8.
SEGMENT = r"[^\x00-\x1f\x7f/\\?*\[\]#%\ud800-\udfff.][^\x00-\x1f\x7f/\\?*\[\]#%\ud800-\udfff]*"
KEY = re.compile(f"{SEGMENT}(?:/{SEGMENT})*")
# A thread that stores for another thread runs in that thread's context.
_stopped: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


@dataclass(frozen=True, slots=True, order=True)
class Listed:
    """An object in a listing: its size in bytes, and when it was created, by the store's clock."""

    key: str
    size: int
    created_at: datetime


@dataclass(frozen=True, slots=True, order=True)
class Unfinished:
    """The remains of a create that died. It is not an object and not listed, but takes space.

    `id` is meaningful only to the store. `key` is the key of the create, "" if unknown. `size_bytes` is the known size.
    `began_at` is when the create began, or when the last part arrived if the store reports that.
    """

    key: str
    id: str
    size_bytes: int
    began_at: datetime


class ObjectStore(Protocol):
    """Objects created complete and once, under keys like `snapshots/nightly/snapshot.json`.

    A key is one or more segments joined by `/`; none is empty or begins with a dot (ValueError). No key may be the
    folder of another key. Objects whose names are no keys, written by other programs, are neither listed nor deleted:
    every name that a listing returns is valid. All methods are thread-safe, always ask the store and never a cache,
    and raise StoreUnreachableError if the store does not answer.
    """

    @property
    def url(self) -> str:
        """The store's address, without credentials, for messages."""
        ...

    def expect_answers(self) -> None:
        """Take it that the store has answered another process of the command.

        So its folder is not created if it is missing, and a store that does not answer is waited for.
        """
        ...

    def create(self, key: str, body: bytes) -> None:
        """Create `key` completely or not at all, durably, by one atomic conditional put.

        Raises ObjectExistsError if the key is taken by an object that this call did not write; AnswerLostError if it is
        not known whether the object was stored: read the key back. Raises StoreUnreachableError if this call stored
        nothing, or its subclass WritingRefusedError if it may not store anything here. Raises EncryptionIgnoredError if
        this call stored it, but the server has not encrypted it as asked.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return the whole object; raise ObjectMissingError if there is none."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start`, fewer only if the object ends before.

        Raises ObjectMissingError, and ValueError if `start` is negative or `length` is not positive.
        """
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes; raise ObjectMissingError if there is none."""
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
        listed, and no unfinished objects.
        """
        ...

    def list_children(self, prefix: str) -> Keys:
        """Return the names one level below `prefix`, sorted: objects, and folders that hold any."""
        ...

    def inventory(self, prefix: str) -> Inventory:
        """Return the objects that `list` lists, with sizes and times."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error if there is none.

        Raises DeletionRefusedError if a policy or a lock protects it: the object is then unchanged.
        """
        ...

    def unfinished(self) -> Leftovers:
        """Return the leftovers of creates that died, and of those still running, sorted by key."""
        ...

    def abandon(self, leftover: Unfinished) -> None:
        """Remove a leftover; no error if it is gone. If its create is still running, that fails.

        Raises DeletionRefusedError.
        """
        ...


@runtime_checkable
class CreatesInParts(Protocol):
    """A store that sends large objects in parts: their condition is enforced separately from that of a put."""

    def create_in_parts(self, key: str, body: bytes) -> None:
        """Create the object in parts, as ObjectStore.create does with large objects; `body` may have any size."""
        ...


class ObjectExistsError(RefusedError):
    """Another object has the key of a create."""

    def __init__(self, *, url: str, key: str) -> None:
        super().__init__(
            f"store {url}: object {key} exists already",
            hint="another operation created it; see: snapshot list",
            details={"store": url, "object": key},
        )


class ObjectMissingError(SnapshotError):
    """An object that should be there is not."""

    exit_code = RefusedError.exit_code

    def __init__(self, *, url: str, key: str) -> None:
        super().__init__(
            f"store {url}: object {key} does not exist",
            hint="check that this is the right store, and that nothing else deletes from it",
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
    """The store has stored the object, but not encrypted as [store_options] asks."""

    def __init__(self, *, url: str, key: str, asked: str, found: str) -> None:
        super().__init__(
            f"store {url}: object {key} is stored {found}, although server_side_encryption asks for {asked}",
            hint="use a server and a key that do, or leave out server_side_encryption and kms_key_id in"
            " [store_options]; see docs/storage.md, Encryption at rest by the server",
            details={"store": url, "object": key},
        )


class StoreUnreachableError(UnreachableError):
    """The store does not answer, or refuses the request; nothing was stored."""

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
        hint = hint or "use credentials that may create objects: docs/storage.md, Policies"
        super().__init__(url=url, reason=f"creating objects was refused: {reason}", hint=hint)


class DeletionRefusedError(RefusedError):
    """A policy or a lock forbids deleting the object; a lock ends at `until`, if that is known."""

    def __init__(self, *, url: str, key: str, reason: str, until: datetime | None = None) -> None:
        details: dict[str, object] = {"store": url, "object": key}
        super().__init__(
            f"store {url}: object {key} can't be deleted: {reason}",
            hint="repeat the command after the lock has expired, or with credentials that may delete",
            details=details | ({"until": until.isoformat()} if until else {}),
        )
        self.until = until


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure in terms of the store: the reason, and its effect on the request."""

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


@contextmanager
def store_errors(url: str, key: str, explain: Callable[[Exception], Fault]) -> Iterator[None]:
    """Turn errors of a library in this block into those of a store; the libraries' have no common base class."""
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
    """Return what to do about an HTTP status of a store that refused a request or failed; "" if that is not known."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "check the credentials and their permissions: docs/storage.md, Policies"
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return "let commands make fewer requests at a time, or repeat the command in some minutes"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.NOT_IMPLEMENTED:
        return "look at the store's log, or its provider's status page; repeat the command once it works"
    return ""


class StoreUnfitError(RefusedError):
    """The store lacks something that snapshots depend on."""

    def __init__(self, *, url: str, lack: str) -> None:
        super().__init__(
            f"store {url}: {lack}",
            hint="use a store that honours conditional puts (If-None-Match: *), such as AWS S3, or a folder",
            details={"store": url},
        )


class RequestStoppedError(UnreachableError):
    """Nobody waits for the store's answer any more."""

    def __init__(self) -> None:
        super().__init__("the store had not answered when the command was stopped", hint="repeat the command")


def has_size(store: ObjectStore, key: str) -> bool:
    """Whether there is an object under this key: for stores that answer that no faster than the object's size."""
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
    """Yield a function for other threads, which ends the requests that this thread makes in the block.

    An interrupt reaches the main thread alone, which may be waiting for this thread. The requests raise
    RequestStoppedError; whether the store has carried them out is not known. Only S3 stores end them.
    """
    stopped = threading.Event()
    before = _stopped.set(stopped)
    try:
        yield stopped.set
    finally:
        _stopped.reset(before)


def check_not_stopped() -> None:
    """Raise RequestStoppedError if the requests of this thread are to end."""
    stopped = _stopped.get()
    if stopped is not None and stopped.is_set():
        raise RequestStoppedError
