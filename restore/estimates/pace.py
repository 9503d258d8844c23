"""Measure the steps of a restore while it runs, and estimate the remaining time.

A tally is informational only: the restore continues even if a node does not answer, and slow queries are repeated less
often.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.progress import COUNTED_DOWN, Forwarding, Progress, Reading
from cutline.nodes.connections import connect
from cutline.nodes.open_sessions import shut_down
from cutline.restore.estimates.estimate import Estimate, RestoreStep
from cutline.snapshots.records.operation_records import NodeFigures, RestoreFigures, StepFigures
from cutline.storage.errors import SnapshotError

TICK_SECONDS = 1.0
# The pause is 19 times as long as the slowest node's query, so that the query takes a twentieth of the time, up to this
# maximum. With 100,000 tables, the query for the indexes takes more than half a second.
PAUSE_PER_SECOND, PAUSE_SECONDS_MAX = 19, 30.0
STOP_SECONDS_MAX = 2.0
# The application_name of sessions that load rows, followed by the number of rows sent in the current transaction.
LOADING = "cutline loading "
LOADED_QUERY = """
SELECT (SELECT coalesce(sum(rows), 0) FROM {ledger} WHERE groupno > 0)
     + (SELECT coalesce(sum(substr(application_name, {begin})::bigint), 0) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name ~ '^{loading}[0-9]{{1,18}}$')
"""
# The indexes and foreign keys on every table, and the finished fraction of indexes being built. For a B-tree, the scan,
# the sort (which the server does not report) and the load into the tree each take about a third of the time.
INDEXES_QUERY = """
SELECT n.nspname || '.' || c.relname, sum(one.done)::float8
  FROM (SELECT indrelid, 1.0 FROM pg_index
        UNION ALL SELECT conrelid, 1.0 FROM pg_constraint WHERE contype = 'f'
        UNION ALL SELECT relid, CASE WHEN tuples_total > 0 THEN 0.65 + 0.35 * tuples_done / tuples_total
                                     WHEN blocks_total > 0 THEN 0.35 * blocks_done / blocks_total ELSE 0 END
          FROM pg_stat_progress_create_index WHERE datname = current_database()) AS one (relid, done)
  JOIN pg_class c ON c.oid = one.relid JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' GROUP BY 1
"""


class NodeTally(Struct, frozen=True):
    """A query for one node's progress: `database` is the database being restored, and `total` its amount of work."""

    database: Node
    total: int
    unit: str
    ask: Callable[[psycopg.Connection[Any]], int]


def rows_tally(database: Node, ledger: str, rows: int) -> NodeTally:
    """Count the loaded rows, including rows from open transactions."""
    query = LOADED_QUERY.format(ledger=ledger, loading=LOADING, begin=len(LOADING) + 1)

    def ask(connection: psycopg.Connection[Any]) -> int:
        (count,) = connection.execute(query.encode()).fetchone() or (0,)
        return int(count)

    return NodeTally(database, rows, "rows", ask)


def indexes_tally(database: Node, indexes: Mapping[str, int], rows: Mapping[str, int]) -> NodeTally:
    """Count the indexed rows: each index, key and foreign key counts as the number of rows in its table, plus one.

    `indexes` and `rows` are counts by table.
    """

    def ask(connection: psycopg.Connection[Any]) -> int:
        done = dict(connection.execute(INDEXES_QUERY).fetchall())
        # The query may count a constraint in addition to its index.
        return int(sum(min(done.get(table, 0.0), count) * (1 + rows.get(table, 0)) for table, count in indexes.items()))

    return NodeTally(database, sum(n * (1 + rows.get(table, 0)) for table, n in indexes.items()), "indexed rows", ask)


@contextmanager
def tallying(progress: Progress, tallies: Sequence[NodeTally]) -> Iterator[Mapping[str, float]]:
    """While the block runs, report to `progress` about once a second, for each node and in total.

    If a node's query is slow, the reports are up to PAUSE_SECONDS_MAX apart.

    Yields how many seconds had passed when each node's latest progress was seen, keyed by node.
    """
    teller = _Teller(progress, tallies, sessions=_open_sessions(tallies))
    thread = threading.Thread(target=teller.run, name="tally", daemon=True)
    thread.start()
    try:
        yield teller.seconds
        teller.ended.set()
        # Wait for the last round, which reports the final amount.
        thread.join(STOP_SECONDS_MAX)
    finally:
        teller.ended.set()
        # Shut down the sessions: a node may not be answering, and a database with sessions can't be renamed.
        for connection in list(teller.sessions.values()):
            shut_down(connection)
        thread.join(STOP_SECONDS_MAX)


def _open_sessions(tallies: Sequence[NodeTally]) -> dict[str, psycopg.Connection[Any]]:
    """Open a session to each reachable node.

    No session is opened later, because the snapshot owners' login event triggers, which are created last, would run as
    our role.
    """
    sessions: dict[str, psycopg.Connection[Any]] = {}
    for tally in tallies:
        with suppress(psycopg.Error, SnapshotError):
            sessions[tally.database.id] = connect(tally.database)
    return sessions


@dataclass(slots=True)
class _Teller:
    """The state of the thread that queries the nodes. `seconds`, `done` and `sessions` are keyed by node."""

    progress: Progress
    tallies: Sequence[NodeTally]
    ended: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, psycopg.Connection[Any]] = field(default_factory=dict)

    def run(self) -> None:
        is_last, pause = not self.tallies, TICK_SECONDS
        while not is_last:
            is_last = self.ended.wait(pause)
            seconds = max(map(self._ask, self.tallies), default=0.0)
            self._tell()
            pause = max(TICK_SECONDS, min(PAUSE_PER_SECOND * seconds, PAUSE_SECONDS_MAX))
        for connection in self.sessions.values():
            connection.close()

    def _ask(self, tally: NodeTally) -> float:
        """Ask a node, if it answers; return how many seconds that took."""
        node, began = tally.database.id, time.monotonic()
        if (session := self.sessions.get(node)) is not None and not session.closed:
            with suppress(psycopg.Error):
                now = tally.ask(session)
                if now > self.done.get(node, 0):
                    self.done[node], self.seconds[node] = now, time.monotonic() - self.began
        return time.monotonic() - began

    def _tell(self) -> None:
        done = total = 0
        for tally in self.tallies:
            node_done = self.done.get(tally.database.id, 0)
            node_total = max(tally.total, node_done)
            self.progress.tell(Reading(node_done, node_total, tally.unit, tally.database.id))
            done, total = done + node_done, total + node_total
        self.progress.tell(Reading(done, total, self.tallies[0].unit))


# Names in progress reports that belong to a step with a different name.
PARTS = {
    "check owners of large objects": RestoreStep.LARGE_OBJECTS,
    # The following are steps of a restore into existing tables.
    "prepare tables": RestoreStep.DATABASES,
    "verify foreign keys": RestoreStep.INDEXES,
    "set sequences": RestoreStep.SWAP,
}
# Readings report the progress of these steps. The weight of a step's own pace grows with the square of its finished
# fraction, up to OWN_PACE_SHARE, and with the observed time, reaching half after this many seconds. Readings come at
# most once a second and the phases of a step differ in pace. If there are few indexes, the scan is counted first, and
# then nothing is reported during the sort.
SEEN_SECONDS = {RestoreStep.ROWS: 4.0, RestoreStep.INDEXES: 60.0}
OWN_PACE_SHARE = 0.5
# The fraction of the estimated time after which the pace so far counts as much as the estimate.
TRUST_SHARE = 0.15
# Even accurately estimated steps deviate by about this factor, so such a deviation does not predict the next steps.
NOISE = 0.2
# The maximum slowness assumed for the remaining steps because of a single slow step whose progress is unknown.
FACTOR_MAX = 30.0
# A late step whose progress is unknown is assumed to take another half of its delay so far.
LATE_SHARE = 0.5
CORRECTED_SECONDS = 2.0


@dataclass(slots=True)
class RestorePace(Forwarding):
    """A Progress that forwards everything to `target` and adds the remaining seconds according to `estimate`.

    `seconds` are the durations of the steps so far, and `nodes` are the figures for finished nodes. The remaining time
    of the current step follows from its own pace as soon as a reading reports progress. For later steps, the estimate
    is corrected by the deviation of the steps so far. If the restore `is_resumed`, the first reading of a step counts
    earlier work; if it `has_early_indexes`, created during the load, so does that of the indexes.
    """

    target: Progress
    estimate: Estimate
    operation: str
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, NodeFigures] = field(default_factory=dict)
    is_resumed: bool = False
    has_early_indexes: bool = False
    _before: int | None = None
    _step: str = ""
    _done: float = 0.0
    _idle: float = 0.0
    # The remaining seconds, and when that figure was computed.
    _left: float | None = None
    _read: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._left, self._read = self.estimate.total, self._began

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            now = time.monotonic()
            if self._step:
                self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._began
            self._step, self._done, self._idle, self._began = PARTS.get(name, name), 0.0, 0.0, now
            has_earlier = self.is_resumed or (self.has_early_indexes and self._step == RestoreStep.INDEXES)
            self._before = None if has_earlier else 0
            self._left, self._read = self._estimate_left(now), now
        self.target.step(name, total=total, unit=unit)
        self._pass_on(Reading(0, total, unit))

    def end(self) -> None:
        """End the last step."""
        with self._lock:
            if self._step:
                self.seconds[self._step] = self.seconds.get(self._step, 0.0) + time.monotonic() - self._began
            self._step = ""

    def tell(self, reading: Reading) -> None:
        if reading.total and not reading.node and self._step in SEEN_SECONDS:
            with self._lock:
                self._take(reading.done, reading.total)
        self._pass_on(reading)

    def _pass_on(self, reading: Reading) -> None:
        left, is_rough = self.seconds_left(), self.estimate.is_rough
        self.target.tell(replace(reading, operation=self.operation, seconds_left=left, is_rough=is_rough))

    def _take(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._before is None:
            self._before = done
        share = min((done - self._before) / max(total - self._before, 1), 1.0)
        if share <= 0.0:
            self._idle = now - self._began
        elif share == self._done and now - self._read < (self._left or 0.0):
            # The server does not report this phase, so its duration is known only at its end.
            return
        self._done = share
        self._left, self._read = self._estimate_left(now), now

    def correct(self) -> None:
        """Report the remaining time again if the current step has not reported any progress."""
        with self._lock:
            if not self._step or self._done > 0.0:
                return
            now = time.monotonic()
            self._left, self._read = self._estimate_left(now), now
        self._pass_on(Reading(0))

    def seconds_left(self) -> float | None:
        """Return the seconds until the restore ends; None in a step that the estimate does not contain."""
        with self._lock:
            if self._left is None:
                return None
            return max(self._left - (time.monotonic() - self._read), COUNTED_DOWN * self._left)

    def _estimate_left(self, now: float) -> float | None:
        expected = {str(step): seconds for step, seconds in self.estimate.seconds.items()}
        if self._step not in expected:
            return None
        elapsed, done, due = now - self._began, self._done, expected[self._step]
        number = list(expected).index(self._step)
        before, after = list(expected)[:number], sum(list(expected.values())[number + 1 :])
        # The deviation of the steps so far from their estimates.
        trust = TRUST_SHARE * self.estimate.total
        factor = (sum(self.seconds.get(step, 0.0) for step in before) + trust) / (
            sum(expected[step] for step in before) + trust
        )
        likely = due * _beyond_noise(factor)
        if done <= 0.0:
            # The step's progress is unknown. If it takes longer than expected, the other steps probably will too.
            late = min(elapsed / max(due, 1.0), FACTOR_MAX)
            rest = likely - elapsed if elapsed < likely else LATE_SHARE * (elapsed - likely)
            return rest + after * max(_beyond_noise(factor), late)
        # Exclude the fixed time from the pace: a step that starts slowly may speed up.
        fixed = self.estimate.fixed.get(RestoreStep(self._step), 0.0)
        seen = elapsed - min(self._idle, fixed)
        weight = min(done / OWN_PACE_SHARE, 1.0) ** 2 * seen / (seen + SEEN_SECONDS[RestoreStep(self._step)])
        # According to the estimate, what remains is the rest of the expected time, but no less than half of the
        # expected time for the remaining work.
        left = weight * seen / done * (1 - done) + (1 - weight) * max(
            likely - elapsed, (likely - fixed) * (1 - done) / 2, 0.0
        )
        share = weight * done
        pace = share * (elapsed + left) / max(due, 0.1) + (1 - share) * factor
        return left + after * _beyond_noise(pace)

    def end_node(self, node: str, rows: int, seconds: Mapping[RestoreStep, float]) -> None:
        """Store the measurements for one node."""
        self.nodes[node] = NodeFigures(rows, {str(step): round(taken, 3) for step, taken in seconds.items()})

    def figures(self, stored_bytes: int, transactions: int) -> RestoreFigures:
        """Return the measured figures; `transactions` is the increments' transaction count from the commits."""
        self.end()
        amounts = {str(step): amount for step, amount in self.estimate.amounts.items()}
        steps = {
            name: StepFigures(round(seconds, 3), amounts[name])
            for name, seconds in self.seconds.items()
            if name in amounts
        }
        return RestoreFigures(
            rows=sum(node.rows for node in self.nodes.values()),
            bytes=stored_bytes,
            seconds=round(sum(figures.seconds for figures in steps.values()), 3),
            steps=steps,
            nodes=dict(self.nodes),
            transactions=transactions,
        )


@contextmanager
def corrected(pace: RestorePace) -> Iterator[None]:
    """Correct the remaining time every few seconds, in a separate thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(CORRECTED_SECONDS):
            pace.correct()

    thread = threading.Thread(target=run, name="time left", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _beyond_noise(factor: float) -> float:
    """Damp a factor for the next steps: to 1 if it is close to 1, hardly at all if it is far from 1."""
    exponent = math.log(factor)
    return math.exp(exponent * exponent**2 / (exponent**2 + NOISE**2))
