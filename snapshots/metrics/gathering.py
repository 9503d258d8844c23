"""Gather the metrics of a fleet from its store and nodes, within a time limit.

Nothing that is away makes it fail: `cutline_store_up` and `cutline_node_up` say so, and what is not known is absent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version

from cutline.fleet.config import Fleet
from cutline.snapshots.activity.ended_operations import EndedReader
from cutline.snapshots.metrics import catalog
from cutline.snapshots.metrics.catalog import Sample
from cutline.snapshots.metrics.entry_reader import EntryReader
from cutline.snapshots.metrics.node_samples import samples_of_nodes
from cutline.snapshots.metrics.store_samples import StoreFacts, archived_positions, read_facts, samples_of_store
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError
from cutline.wal.slots.lags import LagsQuery

GATHERING_SECONDS_MAX = 10.0
# Of operations that have committed nothing, with and without an intent.
READ_MAX, READ_ONCE_MAX = 1000, 200


@dataclass(frozen=True, slots=True)
class Gathered:
    """The samples of a fleet at a moment. `problems` say why the store or nodes gave none."""

    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    at: datetime


class MetricsGatherer:
    """Gathers again and again; what can't change any more is read once.

    A store that does not answer keeps one thread waiting, not one for each gathering.
    """

    def __init__(self, read_max: int = READ_MAX) -> None:
        self._ended = EndedReader(read_max)
        self._entries = EntryReader()
        self._reading: _Reading | None = None

    def gather(self, fleet: Fleet, seconds_max: float = GATHERING_SECONDS_MAX) -> Gathered:
        """Ask the store and all nodes at the same time, for `seconds_max` at most; raises nothing of theirs."""
        began = time.monotonic()
        query = LagsQuery(fleet.nodes)
        facts, problem = self._read(fleet, seconds_max)
        lags, now = query.lags(), utc_now()
        samples = [catalog.BUILD_INFO.of(1, version("cutline")), catalog.STORE_UP.of(facts is not None)]
        if facts is not None:
            samples += samples_of_store(facts, now)
        samples += samples_of_nodes(fleet, lags, archived_positions(facts.chains) if facts else {})
        samples += [catalog.GATHERED.of(now.timestamp()), catalog.GATHERING.of(time.monotonic() - began)]
        problems = [f"node {one.node}: {one.problem}" for one in lags.values() if one.problem]
        return Gathered(tuple(samples), tuple([problem] * bool(problem) + problems), now)

    def _read(self, fleet: Fleet, seconds_max: float) -> tuple[StoreFacts | None, str]:
        """What the store says, or why it says nothing."""
        if self._reading is not None and self._reading.thread.is_alive():
            return None, "the store has not answered yet since it was asked before"
        self._reading = _Reading(lambda: read_facts(fleet, self._ended, self._entries))
        self._reading.thread.join(seconds_max)
        if self._reading.thread.is_alive():
            return None, f"the store did not answer within {seconds_max:.0f} s"
        return self._reading.facts, self._reading.problem


def gather_once(fleet: Fleet, seconds_max: float = GATHERING_SECONDS_MAX) -> Gathered:
    """The metrics, by a process that ends now: it reads fewer records of the past."""
    return MetricsGatherer(READ_ONCE_MAX).gather(fleet, seconds_max)


@dataclass(slots=True)
class _Reading:
    """Reads in a daemon thread, which keeps no process from ending."""

    read: Callable[[], StoreFacts]
    facts: StoreFacts | None = None
    problem: str = "the store could not be read"
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="metrics of the store", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.facts, self.problem = self.read(), ""
        except SnapshotError as error:
            self.problem = error.message
