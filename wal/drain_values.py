"""What a drain is asked for, and what came of it: plain values, which the driver plans with and executors are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fleet.config import Node
from wal.archive import Segment
from wal.versions import Version


@dataclass(frozen=True, slots=True)
class DrainTask:
    """What an executor needs to bring one node's archive up to `finish`.

    `known` are the segments that commits list; later ones are found in the store. `base` is where the
    archive begins. `versions` are the tables' definitions, of one table the old before the new; `begun` are the
    numbers of those that no commit lists yet. `planned` is the number of the last segment that was there when the
    task was planned: later ones must have been written under the same definitions.
    """

    node: Node
    slot: str
    publications: tuple[str, ...]
    snapshot: str
    chain: str
    operation: str
    versions: tuple[Version, ...]
    global_id_form: str
    base: int
    known: tuple[Segment, ...]
    finish: int
    store_url: str
    store_options: Mapping[str, Any] = field(repr=False)  # may hold secrets
    begun: frozenset[int] = frozenset()
    planned: int = 0

    @property
    def definitions(self) -> tuple[Version, ...]:
        """The versions that no commit lists yet."""
        return tuple(version for version in self.versions if version.group.number in self.begun)


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What came of a DrainTask: the segments after the known ones, or the error that ended it."""

    node: str
    segments: tuple[Segment, ...] = ()
    ignored: int = 0
    seconds: float = 0.0
    problem: dict[str, Any] | None = None


def advanced(task: DrainTask, finish: int, known: tuple[Segment, ...]) -> DrainTask:
    """The same task for a later cut, once `known` are archived."""
    return replace(task, finish=finish, known=known)
