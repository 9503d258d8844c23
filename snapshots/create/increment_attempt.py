"""The work of an increment: a cut, the WAL up to it archived, the commit.

Before the commit only the archive and the copies of tables that can't be converted are written. An attempt that dies
leaves segments that the next one begins with, and a slot that stands where the archive ends, or before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from fleet.lsn import Lsn
from fleet.progress import Progress
from fleet.tables.left_out import read_left_out
from snapshots.create.append_only_counters import check_counted, since_of, with_counters, with_warnings
from snapshots.create.chain_state import state_of
from snapshots.create.commit_counts import counts_of
from snapshots.create.context import CreateContext
from snapshots.create.continuable import rules_since
from snapshots.create.cut_attempt import take_cut
from snapshots.create.prepared_transactions import await_prepared
from snapshots.create.terminal import check_final, end_writes
from snapshots.ddl.table_changes import NodeTables
from snapshots.operations.crash_points import CrashPoint
from snapshots.operations.exclusive import check_exclusive
from snapshots.operations.operation import commit_operation
from snapshots.operations.spark_jobs import SparkSource
from snapshots.records.chain import Chain
from snapshots.records.commit import Increment, Previous
from snapshots.records.large_objects import with_large_object_counts


def take_increment(
    context: CreateContext,
    chain: Chain,
    seen: Mapping[str, NodeTables],
    spark: SparkSource,
    progress: Progress,
    began: float,
) -> Increment:
    """Take the increment and commit it.

    `seen` are the primaries' catalogs as the checks read them; `began` is when the command did (time.monotonic).
    """
    progress.reached(CrashPoint.INTENT_STORED)
    sessions, store, operation = context.sessions, context.store, context.operation
    request, rules = context.request, rules_since(chain, context.fleet)
    state = state_of(chain, rules, seen)

    def close() -> Mapping[str, Lsn]:
        await_prepared(sessions, request.wait_seconds, progress, "the end of all writes")
        # Nobody is kept from writing while a JVM starts, or for one that does not.
        progress.step("start Spark")
        spark.session()
        return end_writes(context.lock, store, operation, chain.full.fleet_id, request.wait_seconds, progress)

    cut = take_cut(context, state, spark, progress, close if request.terminal else None)
    progress.step("commit")
    uncounted = check_counted(sessions, with_counters(cut.tables, state.known), since_of(chain))
    left_out = (
        with_large_object_counts(read_left_out(sessions.primaries, rules, cut.groups), chain.full) + chain.too_old
    )
    check_final(cut.plan, cut.made, cut.ends, sessions, store)
    changes = cut.definition_changes
    commit = Increment(
        snapshot=chain.name,
        increment=operation.increment,
        operation=operation.id,
        chain=chain.full.operation,
        created_at=operation.began_at,
        seconds=round(time.monotonic() - began, 3),
        comment=request.comment,
        counts=counts_of(sessions.nodes, cut.made, changes.objects if changes else ()),
        cut=cut.made.record,
        sequences=dict(cut.sequences),
        segments=cut.made.segments,
        previous=Previous(chain.last.operation, chain.last.digest),
        left_out=with_warnings(left_out, chain, uncounted, cut.copied),
        terminal=request.terminal,
        definition_changes=changes,
    )
    check_exclusive(context.lock, store, operation)
    commit_operation(store, operation, commit)
    progress.reached(CrashPoint.COMMITTED)
    return commit
