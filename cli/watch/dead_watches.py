"""Forget the watches before this one whose processes were killed: nobody else would, and they have left nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from cutline.cli.watch.fleet_source import FleetSource
from cutline.fleet.progress import Silent
from cutline.snapshots.activity.cancelling import forget
from cutline.snapshots.activity.under_way import WATCH, ActivityState, read_under_way
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError

# One that was killed when this one took over counts as dead by then.
FORGET_SECONDS = 180.0


@dataclass(slots=True)
class DeadWatches:
    """Looks for them once, a while after this watch has its turn."""

    _due_at: float | None = field(default_factory=lambda: time.monotonic() + FORGET_SECONDS)

    def forget_when_due(self, source: FleetSource, log: Callable[..., None]) -> None:
        """Record of each that it is dead; a store that does not answer now is asked again as late."""
        if self._due_at is None or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + FORGET_SECONDS
        with suppress(SnapshotError):
            store, now = source.open_store(), utc_now()
            for one in read_under_way(store):
                if one.kind == WATCH and one.opened is None and one.state(now) is ActivityState.DEAD:
                    log(f"operation {one.id}, an earlier watch: {forget(store, one, Silent()).text}")
            self._due_at = None
