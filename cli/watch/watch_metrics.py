"""The metrics of a fleet while `watch` runs: gathered again and again by a thread, served and written to the file.

A task may take hours, so they don't wait for its end. What fails here is logged once, and fails no task.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from cli.watch.watcher import Watcher
from fleet.config import Fleet
from snapshots.metrics import catalog
from snapshots.metrics.catalog import Sample
from snapshots.metrics.endpoint import MetricsEndpoint
from snapshots.metrics.exposition import render, replace_file
from snapshots.metrics.gathering import MetricsGatherer

GATHER_SECONDS = 30.0
FRESH_SECONDS = 4 * GATHER_SECONDS


@contextmanager
def metrics_of(watcher: Watcher) -> Iterator[None]:
    """Publish the metrics during the block; raises EndpointTakenError."""
    listen = watcher.fleet.metrics.listen
    with ExitStack() as stack:
        endpoint = stack.enter_context(MetricsEndpoint(listen, FRESH_SECONDS)) if listen else None
        publisher = _Publisher(watcher, endpoint)
        threading.Thread(target=publisher.run, name="metrics", daemon=True).start()
        stack.callback(publisher.ended.set)
        yield


@dataclass(slots=True)
class _Publisher:
    """Gathers, and publishes what was found."""

    watcher: Watcher
    endpoint: MetricsEndpoint | None
    gatherer: MetricsGatherer = field(default_factory=MetricsGatherer)
    ended: threading.Event = field(default_factory=threading.Event)
    _problem: str = ""

    def run(self) -> None:
        """Until `ended` is set."""
        while True:
            fleet = self.watcher.fleet
            if self.endpoint is not None or fleet.metrics.file is not None:
                self._note(partial(self._publish, fleet))
            if self.ended.wait(GATHER_SECONDS):
                return

    def _publish(self, fleet: Fleet) -> None:
        text = render(fleet.name, [*self.gatherer.gather(fleet).samples, *samples_of_watch(self.watcher)])
        if self.endpoint is not None:
            self.endpoint.publish(text)
        if fleet.metrics.file is not None:
            replace_file(fleet.metrics.file, text)

    def _note(self, publish: Callable[[], None]) -> None:
        problem = ""
        try:
            publish()
        except Exception as error:  # noqa: BLE001  # metrics end no watch; what fails is logged
            problem = f"the metrics could not be published: {error}"
        if problem and problem != self._problem:
            self.watcher.log(problem)
        self._problem = problem


def samples_of_watch(watcher: Watcher) -> Iterator[Sample]:
    """What the watch does, and when it does it next."""
    yield catalog.WATCH_ACTIVE.of(watcher.is_active)
    if not watcher.is_active:
        return
    for kind, task in dict(watcher.tasks).items():
        due = task.due_at(watcher.begun_at)
        if due is not None:
            yield catalog.WATCH_NEXT.of(due.timestamp(), kind.value)
            yield catalog.WATCH_FAILURES.of(task.failures, kind.value)
