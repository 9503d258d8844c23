"""Where the objects of a base copy are stored."""

from __future__ import annotations

from dataclasses import dataclass

from cutline.snapshots.records.keys import base_prefix
from cutline.storage.location import StoreLocation


@dataclass(frozen=True, slots=True)
class CopyDestination:
    """The snapshot and the operation that a base copy belongs to, and the store that holds it.

    A task that stored more than `reported_max` objects stores lists of them and reports the lists.
    """

    snapshot: str
    operation: str
    store: StoreLocation
    reported_max: int = 100

    def prefix(self, node: str) -> str:
        """The folder of one node's objects."""
        return base_prefix(self.snapshot, node, self.operation)
