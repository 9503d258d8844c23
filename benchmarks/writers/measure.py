"""What cuts and increments cost writers: the bank's clients, alternately with and without them.

A cut here is only what `create --incremental` does to the fleet: the start marker on all primaries, then the finish
marker. Whole increments are measured separately, because draining and Spark share the machine with the fleet and its
clients. A transaction counts in the window in which it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psycopg

from benchmarks.cutline import warm_session
from benchmarks.writers.bank import Clients, Seconds, clients_at_work
from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.fleet.config import load_fleet
from cutline.nodes.connections import connect
from cutline.wal.cut.markers import Marker, write_markers

SHARDS = 3
CLIENTS = 4
PAUSE_SECONDS = 0.004
CUTS_PER_WINDOW = 10
# No cut is made close to a window's ends, so that a transaction stalled by a cut begins in the same window.
MARGIN_SECONDS = 0.05
REST_SECONDS_MIN = 0.2
NAME = "writers"
WITH_CUTS, WITHOUT_CUTS = "with cuts", "without cuts"
# Long transactions are more likely to run at any given moment, so moments are compared with moments.
DURING_CUTS, DURING_NONE = "during a cut", "at such moments without"
WITH_INCREMENTS, WITHOUT_INCREMENTS = "with increments", "between them"
# Checkpoints and vacuum run at times of their own choosing, which would distort the longest latencies.
SETTINGS = {"max_wal_size": "16GB", "checkpoint_timeout": "1h", "autovacuum": "off"}

Window = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Latencies of some windows. `longest_median_seconds` is the median of the windows' longest: it varies less."""

    transactions: int
    p50_seconds: float
    p99_seconds: float
    p999_seconds: float
    longest_seconds: float
    longest_median_seconds: float


@dataclass(slots=True)
class WriterFigures:
    """The results of one run: latencies by kind of window, and the duration of each cut and increment."""

    latencies: dict[str, Distribution] = field(default_factory=dict)
    cut_seconds: list[float] = field(default_factory=list)
    increment_seconds: list[float] = field(default_factory=list)

    def ratio(self, task: str, peer: str, figure: str) -> float | None:
        """The ratio of a figure in two kinds of windows; None if one was not measured."""
        if task not in self.latencies or peer not in self.latencies:
            return None
        return float(getattr(self.latencies[task], figure) / getattr(self.latencies[peer], figure))


@contextmanager
def running_fleet(directory: Path) -> Iterator[EmbeddedFleet]:
    """Start a fleet of three shards with the bank in `directory`; stop and delete it at the end."""
    fleet = start_fleet(directory / "fleet", shards=SHARDS, backups=0, settings=SETTINGS)
    try:
        yield fleet
    finally:
        stop_fleet(directory / "fleet", delete=True)


def measure_cuts(fleet: EmbeddedFleet, figures: WriterFigures, *, cuts: int, seconds: float) -> None:
    """Make `cuts` cuts in windows of `seconds` in total, alternating with windows of the same length without cuts."""
    windows = max(1, round(cuts / CUTS_PER_WINDOW))
    length = seconds / windows + 2 * MARGIN_SECONDS
    cut_windows: list[Window] = []
    spans: dict[str, list[Window]] = {WITH_CUTS: [], WITHOUT_CUTS: []}
    with ExitStack() as opened, clients_at_work(fleet.dsns(), clients=CLIENTS, pause_seconds=PAUSE_SECONDS) as clients:
        nodes = load_fleet(fleet.fleet_toml).primaries
        sessions = {node.id: opened.enter_context(connect(node)) for node in nodes}
        time.sleep(1)
        for number in range(windows):
            # Neither kind always goes first.
            for kind in (WITH_CUTS, WITHOUT_CUTS) if number % 2 == 0 else (WITHOUT_CUTS, WITH_CUTS):
                began = time.monotonic()
                if kind == WITH_CUTS:
                    share = cuts // windows + (number < cuts % windows)
                    cut_windows += _make_cuts(sessions, began, length, share)
                _sleep_until(began + length)
                spans[kind].append((began, time.monotonic()))
    for kind, found in spans.items():
        figures.latencies[kind] = distribution(clients, found)
    figures.cut_seconds = [end - begin for begin, end in cut_windows]
    length_of_cut = float(np.median(figures.cut_seconds))
    moments = [moment for began, _ in spans[WITHOUT_CUTS] for moment in _moments(began, length, cuts // windows)]
    figures.latencies[DURING_CUTS] = distribution(clients, cut_windows, overlapping=True)
    figures.latencies[DURING_NONE] = distribution(
        clients, [(moment, moment + length_of_cut) for moment in moments], overlapping=True
    )


def _make_cuts(
    sessions: dict[str, psycopg.Connection[object]], began: float, length: float, count: int
) -> list[Window]:
    cut_windows: list[Window] = []
    for moment in _moments(began, length, count):
        _sleep_until(moment)
        marker = Marker(NAME, str(moment), "start")
        begin = time.monotonic()
        write_markers(sessions, marker)
        write_markers(sessions, replace(marker, kind="finish"))
        cut_windows.append((begin, time.monotonic()))
    return cut_windows


def _moments(began: float, length: float, count: int) -> list[float]:
    """The moments of a window at which cuts are made."""
    step = (length - 2 * MARGIN_SECONDS) / max(count, 1)
    return [began + MARGIN_SECONDS + number * step for number in range(count)]


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def measure_increments(fleet: EmbeddedFleet, figures: WriterFigures, count: int, say: Callable[[str], None]) -> None:
    """Take `count` increments, each followed by an equally long rest."""
    increments: list[Window] = []
    rests: list[Window] = []
    with warm_session(fleet.fleet_toml) as cutline:
        commit = cutline.create(NAME)
        # The first job of a session is slow.
        cutline.create_incremental(NAME)
        say(f"{count} increments")
        with clients_at_work(fleet.dsns(), clients=CLIENTS, pause_seconds=PAUSE_SECONDS) as clients:
            time.sleep(1)
            for _ in range(count):
                began = time.monotonic()
                cutline.create_incremental(NAME)
                ended = time.monotonic()
                increments.append((began, ended))
                _sleep_until(ended + max(ended - began, REST_SECONDS_MIN))
                rests.append((ended, time.monotonic()))
        cutline.forget(commit)
    figures.latencies[WITH_INCREMENTS] = distribution(clients, increments)
    figures.latencies[WITHOUT_INCREMENTS] = distribution(clients, rests)
    figures.increment_seconds = [end - begin for begin, end in increments]


def distribution(clients: Clients, windows: Sequence[Window], *, overlapping: bool = False) -> Distribution:
    """The latencies of the transactions that began in the windows, or with `overlapping` that overlap one."""
    chosen = [_latencies_in(clients, window, overlapping=overlapping) for window in windows]
    chosen = [seconds for seconds in chosen if len(seconds)]
    if not chosen:
        raise RuntimeError("no transaction ran in these windows")
    every = np.concatenate(chosen)
    p50, p99, p999 = (float(np.quantile(every, share, method="higher")) for share in (0.5, 0.99, 0.999))
    longest = [float(seconds.max()) for seconds in chosen]
    return Distribution(len(every), p50, p99, p999, max(longest), float(np.median(longest)))


def _latencies_in(clients: Clients, window: Window, *, overlapping: bool) -> Seconds:
    begin, end = window
    last = clients.starts + clients.seconds if overlapping else clients.starts
    found: Seconds = clients.seconds[(clients.starts < end) & (last >= begin)]
    return found
