"""How many objects there are, and how large they are together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cutline.storage.store import Listed


@dataclass(slots=True)
class SizeTotal:
    """A number of objects and their total size."""

    objects: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, listed: Iterable[Listed]) -> SizeTotal:
        """The total of objects in a listing."""
        total = cls()
        for one in listed:
            total.add(one.size)
        return total

    def add(self, size_bytes: int) -> None:
        """Count one more object."""
        self.objects += 1
        self.size_bytes += size_bytes
