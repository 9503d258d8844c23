"""What a drain is asked for, and what came of it: plain values, which the driver plans with and executors are sent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fleet.config import Node
from fleet.lsn import Lsn
from storage.errors import ErrorReport
from storage.location import StoreLocation
from wal.segments.archive import ArchivedSegment, Segment
from wal.segments.definitions import Definition


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
    versions: tuple[Definition, ...]
    global_id_form: str
    base: Lsn
    known: tuple[Segment, ...]
    finish: Lsn
    store: StoreLocation
    begun: frozenset[int] = frozenset()
    planned: int = 0

    @property
    def definitions(self) -> tuple[Definition, ...]:
        """The versions that no commit lists yet."""
        return tuple(version for version in self.versions if version.group.number in self.begun)


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What came of a DrainTask: the segments after the known ones, or the error that ended it."""

    node: str
    segments: tuple[ArchivedSegment, ...] = ()
    ignored: int = 0
    seconds: float = 0.0
    problem: ErrorReport | None = None


def next_task(task: DrainTask, finish: Lsn, known: tuple[Segment, ...]) -> DrainTask:
    """The same task for a later cut, once `known` are archived."""
    return replace(task, finish=finish, known=known)
