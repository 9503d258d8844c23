"""The slots whose exported snapshots a base copy reads: make, check and drop them on all nodes.

A full snapshot keeps its slots for the chain's WAL. An increment drops those that it made to copy tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager

from cutline.fleet.config import Fleet, Node
from cutline.fleet.nodes.connections import NodeUnreachableError
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.exported_snapshot import open_exported
from cutline.snapshots.ddl.attempts import ChangedError
from cutline.snapshots.ddl.fingerprint import read_fingerprint
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.wal.slots.slots import ExportedSlot, create_exported_slot, drop_slots


@contextmanager
def export_snapshots(
    fleet: Fleet, nodes: Sequence[Node], name: str, wait_seconds: float, progress: Progress
) -> Iterator[dict[str, ExportedSlot]]:
    """Create the slot `name` on all `nodes`; yields the slots by node id, whose exported snapshots last for the block.

    Raises SlotWaitError if older transactions don't end within `wait_seconds`, SlotLostError, NodeUnreachableError.
    """
    progress.step("slots", total=len(nodes), unit="nodes")
    abandoned = threading.Event()
    futures: list[Future[None]] = []
    made: dict[str, ExportedSlot] = {}
    problems: list[BaseException] = []

    def create(node: Node) -> None:
        try:
            primary = fleet.node(node.shard)
            made[node.id] = create_exported_slot(node, primary, name, wait_seconds, progress, abandoned)
            progress.advance(1)
            progress.reached(CrashPoint.SLOT_MADE, node=node.id)
        except BaseException as error:  # noqa: BLE001  # raised below, once all have ended
            # At once: the others may wait for long, and then give up for a reason that matters less.
            problems.append(error)
            abandoned.set()

    with ExitStack() as stack, ThreadPoolExecutor(max_workers=len(nodes)) as threads:
        stack.callback(_close_made, futures, made)
        try:
            # An interrupt leaves those that have begun.
            for node in nodes:
                futures.append(threads.submit(create, node))
            # Not their results: an interrupt may be handled as late as one of them has failed, and matters more.
            wait(futures)
        except BaseException:
            # The executor waits for all that have begun.
            abandoned.set()
            raise
        if problems:
            raise problems[0]
        yield {node.id: made[node.id] for node in nodes}


def _close_made(futures: Sequence[Future[None]], made: Mapping[str, ExportedSlot]) -> None:
    # Another interrupt may have ended the executor's wait for one that is made all the same.
    wait(futures)
    for slot in made.values():
        slot.connection.close()


def check_exported(nodes: Sequence[Node], slots: Mapping[str, ExportedSlot], fingerprints: Mapping[str, str]) -> None:
    """Raise ChangedError unless the catalogs in every exported snapshot have these `fingerprints`, by shard.

    Otherwise the copied rows would not match the definitions that the commit lists.
    """

    def check(node: Node) -> None:
        with open_exported(node, slots[node.id].snapshot) as connection:
            fingerprint = read_fingerprint(connection)
        if fingerprint != fingerprints[node.shard]:
            raise ChangedError(f"node {node.id}: DDL was committed while the base copy was started")

    in_parallel(check, nodes)


def drop_copy_slots(nodes: Sequence[Node], name: str, progress: Progress) -> None:
    """Drop the slot `name` on all nodes; raise NodeUnreachableError if one is left."""
    if left := drop_slots(nodes, name):
        # The next command drops it when it settles this operation.
        raise NodeUnreachableError(
            f"node{'s' if len(left) > 1 else ''} {', '.join(left)}: slot {name} could not be dropped",
            hint="see the server's log; the next create drops the slot",
            details={"node": left[0]},
        )
    progress.reached(CrashPoint.COPY_SLOTS_DROPPED)
