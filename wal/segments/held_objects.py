"""Objects that a process holds in memory while it reads them several times."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore


class OpensStore(Protocol):
    """What a store is opened from: its location, or the held objects of one."""

    def open(self) -> ObjectStore:
        """Open the store without contacting it; raise StoreUrlError."""
        ...


@dataclass
class HeldObjects:
    """The store at `location` for this process, which reads each object from it once. It can't be pickled.

    Objects never change, so what was read is right. All of them are held: the caller knows how large they are.
    """

    location: StoreLocation

    @classmethod
    def of(cls, store: OpensStore) -> HeldObjects:
        """The held objects: those of `store`, if it has them."""
        return store if isinstance(store, HeldObjects) else cls(cast("StoreLocation", store))

    def open(self) -> ObjectStore:
        """Open the store; raise what reading its key raises if it is encrypted."""
        return self._store

    @cached_property
    def _store(self) -> ObjectStore:
        raw = cast("ObjectStore", _HoldingStore(self.location.open_raw()))
        encryption = self.location.encryption
        return encryption.for_tasks(self.location.open()).over(raw) if encryption else raw


@dataclass
class _HoldingStore:
    """An ObjectStore that holds what is read from the beginning of an object."""

    raw: ObjectStore
    bodies: dict[str, bytes] = field(default_factory=dict)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """See ObjectStore."""
        # Readers ask for a byte more than there should be. An answer that was cut short is asked for again.
        if len(held := self.bodies.get(key, b"")) >= start + length - 1 > 0:
            return held[start : start + length]
        found = self.raw.read_range(key, start, length)
        if start == 0:
            self.bodies[key] = found
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("stored_offset", "encode", "decode", "stored_size"):
            raise AttributeError(name)
        return getattr(self.raw, name)
