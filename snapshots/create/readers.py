"""Read tables on standbys instead of their primaries (`[copies] base = "prefer-standby"`).

A *reader* is the standby on which the tables of its primary are read. Its snapshot is exported after the reader has
replayed its primary up to where the copy begins, so the primary's archive has all changes since the reader's position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import NODES_NAMED_MAX, list_some
from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.base_copy.copy_slots import export_snapshots
from cutline.snapshots.create.context import CreateContext
from cutline.wal.drain.replay import await_standbys
from cutline.wal.drain.slots import ExportedSlot, copy_slot_name, log_standby_snapshot


def choose_readers(sessions: Sessions) -> dict[str, Node]:
    """Return the readers by primary: the first standby of each in fleet.toml that takes part."""
    if not sessions.fleet.spares_primaries:
        return {}
    readers: dict[str, Node] = {}
    for node in sessions.copied_nodes:
        if node.backup_of is not None:
            readers.setdefault(node.shard, node)
    return readers


def note_readers(shards: Collection[str], readers: Mapping[str, Node], sessions: Sessions, progress: Progress) -> None:
    """Note the shards whose tables are read on the primary although fleet.toml prefers a standby."""
    if not sessions.fleet.spares_primaries:
        return
    if alone := [shard for shard in shards if shard not in readers]:
        names = list_some(alone, NODES_NAMED_MAX)
        progress.note(News(f"no standby of {names} takes part: tables are read on the primary"))


@contextmanager
def export_readers_last(
    context: CreateContext, nodes: Sequence[Node], readers: Mapping[str, Node], slot: str, progress: Progress
) -> Iterator[dict[str, ExportedSlot]]:
    """Create the slots of all nodes as `export_snapshots` does, those of the readers last.

    Raises ReplayLagError if a reader does not replay in time what its primary had written when the other slots had been
    created.
    """
    sessions, wait, reader_ids = context.sessions, context.request.wait_seconds, {node.id for node in readers.values()}
    first = [node for node in nodes if node.id not in reader_ids]
    last = [node for node in nodes if node.id in reader_ids]

    def log_snapshot(primary: Node) -> Lsn:
        with raising_unreachable(primary):
            return log_standby_snapshot(sessions.connections[primary.id])

    with ExitStack() as stack:
        slots: dict[str, ExportedSlot] = {}
        is_kept = slot != copy_slot_name(context.operation.id)
        if not is_kept:
            context.operation.table_slots.add(slot)
        if first:
            slots |= stack.enter_context(export_snapshots(context.fleet, first, slot, wait, progress, is_kept=is_kept))
        if last:
            # The current position may be after a page's header, or not be flushed for a long time: replay would stop
            # before it.
            needed = in_parallel(log_snapshot, [sessions.fleet.node(shard) for shard in readers])
            await_standbys(
                last, dict(zip(readers, needed, strict=True)), context.standby_wait_seconds, progress, "the base copy"
            )
            slots |= stack.enter_context(export_snapshots(context.fleet, last, slot, wait, progress))
        yield slots
