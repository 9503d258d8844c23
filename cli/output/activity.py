"""Descriptions of operations, and the heartbeats that a command stores while it shows its progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import typer
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.cli.output.arguments import command_context
from cutline.cli.output.results import progress
from cutline.cli.output.tables import Shorter, quantity_text
from cutline.cli.process.detaching import announce, is_in_background
from cutline.cli.process.stopping import stop_process
from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import StepTimes
from cutline.snapshots.listing.spans import traced
from cutline.snapshots.operations.activity import Activity, Command, Ending, record_without_intent
from cutline.snapshots.operations.ended_operations import Ended
from cutline.snapshots.operations.operation import code_of, reason_of
from cutline.snapshots.operations.under_way import UnderWay
from cutline.snapshots.records.operation_records import CheckedPoint, CopiedPoint
from cutline.snapshots.records.proven_chains import check_name
from cutline.snapshots.records.store_identity import open_own_store
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.ids import OPERATION_ID, new_operation_id

# Volumes that do not measure the amount of work.
UNSHOWN = ("groups",)


def check_operation(text: str) -> str:
    """Return the given operation id; raise UsageError if it is not valid."""
    if not OPERATION_ID.fullmatch(text):
        raise UsageError(
            f"{text[:100]!r} is not the id of an operation",
            hint="ids look like 20261124T193137Z-65c4c093aa; to list them: snapshot status",
        )
    return text


def check_snapshot(name: str | None) -> str | None:
    """Return the given snapshot name; raise UsageError if it is not valid."""
    if name is not None:
        check_name(name)
    return name


def what_text(one: UnderWay | Ended) -> str:
    """`create nightly, increment 3`, or `restore nightly at 2026-11-20T01:02:03.000000Z`."""
    what = f"{one.kind or 'unknown'} {one.snapshot}".rstrip()
    if one.exact_at:
        return f"{what} at {one.exact_at}"
    return f"{what}, increment {one.increment}" if one.increment else what


def result_text(one: Ended) -> str:
    """Return `done`, or the error's name and the exit code."""
    if one.outcome is None:
        return f"unknown: {one.problem}"
    reason = f": {one.outcome.reason}" if one.outcome.reason else ""
    code = f" (exit {one.code})" if one.code else ""
    return f"{one.outcome.state}{reason}{code}"


def result_cell(one: Ended) -> Shorter:
    """Return a cell with `result_text`; on narrow terminals, the reason for a failure goes below the row."""
    if one.outcome is None:
        return Shorter(result_text(one), "unknown", one.problem)
    if one.outcome.state == "done":
        return Shorter(result_text(one), result_text(one))
    code = f" (exit {one.code})" if one.code else ""
    return Shorter(result_text(one), f"{one.outcome.state}{code}", one.outcome.reason)


def volumes_text(one: Ended) -> str:
    """`1,000 rows, 2.0 MiB`."""
    parts = [quantity_text(amount, unit) for unit, amount in one.volumes.items() if amount and unit not in UNSHOWN]
    return ", ".join(parts)


@contextmanager
def activity(context: typer.Context, fleet: Fleet, kind: str, snapshot: str = "") -> Iterator[Activity]:
    """Show the progress of an operation, store its heartbeats, and stop the process on request."""
    command, operations = Command(kind, snapshot), command_context(context).operations

    def begun(operation: str) -> None:
        operations.append(operation)
        announce(operation)

    with (
        progress(context) as shown,
        traced(fleet, shown, command) as target,
        Activity(target, command, partial(open_own_store, fleet), stop_process, begun) as found,
    ):
        yield found


class RecordedCommand(Struct):
    """The activity of a command without an intent, and the fields of its outcome.

    Once it `is_begun`, others see it as `operation`. If the command raises, only `volumes` and `copied`, the work done
    so far, are recorded. If the result of a command that ended can't be stored, `unrecorded` says so and why.
    """

    activity: Activity
    operation: str
    is_begun: bool = False
    code: int = 0
    reason: str = ""
    volumes: Mapping[str, int] = field(default_factory=dict)
    checked: tuple[CheckedPoint, ...] = ()
    copied: tuple[CopiedPoint, ...] = ()
    unrecorded: str = ""

    @property
    def warnings(self) -> list[str]:
        """The warning about the record, if any, for the `warnings` of the command's JSON output."""
        return [self.unrecorded] if self.unrecorded else []

    def begin(self) -> None:
        """Begin the operation, and report it to the process that started this command in the background, if any."""
        if is_in_background():
            self.activity.show(self.operation)
            announce(self.operation)
        self.activity.become(self.operation)
        self.is_begun = True


def unrecorded_text(kind: str, error: SnapshotError) -> str:
    """Return the warning that the result of a command of this kind could not be stored, with the consequences."""
    others = "list, metrics, history and prune" if kind == "check" else "history and metrics"
    return f"the result of this {kind} could not be recorded, so {others} do not know it: {error.message}"


@contextmanager
def recorded_activity(
    context: typer.Context, fleet: Fleet, kind: str, snapshot: str = "", *, begins_at_once: bool = True
) -> Iterator[RecordedCommand]:
    """Like `activity`, but for a command without an intent; record its outcome.

    If the outcome of a command that did not raise can't be stored, because the store is full or the credentials may
    only read, a note says so, and `unrecorded` is set; the exit code stays. Unless it `begins_at_once`, the operation
    begins when `begin` is called; a command that ends earlier leaves no record.
    """
    command, about = Command(kind, snapshot, new_operation_id(utc_now())), Command(kind, snapshot)
    with (
        progress(context) as shown,
        traced(fleet, shown, command) as target,
        Activity(times := StepTimes(target), about, partial(open_own_store, fleet), stop_process, announce) as found,
    ):
        run = RecordedCommand(found, command.operation)
        command_context(context).operations.append(command.operation)
        if begins_at_once:
            run.begin()

        def record(ending: Ending) -> None:
            found.ending()
            if run.is_begun:
                by = own_label(kind, snapshot)
                record_without_intent(open_own_store(fleet), command, found.began_at, by, ending)

        try:
            yield run
        except BaseException as error:
            with suppress(SnapshotError):
                ending = Ending("failed", reason_of(error), code_of(error), run.volumes, phases=times.phases())
                record(replace(ending, copied=run.copied))
            raise
        try:
            ending = Ending("done", run.reason, run.code, run.volumes, run.checked, times.phases())
            record(replace(ending, copied=run.copied))
        except SnapshotError as error:
            run.unrecorded = unrecorded_text(kind, error)
            found.note(run.unrecorded)
