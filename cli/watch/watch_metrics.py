"""The metrics of a fleet while `watch` runs: a thread gathers them regularly, serves them and writes them to the file.

A task may take hours, so the thread does not wait for it. A problem is logged when it first occurs, and never makes a
task fail. A watch that stands by or waits serves metrics, but does not write the file, which belongs to the active
watch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial

from msgspec import Struct, field

from cutline.cli.output.metrics_file import replace_metrics
from cutline.cli.watch.schedule import TaskKind, begins_at
from cutline.cli.watch.watcher import Watcher
from cutline.fleet.config import Fleet, ListenAddress
from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics import Sample
from cutline.snapshots.listing.metrics_endpoint import MetricsEndpoint, render
from cutline.snapshots.listing.metrics_gathering import MetricsGatherer
from cutline.storage.clock import utc_now

GATHER_SECONDS = 30.0
FRESH_SECONDS = 4 * GATHER_SECONDS
END_SECONDS_MAX = 5.0


@contextmanager
def metrics_of(watcher: Watcher) -> Iterator[None]:
    """Publish the metrics during the block."""
    publisher = _Publisher(watcher)
    thread = threading.Thread(target=publisher.run, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        publisher.ended.set()
        # The store may not answer, so this wait is limited.
        thread.join(END_SECONDS_MAX)


class _Publisher(Struct):
    watcher: Watcher
    endpoint: MetricsEndpoint | None = None
    gatherer: MetricsGatherer = field(default_factory=MetricsGatherer)
    ended: threading.Event = field(default_factory=threading.Event)
    _address: ListenAddress | None = None
    # The problems found in the last round, by activity.
    _problems: dict[str, Set[str]] = field(default_factory=dict)

    def run(self) -> None:
        """Publish metrics until `ended` is set."""
        with ExitStack() as stack:
            while True:
                fleet = self.watcher.source.fleet
                self._note("listen", partial(self._listen, fleet, stack))
                if self.endpoint is not None or (self.watcher.is_active and fleet.metrics.file is not None):
                    self._note("publish", partial(self._publish, fleet))
                if self.ended.wait(GATHER_SECONDS):
                    return

    def _listen(self, fleet: Fleet, stack: ExitStack) -> None:
        """Serve the metrics at the configured address; raise if another watch on this machine uses it."""
        if self._address != fleet.metrics.listen:
            stack.close()
            self.endpoint = self._address = None
        if self.endpoint is None and fleet.metrics.listen is not None:
            self.endpoint = stack.enter_context(MetricsEndpoint(fleet.metrics.listen, FRESH_SECONDS))
            self._address = fleet.metrics.listen

    def _publish(self, fleet: Fleet) -> None:
        gathered = self.gatherer.gather(fleet)
        self._log_new("gather", {f"the metrics are incomplete: {problem}" for problem in gathered.problems})
        text = render(fleet.name, [*gathered.samples, *samples_of_watch(self.watcher)])
        if self.endpoint is not None:
            self.endpoint.publish(text)
        if fleet.metrics.file is not None and self.watcher.is_active:
            replace_metrics(fleet.metrics.file, text)

    def _note(self, what: str, publish: Callable[[], None]) -> None:
        problems: set[str] = set()
        try:
            publish()
        except Exception as error:  # noqa: BLE001  # a problem with metrics is logged and does not end the watch
            problems = {f"the metrics could not be published: {error}"}
        self._log_new(what, problems)

    def _log_new(self, what: str, problems: Set[str]) -> None:
        for problem in sorted(problems - self._problems.get(what, set())):
            self.watcher.log(problem)
        self._problems[what] = problems


def samples_of_watch(watcher: Watcher) -> Iterator[Sample]:
    """Yield whether the watch is active, when each task is next due, and how many times in a row each has failed."""
    yield metrics.WATCH_ACTIVE.of(watcher.is_active)
    yield metrics.WATCH_FAILURES.of(watcher.notices.failures, TaskKind.WATCH.value)
    if not watcher.is_active:
        return
    hours = watcher.source.fleet.hours
    for kind, task in dict(watcher.tasks).items():
        due = begins_at(task, watcher.begun_at, utc_now(), hours)
        if due is not None:
            yield metrics.WATCH_NEXT.of(due.timestamp(), kind.value)
            yield metrics.WATCH_FAILURES.of(task.failures, kind.value)
