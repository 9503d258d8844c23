"""Progress of a command that others may watch and stop: heartbeats in the store, while its progress is shown here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import typer

from cutline.cli.output.results import progress
from cutline.cli.process.detaching import announce, is_in_background
from cutline.cli.process.stopping import stop_process
from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import StepTimes
from cutline.snapshots.listing.spans import traced
from cutline.snapshots.operations.activity import Activity, Command, Ending, record_without_intent
from cutline.snapshots.operations.operation import code_of, reason_of
from cutline.snapshots.records.operation_records import CheckedPoint
from cutline.snapshots.records.store_identity import open_own_store
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.storage.ids import new_operation_id


@contextmanager
def activity(context: typer.Context, fleet: Fleet, kind: str, snapshot: str = "") -> Iterator[Activity]:
    """Show the progress of an operation, store its signs of life, and stop the process if somebody asks for it."""
    command = Command(kind, snapshot)
    with (
        progress(context) as shown,
        traced(fleet, shown, command) as target,
        Activity(target, command, partial(open_own_store, fleet), stop_process, announce) as found,
    ):
        yield found


@dataclass(slots=True)
class RecordedCommand:
    """The activity of a command without an intent, and what its outcome says.

    Others see it as `operation` once it `is_begun`. If it raises, only `volumes` count: what it had done.
    """

    activity: Activity
    operation: str
    is_begun: bool = False
    code: int = 0
    reason: str = ""
    volumes: Mapping[str, int] = field(default_factory=dict)
    checked: tuple[CheckedPoint, ...] = ()

    def begin(self) -> None:
        """Begin the operation: the process that started a command in the background finds it from then on."""
        if is_in_background():
            self.activity.show(self.operation)
            announce(self.operation)
        self.activity.become(self.operation)
        self.is_begun = True


@contextmanager
def recorded_activity(
    context: typer.Context, fleet: Fleet, kind: str, snapshot: str = "", *, begins_at_once: bool = True
) -> Iterator[RecordedCommand]:
    """As `activity`, of a command without an intent; records its outcome, as far as the store lets us.

    If it does not begin at once, it is an operation from `begin` on; what ends before leaves no record.
    """
    command, about = Command(kind, snapshot, new_operation_id(utc_now())), Command(kind, snapshot)
    with (
        progress(context) as shown,
        traced(fleet, shown, command) as target,
        Activity(times := StepTimes(target), about, partial(open_own_store, fleet), stop_process, announce) as found,
    ):
        run = RecordedCommand(found, command.operation)
        if begins_at_once:
            run.begin()

        def record(ending: Ending) -> None:
            found.ending()
            if not run.is_begun:
                return
            with suppress(SnapshotError):
                by = own_label(kind, snapshot)
                record_without_intent(open_own_store(fleet), command, found.began_at, by, ending)

        try:
            yield run
        except BaseException as error:
            record(Ending("failed", reason_of(error), code_of(error), run.volumes, phases=times.phases()))
            raise
        record(Ending("done", run.reason, run.code, run.volumes, run.checked, times.phases()))
