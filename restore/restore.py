"""`restore`: load the fleet's databases as of a cut beside the existing ones, and rename them at the end.

Until the decision to publish no restored database has its real name, and a restore may be undone. From then on it only
goes forward. Where a restore ends unfinished, its databases' records say how far it is: `resume_restore` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from msgspec import structs

from fleet.config import Fleet
from fleet.nodes.sessions import in_parallel
from fleet.progress import Progress
from restore.crash_points import RestoreCrashPoint
from restore.database_records import Phase, clear_record, list_databases
from restore.databases import drop_database, find_owner_changes, release_slots
from restore.ddl.ddl import Ddl
from restore.loading import load_all
from restore.plan import RestorePlan, plan_resumed, provisional_targets
from restore.preview import check_targets, find_replaced, read_all_ddl
from restore.publishing import close_databases, open_databases, publish_database
from restore.report import RestoreReport
from restore.run import RestoreRun, hold_locks, running
from restore.target import Target, lock_targets, naming_lost_nodes, place_of
from restore.unfinished import UnfinishedRestore, UnfinishedRestoreError, check_no_unfinished, find_unfinished
from snapshots.operations.leases import HeldLease, hold_lease
from snapshots.operations.restore_decisions import PUBLISH, decide_restore
from snapshots.operations.spark_jobs import SparkSource
from storage.errors import BusyError, IndeterminateError, SnapshotError, UnreachableError

Confirm = Callable[[list[str]], None]


class RestoreAbandonedError(BusyError):
    """Another command has undone this restore."""


def restore_fleet(
    plan: RestorePlan, spark: SparkSource, progress: Progress, confirm: Confirm | None = None
) -> RestoreReport:
    """Restore all shards in parallel; no database has its real name before all are loaded and checked.

    `confirm` is given what `--replace` will end, a line each, before anything is changed; it may raise.
    """
    began = time.monotonic()
    with running(plan, progress) as run:
        check_no_unfinished(plan.store.open(), plan.targets, run.connections)
        missing = check_targets(plan.targets, plan.chain, plan.groups, plan.request, run.connections)
        replaced = find_replaced(plan, run.connections)
        if confirm:
            confirm(replaced)
        for line in replaced:
            progress.note(line)
        _clear_records(run)
        _restore(run, missing, spark, is_resumed=False)
    run.report.seconds = time.monotonic() - began
    return run.report


def resume_restore(source: Fleet, target: Fleet, name: str, spark: SparkSource, progress: Progress) -> RestoreReport:
    """Go on with the unfinished restore of snapshot `name` into the target, and do only what is not done.

    Raises UnfinishedRestoreError if there is none, or if it can only be undone.
    """
    began = time.monotonic()
    provisional = provisional_targets(target)
    store = source.store.open()
    with ExitStack() as stack:
        locked = stack.enter_context(lock_targets(provisional))
        found = _find_resumable(name, find_unfinished(store, provisional, locked))
        plan = plan_resumed(source, target, next(iter(found.records.values())))
        run = stack.enter_context(running(plan, progress, locked))
        run.records, run.report.is_resumed = dict(found.records), True
        for one in run.shards_in(Phase.LOADING):
            if run.records[one.shard].version != run.version:
                # Its tasks may not be ours.
                run.enter(one, Phase.CREATED)
        chosen = [one for one in plan.targets if one not in run.shards_in(Phase.FINISHED, Phase.PUBLISHED)]
        missing = check_targets(chosen, plan.chain, plan.groups, plan.request, run.connections)
        _restore(run, missing, spark, is_resumed=True)
    run.report.seconds = time.monotonic() - began
    return run.report


def _find_resumable(name: str, unfinished: list[UnfinishedRestore]) -> UnfinishedRestore:
    """The only unfinished restore, of snapshot `name`; raise UnfinishedRestoreError if it can't be resumed."""
    if not unfinished:
        raise UnfinishedRestoreError(
            "no restore into these databases is unfinished", hint="run the restore without --resume"
        )
    if len(unfinished) > 1:
        raise UnfinishedRestoreError(
            f"several restores are unfinished: {'; '.join(one.label() for one in unfinished)}",
            hint=f"undo them, and begin again: snapshot restore {name} --abandon",
        )
    (found,) = unfinished
    if found.record is None or found.is_abandoned:
        what = "is being undone" if found.is_abandoned else "ended before it recorded anything"
        raise UnfinishedRestoreError(f"{found.label()} {what}", hint=f"run: snapshot restore {name} --abandon")
    if found.record.snapshot != name:
        raise UnfinishedRestoreError(
            f"the unfinished restore is of snapshot {found.record.snapshot}, not of {name}",
            hint=f"run: snapshot restore {found.record.snapshot} --resume",
        )
    return found


def _restore(run: RestoreRun, missing: Mapping[str, list[str]], spark: SparkSource, *, is_resumed: bool) -> None:
    """Load what is not loaded, and publish it all."""
    plan, report, store = run.plan, run.report, run.plan.store.open()
    in_store = not is_resumed or next(iter(run.records.values())).in_store
    places = tuple(place_of(target, run.connections[target.shard]) for target in plan.targets)
    intent = structs.replace(plan.intent, targets=places)
    with hold_lease(store, intent, run.progress, is_resumed=is_resumed) if in_store else _no_lease() as lease:
        run.in_store = lease.is_stored
        run.progress.reached(RestoreCrashPoint.INTENT_STORED)
        with _undoing(run, lease, is_resumed=is_resumed):
            _load(run, missing, spark)
            run.progress.step("swap databases")
            close_databases(plan.targets, run.connections, run.operation)
            run.progress.reached(RestoreCrashPoint.CLOSED)
        lease.stays_open = True
        _decide(run)
        report.aside = _publish(run)
        report.owner_changes = find_owner_changes(plan.targets, run.connections) if report.aside else []
        report.slots_dropped, report.slots_left = release_slots(plan.targets, run.connections)
        run.progress.reached(RestoreCrashPoint.SLOTS_RELEASED)
        lease.stays_open = False
    run.progress.reached(RestoreCrashPoint.OUTCOME_STORED)
    _clear_records(run)
    report.rows = sum(node.rows for node in report.nodes)


def _clear_records(run: RestoreRun) -> None:
    """Remove the records of restores that have ended from the databases with the targets' real names."""
    for target in run.plan.targets:
        connection = run.connections[target.shard]
        found = list_databases(connection).get(target.database)
        if found is not None and found.record is not None:
            clear_record(connection, target.database)


def _load(run: RestoreRun, missing: Mapping[str, list[str]], spark: SparkSource) -> None:
    plan = run.plan
    finished = run.shards_in(Phase.FINISHED, Phase.PUBLISHED)
    chosen = [target for target in plan.targets if target not in finished]
    ddl: dict[str, Ddl] = {}
    if chosen:
        ddl, run.report.left_out = read_all_ddl(plan.store.open(), plan, chosen, run.connections, run.folder)
        spark.begin()
    load_all(run, ddl, missing, spark)


@contextmanager
def _no_lease() -> Iterator[HeldLease]:
    yield HeldLease(is_stored=False)


@contextmanager
def _undoing(run: RestoreRun, lease: HeldLease, *, is_resumed: bool) -> Iterator[None]:
    """After an error in the block drop what was loaded, unless the restore can be resumed: the error's hint says how.

    It can if a node or the store went away, and if it is resumed already.
    """
    try:
        with naming_lost_nodes(run.plan.targets, run.connections):
            yield
    except BaseException as error:
        keeps = is_resumed or isinstance(error, UnreachableError | IndeterminateError)
        if run.records and keeps:
            lease.stays_open = True
            _add_hint(run, error)
        else:
            lease.stays_open = not _drop_all(run)
        raise


def _add_hint(run: RestoreRun, error: BaseException) -> None:
    """Say how to end the restore that is left open."""
    command = f"snapshot restore {run.plan.request.name}"
    text = f"to go on where it ended: {command} --resume; to undo it: {command} --abandon (with the same --to)"
    if isinstance(error, SnapshotError):
        error.hint = "\n".join(filter(None, [error.hint, text]))
        error.details["unfinished"] = run.operation
    else:
        run.progress.note(f"the restore ended unfinished; {text}")


def _drop_all(run: RestoreRun) -> bool:
    """Drop the databases that this process has created; return whether none is left."""
    targets = [target for target in run.plan.targets if target.shard in run.created]
    with ExitStack() as stack:
        held = hold_locks(run, targets, stack)

        def drop(target: Target) -> None:
            drop_database(target, held[target.shard], target.loading)

        with suppress(SnapshotError):
            in_parallel(drop, [target for target in targets if target.shard in held])
            return len(held) == len(targets)
    return False


def _decide(run: RestoreRun) -> None:
    """Decide to publish: once, in the store, or on the first target where the store accepts no writes."""
    plan = run.plan
    try:
        if run.in_store:
            decision = decide_restore(plan.store.open(), plan.intent, PUBLISH)
        else:
            decision = PUBLISH
            first = plan.targets[0]
            if first not in run.shards_in(Phase.PUBLISHED) and not run.is_renamed(first):
                run.enter(first, Phase.FINISHED, publishes=True)
        if decision != PUBLISH:
            raise RestoreAbandonedError(
                f"restore {run.operation} is being undone by another command",
                hint=f"run: snapshot restore {plan.request.name} --abandon",
                details={"operation": run.operation},
            )
    except BaseException as error:
        open_databases(plan.targets, run.connections)
        _add_hint(run, error)
        raise
    run.progress.reached(RestoreCrashPoint.DECIDED)


def _publish(run: RestoreRun) -> list[str]:
    """Give every database its real name; return what was put aside, as `node: name`.

    After an error on one node the others are published all the same: there is only one way on.
    """

    def publish(target: Target) -> str | None:
        connection = run.connections[target.shard]
        record = run.records[target.shard]
        is_replacing = publish_database(target, connection, record)
        run.records[target.shard] = structs.replace(record, aside=is_replacing)
        run.progress.reached(RestoreCrashPoint.RENAMED, node=target.node.id)
        return f"{target.node.id}: {target.aside}" if is_replacing else None

    try:
        with naming_lost_nodes(run.plan.targets, run.connections):
            aside = in_parallel(publish, run.plan.targets)
            for target in run.plan.targets:
                run.enter(target, Phase.PUBLISHED, database=target.database)
    except BaseException as error:
        _add_hint(run, error)
        raise
    return [one for one in aside if one]
