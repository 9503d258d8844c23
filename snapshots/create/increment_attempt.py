"""Take an increment after its checks: make the cut, archive the WAL up to it, commit.

Before the commit only the archive, the DDL and base copies of tables that can't be converted are written. An attempt
that dies leaves segments that the next one continues after, and a slot at the end of the archive or before it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.create.append_only_counters import (
    check_append_only,
    last_commit_label,
    states_to_compare,
    with_warnings,
)
from cutline.snapshots.create.chain_state import state_of
from cutline.snapshots.create.commit_counts import counted_increment
from cutline.snapshots.create.context import CreateContext
from cutline.snapshots.create.continuable import rules_since
from cutline.snapshots.create.cut_attempt import take_cut
from cutline.snapshots.create.definitions import with_objects
from cutline.snapshots.create.prepared_transactions import await_prepared
from cutline.snapshots.create.terminal import check_final, end_writes
from cutline.snapshots.ddl.database_facts import read_facts
from cutline.snapshots.ddl.table_changes import NodeTables
from cutline.snapshots.globals.extension_rows import store_extension_rows
from cutline.snapshots.globals.server_globals_object import store_globals
from cutline.snapshots.operations.crash_points import CrashPoint
from cutline.snapshots.operations.exclusive import check_exclusive
from cutline.snapshots.operations.object_lists import check_commit_stored, replace_by_lists
from cutline.snapshots.operations.operation import commit_operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Increment, Previous
from cutline.snapshots.records.large_objects import with_large_object_counts
from cutline.snapshots.tasks.spark_jobs import SparkSource, start_session
from cutline.wal.segments.own_store import check_own_store


def take_increment(
    context: CreateContext,
    chain: Chain,
    seen: Mapping[str, NodeTables],
    spark: SparkSource,
    progress: Progress,
    began: float,
) -> Increment:
    """Take the increment and commit it.

    `seen` are the primaries' tables as the checks read them; `began` is when the command began (time.monotonic).
    """
    progress.reached(CrashPoint.INTENT_STORED)
    sessions, store, operation = context.sessions, context.store, context.operation
    request, state = context.request, state_of(chain, rules_since(chain, context.fleet), seen)

    def end_all_writes(archiving: SparkSource | None) -> Mapping[str, Lsn]:
        await_prepared(sessions, request.wait_seconds, progress, "the end of all writes")
        if archiving is not None:
            # The JVM starts before writes end: no writer waits for it, and none is stopped if it does not start.
            start_session(archiving, progress)
        return end_writes(context.lock, store, operation, chain.full.fleet_id, request.wait_seconds, progress)

    cut = take_cut(context, state, spark, progress, end_all_writes if request.terminal else None)
    progress.step("commit")
    unknown = check_append_only(sessions, states_to_compare(cut.tables, state.known), last_commit_label(chain))
    server_globals = store_globals(store, sessions, operation, chain, progress)
    extension_rows, unread = store_extension_rows(store, sessions, operation, state.selection.rules)
    left_out = with_large_object_counts(cut.left_out, chain.full) + chain.too_old + unread
    check_final(cut.plan, cut.archived_cut, cut.ends, sessions, store)
    commit = Increment(
        snapshot=chain.name,
        increment=operation.increment,
        operation=operation.id,
        chain=chain.full.operation,
        created_at=operation.began_at,
        seconds=round(time.monotonic() - began, 3),
        comment=request.comment,
        counts={},
        cut=cut.archived_cut.record,
        sequences=dict(cut.sequences),
        segments=cut.archived_cut.segments,
        previous=Previous(chain.last.operation, chain.last.digest),
        history=chain.next_history,
        left_out=with_warnings(left_out, chain, unknown, cut.copied_tables),
        terminal=request.terminal,
        definition_changes=with_objects(cut.definition_changes, server_globals),
        databases=sessions.ask_named_primaries(read_facts),
        extension_rows=extension_rows,
    )
    check_own_store(store, chain.full.fleet_id)
    check_commit_stored(store, commit)
    commit = counted_increment(chain, replace_by_lists(store, commit, progress), cut.archived_cut.ignored)
    check_exclusive(context.lock, store, operation)
    commit_operation(store, operation, commit)
    progress.ending()
    progress.reached(CrashPoint.COMMITTED)
    return commit
