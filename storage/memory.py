"""An object store in this process's memory, for tests: `memory://name`."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock

from cutline.storage.clock import utc_now
from cutline.storage.digest import digest
from cutline.storage.store import (
    Inventory,
    Keys,
    Leftovers,
    Listed,
    ObjectExistsError,
    ObjectMissingError,
    Unfinished,
    check_key,
    check_prefix,
    check_range,
    is_key,
)


@dataclass(frozen=True, slots=True)
class InMemoryStore:
    """An ObjectStore in this process's memory: other processes can't see it, and it is lost when the process ends."""

    url: str
    _objects: dict[str, bytes] = field(default_factory=dict, repr=False)
    _created_at: dict[str, datetime] = field(default_factory=dict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    def expect_answers(self) -> None:
        pass

    def create(self, key: str, body: bytes) -> None:
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExistsError(url=self.url, key=key)
            self._objects[key] = bytes(body)
            self._created_at[key] = utc_now()

    def read(self, key: str) -> bytes:
        with self._lock:
            body = self._objects.get(check_key(key))
        if body is None:
            raise ObjectMissingError(url=self.url, key=key)
        return body

    def read_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return self.read(key)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.read(key))

    def digest(self, key: str) -> str:
        return digest(self.read(key))

    def exists(self, key: str) -> bool:
        with self._lock:
            return check_key(key) in self._objects

    def list(self, prefix: str) -> Keys:
        folder = check_prefix(prefix)
        start = f"{folder}/" if folder else ""
        with self._lock:
            return sorted([key for key in self._objects if key.startswith(start) and is_key(key)])

    def list_children(self, prefix: str) -> Keys:
        folder = check_prefix(prefix)
        skip = len(folder) + 1 if folder else 0
        return sorted({key[skip:].partition("/")[0] for key in self.list(folder)})

    def inventory(self, prefix: str, after: str = "") -> Inventory:
        keys = [key for key in self.list(prefix) if key > after]
        with self._lock:
            return [Listed(key, len(self._objects[key]), self._created_at[key]) for key in keys if key in self._objects]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def unfinished(self) -> Leftovers:
        return []

    def abandon(self, leftover: Unfinished) -> None:
        pass
