"""`snapshot wait`."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Annotated

import typer

from cutline.cli.commands.history import SCHEMA
from cutline.cli.output.activity import check_operation, result_text, volumes_text, what_text
from cutline.cli.output.arguments import SECONDS_MAX, command_context
from cutline.cli.output.completing import complete_operations
from cutline.cli.output.failure import DONE, REFUSED
from cutline.cli.output.results import emit, progress
from cutline.cli.output.tables import seconds_text
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress, Reading
from cutline.snapshots.operations.ended_operations import Ended, read_ended
from cutline.snapshots.operations.under_way import ActivityState, UnderWay, read_one
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import Failure, read_failure
from cutline.snapshots.records.store_identity import open_own_store
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, RefusedError, SnapshotError
from cutline.storage.store import ObjectStore

POLL_SECONDS = 1.0


class NoSuchOperationError(RefusedError):
    """No operation has this id."""


class OperationDeadError(RefusedError):
    """The operation shows no sign of life, so it will not end on its own."""


class OperationFailedError(SnapshotError):
    """The operation's command failed and left something to clean up; this error takes the exit code from `failure`."""

    def __init__(self, found: UnderWay, failure: Failure) -> None:
        super().__init__(f"operation {found.id} {found.dead_text}", hint="to see how to settle it: snapshot status")
        self.exit_code = failure.code or REFUSED


class StillRunningError(BusyError):
    """The operation is still running after the given time."""


def wait(
    context: typer.Context,
    operation: Annotated[
        str,
        typer.Argument(
            metavar="OPERATION",
            autocompletion=complete_operations,
            help="The operation's id, as `snapshot status` shows it.",
        ),
    ],
    *,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--wait",
            min=0,
            max=SECONDS_MAX,
            metavar="SECONDS",
            help="Maximum wait. Default: no limit.",
        ),
    ] = None,
) -> None:
    """Wait until an operation ends, and exit with the exit code of its command.

    The exit code is 3 if the operation is dead.
    """
    fleet = command_context(context).load_fleet()
    with progress(context) as shown:
        ended = await_end(fleet, check_operation(operation), seconds, shown)
    code = code_of(ended, fleet.store.open())
    emit(context, {"schema": SCHEMA, "operations": [ended.to_json()]}, [line_of(ended)], code=code)
    raise typer.Exit(code)


def code_of(ended: Ended, store: ObjectStore) -> int:
    """Return the exit code of the operation's command or, if none was recorded, a code that fits the result."""
    if ended.outcome is None or ended.outcome.state != "done":
        failure = None
        if ended.code is None:
            with suppress(ManifestError):
                failure = read_failure(store, ended.id)
        return ended.code or (failure.code if failure else 0) or REFUSED
    return DONE if ended.code is None else ended.code


def line_of(one: Ended) -> str:
    """Describe the operation on one line."""
    took = "" if one.seconds is None else f", {seconds_text(one.seconds)}"
    volumes = f", {text}" if (text := volumes_text(one)) else ""
    return f"operation {one.id} ({what_text(one)}): {result_text(one)}{took}{volumes}"


def await_end(fleet: Fleet, operation: str, seconds: float | None, progress: Progress) -> Ended:
    """Wait until the operation has an outcome, and return the ended operation.

    Raises NoSuchOperationError, OperationFailedError, OperationDeadError, StillRunningError, ManifestError, and
    StoreUnreachableError.
    """
    store, deadline, phase = open_own_store(fleet), None if seconds is None else time.monotonic() + seconds, ""
    while True:
        ended = read_ended(store, operation)
        if ended is not None and ended.outcome is not None:
            return ended
        way = read_one(store, operation)
        if way is None and (ended := read_ended(store, operation)) is not None and ended.outcome is not None:
            # The operation ended between the two reads.
            return ended
        if way is None:
            raise NoSuchOperationError(
                f"the store contains no record of operation {operation}",
                hint="to list operations: snapshot status   or: snapshot history",
            )
        if way.failure is not None:
            raise OperationFailedError(way, way.failure)
        if way.state(utc_now()) is ActivityState.DEAD:
            raise OperationDeadError(
                f"operation {operation} {way.dead_text}"
                + (f" since {way.seen_at}" if way.seen_at and not way.is_gone else ""),
                hint="to see how to settle it: snapshot status",
            )
        phase = _show(way, phase, progress)
        if deadline is not None and time.monotonic() >= deadline:
            raise StillRunningError(
                f"operation {operation} is still running after {seconds:.0f} s",
                hint="it continues; to see its progress: snapshot status",
            )
        time.sleep(POLL_SECONDS)


def _show(found: UnderWay, phase: str, progress: Progress) -> str:
    sign = found.sign
    if sign is None:
        return phase
    if sign.phase != phase:
        progress.step(sign.phase, total=sign.total, unit=sign.unit)
    progress.tell(Reading(sign.done, sign.total, sign.unit, "", found.id, sign.seconds_left, sign.is_rough))
    return sign.phase
