"""What a restore that ends with an error leaves on its targets, and what the error says of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cutline.fleet.hints import SAME_TARGET, restore_command
from cutline.fleet.nodes.watch import REACHABLE, SilentNodeError
from cutline.restore.publishing import open_databases
from cutline.restore.refused import DdlRefusedError
from cutline.restore.rows.ledger import TablesInUseError
from cutline.restore.run import RestoreRun
from cutline.restore.targets.database_records import Phase
from cutline.restore.targets.target import naming_lost_nodes
from cutline.snapshots.operations.leases import HeldLease
from cutline.storage.errors import BusyError, IndeterminateError, SnapshotError, StoppedError, UnreachableError

RESUMABLE = (UnreachableError, IndeterminateError, TablesInUseError, DdlRefusedError)
ALL_RESTORED = "all databases are restored"


class RestoreAbandonedError(BusyError):
    """Another command has undone this restore."""


@contextmanager
def undoing(run: RestoreRun, lease: HeldLease, *, is_resumed: bool) -> Iterator[None]:
    """After an error in the block drop what was loaded, unless the restore can be resumed: the error's hint says how.

    It can if a node or the store went away, others use its tables, or statements were refused after the rows; if it is
    resumed already; and from the decision on. Databases that were closed are opened in any case. A drill leaves nothing
    that anybody could go on with.
    """
    try:
        with run.watch.naming_silent(), naming_lost_nodes(run.plan.targets, run.connections):
            yield
    except BaseException as error:
        run.progress.ending()
        if run.plan.request.is_drill:
            # What it has made goes with its servers.
            lease.stays_open = False
            if isinstance(error, DdlRefusedError):
                error.hint = f"to drill without them: {run.plan.request.command} --allow-refused-ddl"
            if isinstance(error, KeyboardInterrupt):
                raise StoppedError("what the drill had made is removed") from error
            raise
        # Until it is known that nothing is left: this, too, may be interrupted.
        lease.stays_open = True
        run.release_tables()
        if run.is_closing:
            for line in open_databases(run.plan.targets, run.connections):
                run.progress.note(line)
        if run.is_deciding or (run.records and (is_resumed or isinstance(error, RESUMABLE))):
            say_open(run, error)
        elif run.undo_created():
            lease.stays_open = False
            if isinstance(error, KeyboardInterrupt):
                raise StoppedError("what the restore had made is removed") from error
        else:
            say_open(run, error)
        raise


@contextmanager
def saying_published(run: RestoreRun) -> Iterator[None]:
    """Raise StoppedError, that all is restored, in place of an interrupt after all was published."""
    try:
        yield
    except KeyboardInterrupt as error:
        if not run.is_published or run.plan.request.is_drill:
            raise
        command = restore_command(run.plan.request.name, run.plan.request.scope.nodes)
        hint = [f"it is still open if it is listed by: snapshot list   to end it then: {command} --resume", SAME_TARGET]
        raise StoppedError(ALL_RESTORED, hint=hint, details={"operation": run.operation}) from error


def say_open(run: RestoreRun, error: BaseException) -> None:
    """Say how to end the restore that is left open: in the error's hint, or in the StoppedError of an interrupt."""
    if run.plan.request.is_drill:
        return
    scope = run.plan.request.scope
    command = restore_command(run.plan.request.name, scope.nodes)
    is_published = len(run.shards_in(Phase.PUBLISHED)) == len(run.plan.targets)
    may_undo = not (run.is_decided if scope.data_only else is_published)
    lines = [
        # Before there is a record nobody can.
        *[f"to go on with it: {command} --resume"] * bool(run.records),
        *[f"to undo it: {command} --abandon"] * may_undo,
        SAME_TARGET,
    ]
    if isinstance(error, RestoreAbandonedError):
        lines = [f"wait until that command ends; if it was killed: {command} --abandon", SAME_TARGET]
    if isinstance(error, DdlRefusedError):
        lines = [
            f"to try the refused statements again, once the target is mended: {command} --resume",
            f"to publish the databases without them: {command} --resume --allow-refused-ddl",
            f"to undo the restore: {command} --abandon",
            SAME_TARGET,
        ]
    if isinstance(error, SilentNodeError):
        error.hint = REACHABLE
    if isinstance(error, SnapshotError):
        error.hint = "\n".join(filter(None, [error.hint, *lines]))
        error.details["unfinished"] = run.operation
    elif isinstance(error, KeyboardInterrupt):
        message = f"{ALL_RESTORED}, but not recorded" if run.is_published else "the restore is left unfinished"
        raise StoppedError(message, hint=lines, details={"unfinished": run.operation}) from error
    else:
        run.progress.note("; ".join(["the restore ended unfinished", *lines]))
