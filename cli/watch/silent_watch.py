"""Whether the watch that has the turn shows signs of life: one that hangs has it, and keeps the others from working."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from cli.watch.fleet_source import FleetSource
from fleet.label import read_label
from snapshots.activity.under_way import WATCH, ActivityState, UnderWay, read_under_way
from storage.errors import BusyError, SnapshotError

LOOK_SECONDS = 30.0


class SilentWatchError(BusyError):
    """The watch that has the turn shows no sign of life."""


@dataclass(slots=True)
class SilentWatch:
    """Looks now and then, while another watch has the turn."""

    _looked_at: float = -LOOK_SECONDS
    _found: SilentWatchError | None = None

    def find(self, source: FleetSource, busy: BusyError) -> SilentWatchError | None:
        """The error of the watch that `busy` names, None if it shows signs of life; as before if that is not known."""
        if time.monotonic() >= self._looked_at + LOOK_SECONDS:
            self._looked_at = time.monotonic()
            with suppress(SnapshotError):
                self._found = _find(read_under_way(source.open_store()), busy)
        return self._found


def _find(operations: list[UnderWay], busy: BusyError) -> SilentWatchError | None:
    holder = tuple(busy.details.get(name) for name in ("user", "host", "process"))
    for one in operations:
        owner = read_label(one.label)
        if owner is None or (owner.user, owner.host, owner.process) != holder:
            continue
        if one.kind == WATCH and one.state(datetime.now(UTC)) is ActivityState.DEAD:
            session, node = busy.details.get("session"), busy.details.get("node")
            return SilentWatchError(
                f"the watch of {owner.user}@{owner.host} (process {owner.process}) has the turn, but has shown no"
                f" sign of life since {one.seen_at}",
                hint=f"end its process, or its session on node {node}: SELECT pg_terminate_backend({session})",
                details=busy.details,
            )
    return None
