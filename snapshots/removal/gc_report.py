"""What gc found and did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cutline.snapshots.operations.open_operations import OpenOperation
from cutline.snapshots.records.keys import Kind
from cutline.snapshots.removal.garbage import GarbageReason, GarbageVerdict
from cutline.snapshots.removal.size_total import SizeTotal
from cutline.storage.store import Listed, Unfinished


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something to remove: `objects`, deleted in this order, or `leftover`, an unfinished upload."""

    kind: Kind
    why: GarbageReason
    objects: tuple[Listed, ...]
    snapshot: str = ""
    operation: str = ""
    leftover: Unfinished | None = None

    @property
    def sizes(self) -> list[int]:
        """The size in bytes of each."""
        sizes = [one.size for one in self.objects]
        return [*sizes, self.leftover.size_bytes] if self.leftover else sizes


@dataclass(frozen=True, slots=True)
class RefusedRemoval:
    """An object that the store refuses to delete, and why."""

    key: str
    reason: str


class KeptKey(NamedTuple):
    """By what kept objects are counted; `snapshot` is "" for objects of no snapshot."""

    snapshot: str
    reason: GarbageReason
    text: str


@dataclass(slots=True)
class GcReport:
    """What gc found and did. `kept` counts all that is not removed, needed objects included.

    `unsettled` says why earlier operations were not settled first, "" if they were. `unknown` lists what is not
    Cutline's: objects, and folders, which end with a slash.
    """

    grace_seconds: float
    dry_run: bool = False
    unsettled: str = ""
    garbage: list[Garbage] = field(default_factory=list)
    kept: dict[KeptKey, SizeTotal] = field(default_factory=dict)
    open_operations: tuple[OpenOperation, ...] = ()
    unknown: list[str] = field(default_factory=list)
    refused: list[RefusedRemoval] = field(default_factory=list)
    removed: SizeTotal = field(default_factory=SizeTotal)

    def keep(self, snapshot: str, verdict: GarbageVerdict, size_bytes: int) -> None:
        """Count an object that is kept."""
        self.kept.setdefault(KeptKey(snapshot, verdict.why, verdict.text), SizeTotal()).add(size_bytes)
