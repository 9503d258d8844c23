"""Whether the active watch shows signs of life: one that hangs holds the watch lock, and keeps others from working."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from cutline.cli.watch.fleet_source import FleetSource
from cutline.fleet.label import Label, end_sessions_statement
from cutline.snapshots.activity.under_way import hanging_watch, read_under_way
from cutline.storage.clock import utc_now
from cutline.storage.errors import BusyError, SnapshotError

LOOK_SECONDS = 30.0


class SilentWatchError(BusyError):
    """The watch that holds the lock shows no sign of life."""


@dataclass(slots=True)
class SilentWatch:
    """Looks now and then, while another watch works."""

    _looked_at: float = -LOOK_SECONDS
    _found: SilentWatchError | None = None

    def find(self, source: FleetSource, busy: BusyError) -> SilentWatchError | None:
        """The error of the watch that `busy` names, None if it shows signs of life; as before if that is not known."""
        # It is the same one also where another of its sessions is met.
        if self._found is not None and _process_of(self._found) != _process_of(busy):
            self._found = None
        if time.monotonic() >= self._looked_at + LOOK_SECONDS:
            self._looked_at = time.monotonic()
            with suppress(SnapshotError):
                self._found = _find(source, busy)
        return self._found


def _process_of(busy: BusyError) -> tuple[object, ...]:
    return tuple(busy.details.get(name) for name in ("user", "host", "process"))


def _find(source: FleetSource, busy: BusyError) -> SilentWatchError | None:
    user, host, process = _process_of(busy)
    if not isinstance(process, int):
        return None
    label = Label("watch", "", str(user), str(host), process).text()
    one = hanging_watch(read_under_way(source.open_store()), label, utc_now())
    if one is None:
        return None
    return SilentWatchError(
        f"the watch of {user}@{host} (process {process}) holds the watch lock, but has shown no sign of life since"
        f" {one.seen_at}",
        hint=f"end its process; or its sessions, on every primary: {end_sessions_statement(label)}",
        details=busy.details,
    )
