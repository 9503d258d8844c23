"""Make the cut of a create although standbys fail, or primaries restart: make another one, without what has failed.

Only the primaries' archives determine a cut, so a standby that fails costs no more than another cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.watch import SilentNodeError
from cutline.snapshots.create.absent_copies import leave_out_failed
from cutline.snapshots.create.context import ChainState, CreateContext
from cutline.snapshots.create.cut_attempt import CutResult, EndWrites, take_cut
from cutline.snapshots.create.make_cut import pause_seconds
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.slots import drop_slots


def take_cut_without_failed(
    context: CreateContext,
    state: Callable[[], ChainState],
    spark: SparkSource,
    progress: Progress,
    end_writes: EndWrites | None = None,
    rewritten: Callable[[], Mapping[str, set[int]]] = lambda: MappingProxyType({}),
) -> CutResult:
    """Make the cut; if a standby fails that the create can do without, make another cut without it.

    Another cut is also made, up to `retries` times, if a session is lost after the cut's own attempts, for example
    because a primary has crashed; but not of a terminal snapshot, whose writes end before it. `state` and `rewritten`
    are called for every cut: they are those without the standbys that are left out by then.
    """
    left = context.request.retries
    end = None if end_writes is None else _once(end_writes)
    while True:
        try:
            return take_cut(context, state(), spark, progress, end, rewritten())
        except Exception as error:
            if not leave_out_failed(context.sessions, error, progress):
                if end_writes is not None or not isinstance(error, SnapshotError):
                    raise
                left = renew_lost(context, error, left, progress)
            # A copy of tables that failed leaves its slots, also on a standby that is left out now.
            drop_table_slots(context, context.began_with)


def _once(end_writes: EndWrites) -> EndWrites:
    """Return the function that ends all writes only when it is called first."""
    ends: list[Mapping[str, Lsn]] = []

    def end(archiving: SparkSource | None) -> Mapping[str, Lsn]:
        if not ends:
            ends.append(end_writes(archiving))
        return ends[0]

    return end


def drop_table_slots(context: CreateContext, nodes: Iterable[Node]) -> None:
    """Drop the slots for copying tables on these nodes, if there may be any: a silent node takes many seconds."""
    for slot in context.operation.table_slots:
        drop_slots(nodes, slot)


def renew_lost(context: CreateContext, error: SnapshotError, left: int, progress: Progress) -> int:
    """Renew the lock and lost sessions after a pause, with `left` attempts; return how many are left then.

    Raises the error if it is not the loss of a session, and the last one if no attempt is left.
    """
    while isinstance(error, NodeUnreachableError) and not isinstance(error, SilentNodeError) and left > 0:
        seconds = pause_seconds(context.request.retries - left + 1)
        left -= 1
        progress.note(News(f"{error.message}; retrying in {seconds:.1f} s"))
        time.sleep(seconds)
        try:
            context.lock.renew()
        except NodeUnreachableError as other:
            error = other
        else:
            return left
    raise error
