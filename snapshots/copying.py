"""Copying tables as one moment shows them: slots with exported snapshots on the nodes, and the Spark job of the copy.

What a full snapshot does with all tables, an increment does with those that can't be carried on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fleet.config import Node
from fleet.connections import NodeUnreachableError
from fleet.groups import Table
from fleet.progress import Progress
from fleet.sessions import in_parallel
from snapshots.attempts import ChangedError
from snapshots.base_copy import copy_ranges
from snapshots.base_plan import plan_copy
from snapshots.create import Creating
from snapshots.exported import exported_session
from snapshots.fingerprint import read_fingerprint
from snapshots.jobs import SparkSource, raise_first, run_tasks, started
from snapshots.manifest import StoredObject
from snapshots.points import Point
from wal.slots import ExportedSlot, create_exported_slot, drop_slots


@dataclass(frozen=True, slots=True)
class Copying:
    """What a create copies: `tables` by shard, on `nodes`; `slot` is made on every node."""

    creating: Creating
    nodes: tuple[Node, ...]
    tables: Mapping[str, Sequence[Table]]
    slot: str


@contextmanager
def exported_slots(copying: Copying, progress: Progress) -> Iterator[dict[str, ExportedSlot]]:
    """Slots on all nodes; while the block runs, their exported snapshots can be used."""
    progress.step("slots", total=len(copying.nodes), unit="nodes")

    abandoned = threading.Event()

    def create(node: Node) -> ExportedSlot:
        primary = copying.creating.fleet.node(node.shard)
        waiting = (copying.creating.request.wait_seconds, progress, abandoned)
        slot = create_exported_slot(node, primary, copying.slot, *waiting)
        progress.advance(1)
        progress.reached(Point.SLOT_MADE, node=node.id)
        return slot

    with ExitStack() as stack, ThreadPoolExecutor(max_workers=len(copying.nodes)) as threads:
        futures = {node.id: threads.submit(create, node) for node in copying.nodes}
        problem: BaseException | None = None
        slots: dict[str, ExportedSlot] = {}
        for node, future in futures.items():
            try:
                slots[node] = future.result()
                stack.callback(slots[node].connection.close)
            except BaseException as error:  # noqa: BLE001  # raised below, once all are collected
                problem = problem or error
                abandoned.set()
        if problem:
            raise problem
        yield slots


def check_exported(copying: Copying, slots: Mapping[str, ExportedSlot], fingerprints: Mapping[str, str]) -> None:
    """Raise ChangedError unless every exported snapshot shows the catalogs of these `fingerprints`, by shard.

    Else what is copied there would not be what the definitions say.
    """

    def check(node: Node) -> None:
        with exported_session(node, slots[node.id].snapshot) as connection:
            found = read_fingerprint(connection)
        if found != fingerprints[node.shard]:
            raise ChangedError(f"node {node.id}: its schema was changed while the copy of its tables was begun")

    in_parallel(check, copying.nodes)


def drop_copy_slots(copying: Copying, progress: Progress) -> None:
    """Drop the slots on all nodes; raise NodeUnreachableError where one is left."""
    if left := drop_slots(copying.nodes, copying.slot):
        # The next command drops them, once this operation has failed.
        raise NodeUnreachableError(
            f"node {left[0]}: slot {copying.slot} could not be dropped",
            hint="see the server's log",
            details={"node": left[0]},
        )
    progress.reached(Point.COPY_SLOTS_DROPPED)


def copy_tables(
    copying: Copying, slots: Mapping[str, ExportedSlot], spark: SparkSource, progress: Progress
) -> list[StoredObject]:
    """Copy the tables' rows on every node in a Spark job; raise the first error that a task met."""
    fleet, operation = copying.creating.fleet, copying.creating.operation
    work = {node.id: (node, slots[node.id].snapshot, list(copying.tables[node.shard])) for node in copying.nodes}
    tasks = plan_copy(work, operation.snapshot, operation.id, (fleet.store_url, fleet.store_options))
    session = started(spark, progress)
    progress.step("copy", total=len(tasks), unit="tasks")
    reports = run_tasks(session, copy_ranges, tasks, progress, copying.creating.sessions.watch)
    raise_first([report.problem for report in reports])
    progress.reached(Point.BASE_COPIED)
    return [stored for report in reports for stored in report.objects]
