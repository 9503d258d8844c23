"""The task, the report and an error of a drain: plain values that the driver and its executors exchange."""

from __future__ import annotations

import pyarrow as pa
from msgspec import UNSET, Struct, UnsetType

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.timeline_history import TimelineHistory
from cutline.storage.errors import BusyError, ErrorReport
from cutline.storage.location import StoreLocation
from cutline.wal.drain.lineage import KnownMarker
from cutline.wal.segments.archive import ArchivedSegment, Definition, Segment


class DrainBusyError(BusyError):
    """Another process is writing to the archive."""


class DrainTask(Struct, frozen=True):
    """Everything an executor needs to bring one node's archive up to `finish`.

    `archive` is the operation that began the archive, `base` is where the archive begins, and `last` is the last
    segment that a commit lists; later segments are found in the store. `definitions` are the tables' definitions, for
    each table in the order in which they took effect; `unlisted_numbers` are the group numbers of definitions that no
    commit lists yet. `planned` is the number of the last segment that existed when the task was planned: later segments
    must have been written under the same definitions. The slot is advanced only while the store belongs to the fleet
    with `fleet_id`, if that is known. If `may_be_idle`, nothing is stored for a node whose WAL since `last` contains
    only markers. `last_marker` is the finish marker of the chain's last cut, if it has one. `read_before` are segments
    after `last` that this process has read or written, which need not be read again. `history` is that of the timeline
    of the shard's primary.
    """

    node: Node
    slot: str
    publications: tuple[str, ...]
    snapshot: str
    archive: str
    operation: str
    definitions: tuple[Definition, ...]
    global_id_form: str
    base: Lsn
    last: Segment | None
    finish: Lsn
    store: StoreLocation
    unlisted_numbers: frozenset[int] = frozenset()
    planned: int = 0
    fleet_id: str | None = None
    may_be_idle: bool = False
    last_marker: KnownMarker | None = None
    read_before: tuple[ArchivedSegment, ...] = ()
    history: TimelineHistory | UnsetType = UNSET

    @property
    def wal_bytes(self) -> int:
        """The bytes of WAL between the last segment that a commit lists and `finish`."""
        return max(self.finish - (self.last.through if self.last else self.base), 0)

    @property
    def unlisted_definitions(self) -> tuple[Definition, ...]:
        """The definitions that no commit lists yet."""
        if not self.unlisted_numbers:
            return ()
        return tuple(definition for definition in self.definitions if definition.group.number in self.unlisted_numbers)


class DrainReport(Struct, frozen=True):
    """The result of a DrainTask: the segments after `DrainTask.last`, or the error that ended it.

    `ignored` counts the changes to tables that are not in a group, and `dropped` has the positions of transactions
    with such changes, as in Decoded. `idle` holds the events of an idle node (SEGMENT_SCHEMA, all of them markers), for
    which nothing was stored.
    """

    node: str
    segments: tuple[ArchivedSegment, ...] = ()
    ignored: int = 0
    seconds: float = 0.0
    problem: ErrorReport | None = None
    idle: pa.Table | None = None
    dropped: frozenset[int] = frozenset()


def archive_busy_error(task: DrainTask) -> DrainBusyError:
    """Return the error for an archive to which another process is writing."""
    return DrainBusyError(
        f"node {task.node.id}: another process is archiving WAL of snapshot {task.snapshot}",
        hint="wait until it has finished, then repeat the command",
        details={"node": task.node.id},
    )
