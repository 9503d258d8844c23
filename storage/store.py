"""What Cutline needs of an object store, and the situations that one can be in.

Every sentence of `ObjectStore` is tested, for every implementation, by ObjectStoreContract. Nothing here
opens a connection or imports fsspec.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias, runtime_checkable

from storage.errors import IndeterminateError, RefusedError, SnapshotError, UnreachableError

# `ObjectStore.list` hides the builtin inside the class, so its methods name their results by these.
Keys: TypeAlias = list[str]
Inventory: TypeAlias = "list[Listed]"
Leftovers: TypeAlias = "list[Unfinished]"

# fsspec reads meaning into ? * [ ] # (patterns, versions), and a leading dot is where LocalStore hides
# what is not an object yet. So no key has them, in any store.
SEGMENT = r"[^\x00-\x1f\x7f/\\?*\[\]#%.][^\x00-\x1f\x7f/\\?*\[\]#%]*"
KEY = re.compile(f"{SEGMENT}(?:/{SEGMENT})*")


@dataclass(frozen=True, slots=True, order=True)
class Listed:
    """An object as a listing has it: its size in bytes, and when it was created, by the store's clock."""

    key: str
    size: int
    created_at: datetime


@dataclass(frozen=True, slots=True, order=True)
class Unfinished:
    """What a create that died has left. It is no object and no listing shows it, but it takes room.

    `id` means something to the store alone. `key` is what it was to become, "" where nothing tells; `size_bytes` is
    what is known to be there, `began_at` when it began, or last got something where the store tells.
    """

    key: str
    id: str
    size_bytes: int
    began_at: datetime


class ObjectStore(Protocol):
    """Objects created whole, once, under keys like `snapshots/nightly/snapshot.json`.

    A key is one or more segments joined by `/`; none is empty or begins with a dot (ValueError). No key may
    be another one's folder. Every method may be called from several threads at once, always asks the store
    and never a cache, and raises StoreUnreachableError when the store does not answer.
    """

    @property
    def url(self) -> str:
        """The store's address, without credentials, for messages."""
        ...

    def create(self, key: str, body: bytes) -> None:
        """Create `key` whole or not at all, durably, by one atomic conditional put.

        Raises ObjectExistsError if the key is taken: its object is then not what this call wrote. Raises
        AnswerLostError if the put may or may not have been stored: read the key back.
        StoreUnreachableError means that this call stored nothing; WritingRefusedError, which is one, that it may
        store nothing here.
        """
        ...

    def read(self, key: str) -> bytes:
        """Return the whole object; raise ObjectMissingError if there is none."""
        ...

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes from offset `start`, fewer only where the object ends before.

        Raises ObjectMissingError, and ValueError if `start` is negative or `length` is not positive.
        """
        ...

    def size(self, key: str) -> int:
        """Return the object's size in bytes; raise ObjectMissingError if there is none."""
        ...

    def digest(self, key: str) -> str:
        """Return the SHA-256 of the object's bytes as 64 hex digits, reading them piece by piece.

        Raises ObjectMissingError.
        """
        ...

    def exists(self, key: str) -> bool:
        """Tell whether there is an object under exactly this key."""
        ...

    def list(self, prefix: str) -> Keys:
        """Return every key below the folder `prefix` at any depth, sorted; "" is the whole store.

        `a/b` lists `a/b/c` but neither `a/bc` nor an object `a/b` itself. Objects created before the call
        are listed, half-written ones never.
        """
        ...

    def list_children(self, prefix: str) -> Keys:
        """Return the names one level below `prefix`, sorted: objects, and folders that hold any."""
        ...

    def inventory(self, prefix: str) -> Inventory:
        """Return what `list` does, with sizes and times."""
        ...

    def delete(self, key: str) -> None:
        """Remove the object; no error if there is none.

        Raises DeletionRefusedError where a policy or a lock keeps it: the object is there as before.
        """
        ...

    def unfinished(self) -> Leftovers:
        """Return what creates that died, or are under way, have left in the store; sorted by key."""
        ...

    def abandon(self, leftover: Unfinished) -> None:
        """Remove what a create left; no error if it is gone. A create that is still under way then fails.

        Raises DeletionRefusedError.
        """
        ...


@runtime_checkable
class CreatesInParts(Protocol):
    """A store that sends large objects in parts, which is another promise to keep than that of a put."""

    def create_in_parts(self, key: str, body: bytes) -> None:
        """Do what ObjectStore.create does with a large object, whatever the size of `body`."""
        ...


class ObjectExistsError(RefusedError):
    """The key of a create is taken by another object."""

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
            f"store {url}: there is no object {key}",
            hint="check that the store is the right one, and that nothing else deletes from it",
            details={"store": url, "object": key},
        )


class AnswerLostError(IndeterminateError):
    """A create was sent and its answer did not come: the object may be stored, now or a little later."""

    def __init__(self, *, url: str, key: str, reason: str) -> None:
        super().__init__(
            f"store {url}: the answer to creating {key} was lost ({reason})",
            hint="run the command again: it first finds out whether the object was stored",
            details={"store": url, "object": key},
        )


class StoreUnreachableError(UnreachableError):
    """The store does not answer, or answers no; nothing was stored."""

    def __init__(self, *, url: str, reason: str, hint: str = "") -> None:
        super().__init__(
            f"store {url}: {reason}",
            hint=hint or "check store and [store_options] in fleet.toml, the network and the credentials",
            details={"store": url},
        )


class CredentialsExpiredError(StoreUnreachableError):
    """The store no longer takes the credentials, and there are no newer ones; nothing was stored."""


class WritingRefusedError(StoreUnreachableError):
    """A policy or the folder's permissions let the store be read only; nothing was stored."""

    def __init__(self, *, url: str, reason: str, hint: str = "") -> None:
        hint = hint or "use credentials that may create objects: docs/storage.md, Policies"
        super().__init__(url=url, reason=f"creating objects is refused: {reason}", hint=hint)


class DeletionRefusedError(RefusedError):
    """The store keeps the object, because a policy or a lock on it forbids deleting; `until` where it says that."""

    def __init__(self, *, url: str, key: str, reason: str, until: datetime | None = None) -> None:
        details: dict[str, object] = {"store": url, "object": key}
        super().__init__(
            f"store {url}: object {key} can't be deleted: {reason}",
            hint="repeat once its lock has expired, or with credentials that may delete",
            details=details | ({"until": until.isoformat()} if until else {}),
        )
        self.until = until


class StoreUnfitError(RefusedError):
    """The store lacks something that snapshots rely on."""

    def __init__(self, *, url: str, lack: str) -> None:
        super().__init__(
            f"store {url}: {lack}",
            hint="use a store that honours conditional puts (If-None-Match: *), such as AWS S3, or a folder",
            details={"store": url},
        )


def check_key(key: str) -> str:
    """Return `key` if it can name an object in every store; raise ValueError if not."""
    if not KEY.fullmatch(key):
        raise ValueError(f"not a key for an object: {key!r}")
    return key


def check_prefix(prefix: str) -> str:
    """Return the folder `prefix` without a slash at its end; "" is the root. Raises ValueError."""
    folder = prefix.removesuffix("/")
    return check_key(folder) if folder else ""


def check_range(start: int, length: int) -> None:
    """Raise ValueError unless the range begins in an object and has a byte."""
    if start < 0 or length < 1:
        raise ValueError(f"not a range of bytes: {length} from {start}")


def redact_url(url: str) -> str:
    """Return `url` without user, password, query and fragment, which may be secret.

    It takes any text, because it names URLs that were refused, and rather loses a part of the path: a
    password may hold the very characters that end one.
    """
    protocol, separator, rest = url.partition("://")
    authority = rest.partition("/")[0]
    if "@" in authority or ":" in authority:
        rest = rest.rpartition("@")[2]
    return f"{protocol}{separator}{re.split('[?#]', rest)[0]}".rstrip("/")
