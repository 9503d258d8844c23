"""The work of an increment: a cut, the WAL up to it archived, the commit.

The archive is all that is written before the commit. An attempt that dies leaves segments that the next one
begins with, and a slot that stands where the archive ends or before.
"""

from __future__ import annotations

import time

from fleet.lock import FleetLock
from fleet.progress import Progress
from fleet.publications import publication_names
from snapshots.commits import publish
from snapshots.continuable import Continuing, check_tables
from snapshots.counting import counts_of
from snapshots.cutting import Before, CutPlan, make_cut
from snapshots.exclusive import check_exclusive
from snapshots.jobs import SparkSource
from snapshots.manifest import Commit
from snapshots.operations import Operation
from snapshots.points import Point
from snapshots.schema import read_sequences
from wal.drain import DrainTask
from wal.slots import slot_name


def take_increment(
    continuing: Continuing,
    lock: FleetLock,
    operation: Operation,
    spark: SparkSource,
    progress: Progress,
    began: float,
) -> Commit:
    """Take the increment and commit it; `began` is when the command did (time.monotonic)."""
    progress.reached(Point.INTENT_STORED)
    sessions, chain, store = continuing.sessions, continuing.chain, continuing.store
    made = make_cut(lock, _cut_plan(continuing, operation.id), spark, store, progress)
    check_tables(sessions, chain.part)
    progress.step("commit")
    sequences = sessions.ask_primaries(read_sequences)
    progress.reached(Point.SEQUENCES_READ)
    commit = Commit(
        snapshot=chain.name,
        increment=operation.increment,
        operation=operation.id,
        chain=chain.full.operation,
        created_at=operation.began_at,
        seconds=time.monotonic() - began,
        cut=made.record,
        segments=made.segments,
        sequences=sequences,
        counts=counts_of(sessions.nodes, made),
        comment=continuing.request.comment,
        left_out=continuing.left_out,
    )
    check_exclusive(lock, store, operation)
    publish(store, commit)
    progress.reached(Point.COMMITTED)
    return commit


def _cut_plan(continuing: Continuing, operation: str) -> CutPlan:
    chain, fleet = continuing.chain, continuing.fleet
    tasks = {
        node.id: DrainTask(
            node=node,
            slot=slot_name(chain.full.operation),
            publications=publication_names(chain.part.fleet_id),
            snapshot=chain.name,
            chain=chain.full.operation,
            operation=operation,
            groups={group.name: group for group in chain.groups(node.id)},
            oids={state.oid: name for name, state in chain.part.tables.get(node.shard, {}).items()},
            global_id_form=fleet.global_id,
            base=chain.part.base[node.id],
            known=chain.segments(node.id),
            finish=0,
            store_url=fleet.store_url,
            store_options=fleet.store_options,
        )
        for node in continuing.sessions.nodes
    }
    cuts = chain.last.cut.cut.nodes
    before = {node: Before(cut.position, cut.undecided) for node, cut in cuts.items()}
    return CutPlan(chain.full.operation, operation, tasks, before, continuing.request.retries)
