"""`restore`: load the fleet's databases as of a cut next to the existing ones, and rename them at the end.

Before the decision to publish, no restored database has its real name, and the restore can be undone. Afterwards it can
only be finished. If a restore ends unfinished, the records on its databases contain its progress, and `resume_restore`
completes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from msgspec import structs

from cutline.fleet.config import Fleet
from cutline.fleet.messages import resume_command
from cutline.fleet.progress import News, Progress
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import watch_nodes
from cutline.restore.estimates.estimate import RestoreStep
from cutline.restore.estimates.pace import RestorePace, corrected
from cutline.restore.plan.plan import RestorePlan, plan_resumed
from cutline.restore.plan.report import RestoreReport, WalPhase
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.ending import RestoreAbandonedError, end_published, say_open, saying_published, undoing
from cutline.restore.run.loading import (
    choose_verified_copies,
    load_all,
    naming_commands,
    naming_lost_rows,
    publish_rows,
)
from cutline.restore.run.preview import (
    RestorePreview,
    check_all_swappable,
    check_restore,
    find_replaced,
    left_rows,
    with_replaced,
)
from cutline.restore.run.refused import DdlRefusedError
from cutline.restore.run.run import RestoreRun, running
from cutline.restore.targets.chain_ids import in_ids_of
from cutline.restore.targets.databases import Phase, RestoreCrashPoint, clear_records, end_chains, find_owner_changes
from cutline.restore.targets.swap import close_databases, publish_database
from cutline.restore.targets.target import (
    Target,
    ending_on_silence,
    lock_targets,
    naming_lost_nodes,
    provisional_targets,
)
from cutline.restore.targets.waits import bounding_waits
from cutline.restore.unfinished.unfinished import check_no_unfinished, check_whole, find_resumable, settle_recorded
from cutline.snapshots.operations.leases import HeldLease, hold_lease
from cutline.snapshots.operations.operation import PUBLISH, decide_restore
from cutline.snapshots.operations.removed_chains import naming_removal
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import SnapshotError

Confirm = Callable[[list[str]], None]


def restore_fleet(
    plan: RestorePlan,
    spark: SparkSource,
    progress: Progress,
    confirm: Confirm | None = None,
    announce: Callable[[RestorePreview], None] | None = None,
    verify: Callable[[RestoreReport], int] | None = None,
) -> RestoreReport:
    """Restore all shards in parallel; no database gets its real name until all are loaded and checked.

    After all checks and before any change, call `announce` with the preview, then `confirm` with one line per database
    or chain that `--replace` ends; `confirm` may raise. At the end, `verify` queries the restored databases and returns
    the exit code to record in the outcome.
    """
    began = time.monotonic()
    with running(plan, progress) as run:
        store = plan.store.open()
        check_no_unfinished(store, plan.request.name, run.reached, run.connections, progress)
        preview = check_restore(run, plan.targets)
        settle_recorded(store, plan.targets, run.connections)
        replaced = find_replaced(run, plan.targets)
        if announce:
            announce(preview)
        if confirm:
            confirm(replaced)
        for line in (*preview.warnings, *map(News, replaced)):
            progress.note(line)
        for line in clear_records(plan.targets, run.connections):
            progress.note(line)
        run.pace = run.progress = RestorePace(progress, preview.estimate, run.operation)
        with corrected(run.pace), saying_published(run):
            _restore(run, preview, spark, is_resumed=False, verify=verify)
    run.report.seconds = time.monotonic() - began
    return run.report


def resume_restore(
    source: Fleet,
    target: Fleet,
    request: RestoreRequest,
    spark: SparkSource,
    progress: Progress,
    announce: Callable[[RestorePlan, RestorePreview], None] | None = None,
) -> RestoreReport:
    """Continue the unfinished restore of the request's snapshot into the target, doing only the remaining work.

    If the request names nodes, only these are contacted. `announce` is called with a preview of the remaining work.

    Raises UnfinishedRestoreError if no restore is unfinished, or if it can only be undone.
    """
    began = time.monotonic()
    store = source.store.open()
    target, nodes = in_ids_of(store, request.name, target, request.scope.nodes)
    provisional = provisional_targets(target, nodes)
    with ExitStack() as stack:
        watch = stack.enter_context(watch_nodes(shard_target.maintenance for shard_target in provisional))
        locked = stack.enter_context(lock_targets(provisional))
        early = stack.enter_context(ExitStack())
        early.enter_context(ending_on_silence(watch, locked.values()))
        early.enter_context(bounding_waits(watch, provisional, locked, progress))
        resumable = find_resumable(store, request.name, provisional, locked, progress, settles=True)
        check_whole(resumable, provisional, locked, store)
        if resumable.is_published:
            planned: RestoreReport | None = None
            with suppress(SnapshotError):
                published = plan_resumed(source, target, resumable.last_record)
                planned = published.report()
                planned.left_out = list(left_rows(published))
            return end_published(store, target, resumable, provisional, locked, planned)
        allows = request.allow_refused_ddl
        plan = plan_resumed(source, target, resumable.last_record, allow_refused_ddl=allows)
        early.close()
        run = stack.enter_context(running(plan, progress, locked, watch))
        run.records, run.report.is_resumed = dict(resumable.records), True
        run.is_decided = resumable.is_decided(store)
        for shard_target in run.find_stale():
            run.enter(shard_target, Phase.CREATED, rows=0)
        chosen = [target for target in plan.targets if target not in run.shards_in(Phase.FINISHED, Phase.PUBLISHED)]
        for shard_target in run.shards_in(Phase.LOADING, Phase.INDEXING):
            run.end_loading(shard_target)
        preview = check_restore(run, chosen, run.find_begun())
        preview = with_replaced(preview, run)
        check_all_swappable(run)
        if announce:
            announce(plan, preview)
        for line in (*preview.warnings, *map(News, preview.replaces)):
            progress.note(line)
        run.pace = run.progress = RestorePace(progress, preview.estimate, run.operation, is_resumed=True)
        with corrected(run.pace), saying_published(run):
            _restore(run, preview, spark, is_resumed=True)
    run.report.seconds = time.monotonic() - began
    return run.report


def _restore(
    run: RestoreRun,
    preview: RestorePreview,
    spark: SparkSource,
    *,
    is_resumed: bool,
    verify: Callable[[RestoreReport], int] | None = None,
) -> None:
    plan, report, store = run.plan, run.report, run.plan.store.open()
    run.volumes = preview.volumes
    if len(run.shards_in(Phase.INDEXING)) < len(preview.servers) and not plan.request.scope.schema_only:
        spark.begin(run.executor_needs, run.progress, plan.amount)
    # A resumed restore keeps its decision where the restore was started: in the store, or on the first target.
    in_store = not is_resumed or next(iter(run.records.values())).in_store
    begins_at = plan.chain.full.increment
    intent = run.placed_intent()
    held = hold_lease(store, intent, run.progress, begins_at, is_resumed=is_resumed) if in_store else _no_lease()
    with held as lease:
        run.in_store = in_store if is_resumed else lease.is_stored
        run.progress.reached(RestoreCrashPoint.INTENT_STORED)
        with undoing(run, lease, is_resumed=is_resumed):
            run.report.left_out, run.report.role_differences = preview.left_out, preview.role_differences
            removal = naming_removal(store, intent, begins_at, is_stored=run.in_store)
            with naming_lost_rows(run), naming_commands(run), removal:
                if plan.request.use_backup_copies and not is_resumed:
                    choose_verified_copies(run, spark)
                load_all(run, preview.ddl, preview.roles_missing, preview.server_globals, spark)
                report.wal = _wal_phase(run)
            if not plan.request.scope.data_only:
                run.progress.step("swap databases")
                run.is_closing = True
                close_databases(plan.targets, run.connections, run.records)
                run.progress.reached(RestoreCrashPoint.CLOSED)
            # From here on, another process may publish the databases that this process has loaded.
            run.is_deciding = lease.stays_open = True
            run.progress.ending()
            _decide(run)
            run.is_decided = True
            run.progress.reached(RestoreCrashPoint.DECIDED)
            report.aside = _publish(run)
            run.is_published = True
            ending = store if run.in_store else None
            report.slots_dropped, report.slots_left = end_chains(
                ending, plan.target_fleet, plan.targets, run.connections, run.operation
            )
            run.progress.reached(RestoreCrashPoint.SLOTS_RELEASED)
        if run.pace and not is_resumed:
            lease.is_typical = _is_typical(plan)
            transactions = sum(increment.counts["transactions"] for increment in plan.chain.increments)
            lease.figures = run.pace.figures(report.bytes, transactions)
        lease.is_done, lease.stays_open = True, False
        if report.refused:
            lease.code = DdlRefusedError.exit_code
        if verify:
            lease.code = verify(report)
    run.progress.reached(RestoreCrashPoint.OUTCOME_STORED)
    _clear_own_records(run)
    report.rows = sum(node.rows for node in report.nodes)


def _wal_phase(run: RestoreRun) -> WalPhase | None:
    """Add up the commits' figures; if the restore was resumed, an earlier process may have loaded some of the rows."""
    seconds = run.pace.seconds.get(RestoreStep.FOLD) if run.pace else None
    if seconds is None:
        return None
    commits, sources = run.plan.chain.commits, run.plan.sources
    segments = [segment for commit in commits for shard in sources for segment in commit.segments.get(shard, ())]
    # A shard may have joined the chain later.
    cuts = [commit.cut for commit in commits]
    local = sum(node.local_transactions for cut in cuts for node in cut.nodes if node.node in sources)
    return WalPhase(
        seconds,
        len(segments),
        sum(segment.size for segment in segments),
        sum(segment.changes for segment in segments),
        local + sum(cut.global_transactions for cut in cuts),
    )


def _is_typical(plan: RestorePlan) -> bool:
    """Whether the restore can predict the duration of other restores: it loads everything and does nothing else."""
    request = plan.request
    # With --use-backup-copies, Spark's workers were already started to verify the copies.
    is_whole = request.is_with_all_rows and not request.use_backup_copies
    return is_whole and plan.topology is None and not plan.intent.is_drill


def _clear_own_records(run: RestoreRun) -> None:
    """Remove the records of the finished restore.

    Records are redundant once the outcome is in the store, so a node that is unreachable now may keep its record.
    """
    try:
        with (
            run.watch.naming_silent(),
            run.waits.naming_blocked(),
            naming_lost_nodes(run.plan.targets, run.connections),
        ):
            run.report.warnings += clear_records(run.plan.targets, run.connections)
            if run.report.aside:
                run.report.owner_changes = find_owner_changes(run.plan.targets, run.connections)
    except NodeUnreachableError as error:
        if not run.in_store:
            say_open(run, error)
            raise
        command = resume_command(run.plan.request.name, run.plan.request.scope.nodes)
        run.report.warnings.append(
            f"everything is restored, but a record of the restore could not be removed: {error}; a database may"
            f" therefore still lack its owner and its comment; to set them: {command}"
        )


@contextmanager
def _no_lease() -> Iterator[HeldLease]:
    yield HeldLease(is_stored=False)


def _decide(run: RestoreRun) -> None:
    """Record the decision to publish, once: in the store, or on the first target if the store accepts no writes."""
    plan, first = run.plan, run.plan.targets[0]
    if not run.in_store:
        if first not in run.shards_in(Phase.PUBLISHED) and not run.is_renamed(first):
            run.enter(first, Phase.FINISHED, publishes=True)
    elif decide_restore(plan.store.open(), plan.intent, PUBLISH) != PUBLISH:
        raise RestoreAbandonedError(
            f"restore {run.operation} is being undone by another command",
            details={"operation": run.operation},
        )


def _publish(run: RestoreRun) -> list[str]:
    """Give every database its real name; return the databases set aside, as `node: name`.

    An error on one node doesn't stop the others, because a decided restore can only be finished.
    """

    def publish(target: Target) -> str | None:
        connection = run.connections[target.shard]
        record = run.records[target.shard]
        is_aside = publish_database(target, connection, record)
        run.records[target.shard] = structs.replace(record, aside=is_aside)
        run.progress.reached(RestoreCrashPoint.RENAMED, node=target.node.id)
        return f"{target.node.id}: {target.aside}" if is_aside else None

    if run.plan.request.scope.data_only:
        publish_rows(run)
        return []
    aside = in_parallel(publish, run.plan.targets, run.waits.hurry)
    # Wait until all databases are renamed, because a database in this phase can't be undone.
    for target in run.plan.targets:
        run.enter(target, Phase.PUBLISHED, database=target.database)
    return [name for name in aside if name]
