"""How a restore ends: its records, its cleanup, and the objects that a failed restore leaves on its targets."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cutline.fleet.config import Fleet
from cutline.fleet.messages import SAME_TARGET, abandon_command, join_some, resume_command
from cutline.nodes.connections import NotAdmittedError
from cutline.nodes.watch import REACHABLE, SilentNodeError
from cutline.restore.plan.report import NodeReport, RestoreReport
from cutline.restore.plan.topology import ShownRoute
from cutline.restore.rows.load import TablesInUseError
from cutline.restore.run.loading import remove_fillings
from cutline.restore.run.refused import DdlRefusedError
from cutline.restore.run.run import RestoreRun
from cutline.restore.scope.table_routes import parse_route
from cutline.restore.targets.databases import DatabaseRecord, Phase, clear_records, end_chains
from cutline.restore.targets.swap import open_databases
from cutline.restore.targets.target import Connections, Target, naming_lost_nodes
from cutline.restore.unfinished.unfinished import UnfinishedRestore
from cutline.snapshots.operations.leases import HeldLease
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.operations.removed_chains import BeginningGivenUpError
from cutline.snapshots.records.operation_records import DONE, read_intent
from cutline.snapshots.records.proven_chains import SnapshotMissingError
from cutline.snapshots.records.tombstones import SnapshotDeletedError
from cutline.storage.errors import BusyError, IndeterminateError, SnapshotError, StoppedError, UnreachableError
from cutline.storage.store import ObjectStore

RESUMABLE = (UnreachableError, IndeterminateError, TablesInUseError, DdlRefusedError)
# What the restore reads was removed by others.
REMOVED_BY_OTHERS = (SnapshotDeletedError, SnapshotMissingError, BeginningGivenUpError)
ALL_RESTORED, ALL_REMOVED = "all databases are restored", "everything that the restore created was removed"
NAMED_MAX = 5


class RestoreAbandonedError(BusyError):
    """Another command is undoing this restore."""


@contextmanager
def undoing(run: RestoreRun, lease: HeldLease, *, is_resumed: bool) -> Iterator[None]:
    """After an error in the block, drop the loaded data unless the restore can be resumed; the error's hint says how.

    A restore can be resumed if a node or the store became unreachable, other sessions use its tables, or statements
    were refused after the rows were loaded. If pg_hba.conf does not admit us to the databases that were just created,
    nothing is worth being kept. It can also be resumed after the decision, or if it was resumed before.
    Closed databases are reopened in any case. A drill leaves nothing behind that could be resumed.
    """
    try:
        with (
            run.watch.naming_silent(),
            run.waits.naming_blocked(),
            naming_lost_nodes(run.plan.targets, run.connections),
        ):
            yield
    except BaseException as error:
        run.progress.ending()
        if isinstance(error, KeyboardInterrupt):
            run.waits.hurry()
        if run.plan.request.is_drill:
            # Everything that the drill created disappears with its servers.
            lease.stays_open = False
            if isinstance(error, DdlRefusedError):
                request = run.plan.request
                words = shlex.join([*request.words_of_state, "--allow-refused-ddl"])
                without = f"to drill without them: {request.command} {words}   {SAME_TARGET}"
                error.hint = "\n".join(filter(None, [error.hint, without]))
            if isinstance(error, KeyboardInterrupt):
                raise StoppedError("everything that the drill created was removed") from error
            raise
        # Assume that objects remain until their removal is complete, because the removal may also be interrupted.
        lease.stays_open = True
        run.release_tables()
        if run.is_closing:
            for line in open_databases(run.plan.targets, run.connections):
                run.progress.note(line)
        may_resume = isinstance(error, RESUMABLE) and not (isinstance(error, NotAdmittedError) and has_no_rows(run))
        if run.is_deciding or (run.records and (is_resumed or may_resume)):
            say_open(run, error)
        elif run.undo_created():
            lease.stays_open = False
            if isinstance(error, KeyboardInterrupt):
                raise StoppedError(ALL_REMOVED) from error
            if isinstance(error, REMOVED_BY_OTHERS):
                error.message = f"{error.message}; {ALL_REMOVED}"
        else:
            say_open(run, error)
        raise


def has_no_rows(run: RestoreRun) -> bool:
    """Whether no database has its tables yet."""
    return all(record.phase == Phase.CREATED for record in run.records.values())


@contextmanager
def saying_published(run: RestoreRun) -> Iterator[None]:
    """Replace an interrupt after publication with a StoppedError saying that everything is restored."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not run.is_published or run.plan.request.is_drill:
            raise
        command = resume_command(run.plan.request.name, run.plan.request.scope.nodes)
        hint = [f"to see whether it is still open: snapshot list   if so, end it: {command}", SAME_TARGET]
        raise StoppedError(ALL_RESTORED, hint=hint, details={"operation": run.operation}) from error


def say_open(run: RestoreRun, error: BaseException) -> None:
    """Say how to end the unfinished restore: in the error's hint, or in a StoppedError that replaces an interrupt."""
    if run.plan.request.is_drill:
        return
    scope = run.plan.request.scope
    resume = resume_command(run.plan.request.name, scope.nodes)
    abandon = abandon_command(run.plan.request.name, scope.nodes)
    is_published = len(run.shards_in(Phase.PUBLISHED)) == len(run.plan.targets)
    may_undo = not (run.is_decided if scope.data_only else is_published)
    lines = [
        *run.undo_hint,
        # A restore without a record can't be resumed.
        *[f"to finish it: {resume}"] * bool(run.records),
        *[f"to undo it: {abandon}"] * may_undo,
        SAME_TARGET,
    ]
    if isinstance(error, RestoreAbandonedError):
        lines = [f"wait until that command ends; if it was killed: {abandon}", SAME_TARGET]
    if isinstance(error, DdlRefusedError):
        lines = [
            f"until the restore ends, the databases have temporary names: {_loading(run)}",
            f"to run the refused statements again once their causes are removed: {resume}",
            f"to publish the databases without them: {resume} --allow-refused-ddl",
            f"to undo the restore: {abandon}",
            SAME_TARGET,
        ]
    if isinstance(error, SilentNodeError):
        error.hint = REACHABLE
    if isinstance(error, SnapshotError):
        error.hint = "\n".join(filter(None, [error.hint, *lines]))
        error.details["unfinished"] = run.operation
    elif isinstance(error, KeyboardInterrupt):
        recorded = f"{ALL_RESTORED}, but this was not recorded"
        message = recorded if run.is_published else "the restore was left unfinished"
        raise StoppedError(message, hint=lines, details={"unfinished": run.operation}) from error
    else:
        run.progress.note("; ".join(["the restore did not finish", *lines]))


def _loading(run: RestoreRun) -> str:
    return join_some((f"{target.loading} on {target.node.id}" for target in run.plan.targets), NAMED_MAX)


def end_published(
    store: ObjectStore,
    fleet: Fleet,
    restore: UnfinishedRestore,
    provisional: Iterable[Target],
    connections: Connections,
    planned: RestoreReport | None,
) -> RestoreReport:
    """End a restore for which only the outcome is missing.

    `planned` is the report from its plan, or None if the snapshot can no longer be read.
    """
    record = restore.last_record
    provisional = list(provisional)
    filled = [target for target in provisional if restore.is_filling and target.shard in restore.records]
    # Clean up before storing the outcome, because no command looks for the restore afterwards. Without a store,
    # clearing the record is the outcome.
    if record.in_store:
        remove_fillings(filled, restore.suffix)
    targets = [target.named(restore.suffix) for target in provisional if target.shard in restore.records]
    nodes = [NodeReport(target.node.id, target.database, restore.records[target.shard].rows) for target in targets]
    report = planned or _report_of(record, nodes)
    report.nodes, report.is_resumed = nodes, True
    ending = store if record.in_store else None
    report.slots_dropped, report.slots_left = end_chains(ending, fleet, targets, connections, record.operation)
    report.aside = [f"{target.node.id}: {target.aside}" for target in targets if restore.records[target.shard].aside]
    if record.in_store:
        record_outcome(store, read_intent(store, record.operation), DONE)
    report.warnings += clear_records(targets, connections)
    if not record.in_store:
        remove_fillings(filled, restore.suffix)
    report.rows = sum(node.rows for node in nodes)
    return report


def _report_of(record: DatabaseRecord, nodes: list[NodeReport]) -> RestoreReport:
    """Build the report from the record alone, which contains the numbers of borrowed tables but not their names."""
    return RestoreReport(
        record.snapshot,
        record.increment,
        record.operation,
        nodes,
        scope=record.scope,
        warnings=[
            f"rows of {len(numbers)} tables were taken from the copy of {node}; their names are unknown because the"
            " snapshot can't be read"
            for node, numbers in record.borrowed.items()
        ],
        moved=[f"{node.node}: {move.label}" for node in nodes for move in record.scope.moves],
        routes=[ShownRoute(route.pattern, route.text) for route in map(parse_route, record.routes)],
    )
