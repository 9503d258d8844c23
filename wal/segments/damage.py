"""Damaged objects: reading objects from the store and verifying them against their commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from msgspec import Struct, field

from cutline.fleet.messages import NEW_CHAIN
from cutline.storage.digest import digest
from cutline.storage.errors import ChainEnd, RefusedError
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectMissingError, ObjectStore, StoreUnreachableError
from cutline.storage.stored_form import UndecryptableError, stored_form

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_BYTES_MAX = 64 << 20


class ObjectDamagedError(RefusedError):
    """A stored object does not match its commit. `kind` is missing, size, digest, unreadable, rows or partition.

    `hints` are lines to put before the usual hint for damaged objects; `more` contains further details.
    """

    def __init__(
        self,
        *,
        key: str,
        kind: str,
        node: str,
        detail: str,
        hints: Sequence[str] = (),
        more: Mapping[str, object] | None = None,
    ) -> None:
        _, *names = key.split("/")
        name = names[0] if names else "NAME"
        usual = (
            f"to replace it from the other copy or a copy of the store: snapshot repair {name}   or {NEW_CHAIN}"
            "   (to find other damage: snapshot check)"
        )
        super().__init__(
            f"object {key} of node {node}: {detail}",
            hint=[*hints, usual],
            ends_chain=ChainEnd.PERHAPS,
            details={"object": key, "kind": kind, "node": node, **(more or {})},
        )
        self.kind, self.key, self.node, self.detail = kind, key, node, detail


def read_listed(store: ObjectStore, node: str, key: str, listed: tuple[int, str], start: int = 0) -> bytes:
    """Read an object from `start` on, and verify that the stored bytes are the ones that were committed.

    `listed` is the size of the whole object and the digest of the stored part to be read. Never reads more than that
    size, even if the object has grown. Raises ObjectDamagedError, and StoreUnreachableError if the store's answers are
    cut short.
    """
    form, (written_size, expected) = stored_form(store), listed
    raw, size, offset = form.raw, form.stored_size(written_size), form.stored_offset(start)
    try:
        stored = raw.read_range(key, offset, size - offset + 1)
        if len(stored) != size - offset:
            # A single truncated answer proves nothing about the object, so read it again.
            stored = raw.read_range(key, offset, size - offset + 1)
        size_found = size if len(stored) == size - offset else raw.size(key)
    except ObjectMissingError:
        raise ObjectDamagedError(key=key, kind="missing", node=node, detail="it is not in the store") from None
    if size_found != size:
        detail = f"it is {size_found} bytes long instead of {size}"
        raise ObjectDamagedError(key=key, kind="size", node=node, detail=detail)
    if len(stored) != size - offset:
        raise StoreUnreachableError(url=store.url, reason=f"reading {key} ended after {len(stored)} bytes")
    if digest(stored) != expected:
        detail = "its contents differ from those that were committed"
        raise ObjectDamagedError(key=key, kind="digest", node=node, detail=detail)
    try:
        return form.decode(key, stored, start)
    except UndecryptableError as error:
        raise ObjectDamagedError(key=key, kind="unreadable", node=node, detail=error.message) from None


class OpensStore(Protocol):
    """Where to get a store: its location, or a HeldObjects."""

    def open(self) -> ObjectStore:
        """Open the store without contacting it; raise StoreUrlError."""
        ...


class HeldRows(NamedTuple):
    """The rows of a segment: the rows `first` to `end` - 1 of `table` (SEGMENT_SCHEMA). Changes come before events.

    They were verified against the segment's commit.
    """

    table: pa.Table
    first: int
    end: int

    def part(self, skipped: int = 0) -> pa.Table:
        """Return the rows without the first ones, which are `skipped`."""
        return self.table.slice(self.first + skipped, self.end - self.first - skipped)


class HeldObjects(Struct, dict=True):
    """The store at `location`; this process reads each of its objects only once. It can't be pickled.

    Objects never change, so the held bytes stay valid. Every object that is read is kept in memory, so use it for small
    objects. `rows` are those of some segments, by key, so that these are not expanded again.
    """

    location: StoreLocation
    rows: dict[str, HeldRows] = field(default_factory=dict)
    rows_bytes: int = 0

    @classmethod
    def of(cls, store: OpensStore) -> HeldObjects:
        """Return `store` if it is a HeldObjects, else a HeldObjects for it."""
        return store if isinstance(store, HeldObjects) else cls(cast("StoreLocation", store))

    def open(self) -> ObjectStore:
        """Open the store; raise any error from reading its key if it is encrypted."""
        return self._store

    def keep_rows(self, table: pa.Table, counts: Mapping[str, int]) -> None:
        """Keep the rows of segments unless that takes too much memory; `counts` are their numbers of rows, in order."""
        if self.rows_bytes + table.nbytes > ROWS_BYTES_MAX:
            return
        self.rows_bytes += table.nbytes
        first = 0
        for key, count in counts.items():
            self.rows[key] = HeldRows(table, first, first + count)
            first += count

    @cached_property
    def _store(self) -> ObjectStore:
        raw = cast("ObjectStore", _HoldingStore(self.location.open_raw()))
        encryption = self.location.encryption
        return encryption.for_tasks(self.location.open()).over(raw) if encryption else raw


class _HoldingStore(Struct):
    """An ObjectStore that keeps in memory the bytes read from the beginning of each object."""

    raw: ObjectStore
    bodies: dict[str, bytes] = field(default_factory=dict)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        # Readers request one byte more than the object should have. Don't reuse an answer that was cut short.
        if len(held := self.bodies.get(key, b"")) >= start + length - 1 > 0:
            return held[start : start + length]
        found = self.raw.read_range(key, start, length)
        if start == 0:
            self.bodies[key] = found
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "own_form":
            raise AttributeError(name)
        return getattr(self.raw, name)
