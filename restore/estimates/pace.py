"""Measure the steps of a restore while it runs, and estimate how long the rest takes.

A tally only informs: the restore continues whether or not a node answers.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.progress import COUNTED_DOWN, Forwarding, Progress, Reading
from cutline.nodes.connections import connect, shut_down
from cutline.restore.estimates.estimate import Estimate, RestoreStep
from cutline.snapshots.records.operation_records import NodeFigures, RestoreFigures, StepFigures
from cutline.storage.errors import SnapshotError

TICK_SECONDS = 1.0
STOP_SECONDS_MAX = 2.0
# A session that loads rows says how many it has sent in the transaction that is under way.
LOADING = "cutline loading "
LOADED_QUERY = """
SELECT (SELECT coalesce(sum(rows), 0) FROM {ledger})
     + (SELECT coalesce(sum(substr(application_name, {begin})::bigint), 0) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name ~ '^{loading}[0-9]{{1,18}}$')
"""
# The indexes and foreign keys of every table, and how much is done of the indexes being built. The scan of a B-tree,
# its sort, which the server does not report, and the load into the tree take about a third each.
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


@dataclass(frozen=True, slots=True)
class NodeTally:
    """How to ask one node how much it has done: `database` is being restored, `total` is its amount of work."""

    database: Node
    total: int
    unit: str
    ask: Callable[[psycopg.Connection[Any]], int]


def rows_tally(database: Node, ledger: str, rows: int) -> NodeTally:
    """Count the rows that are loaded, those of transactions under way included."""
    query = LOADED_QUERY.format(ledger=ledger, loading=LOADING, begin=len(LOADING) + 1)

    def ask(connection: psycopg.Connection[Any]) -> int:
        (count,) = connection.execute(query.encode()).fetchone() or (0,)
        return int(count)

    return NodeTally(database, rows, "rows", ask)


def indexes_tally(database: Node, indexes: Mapping[str, int], rows: Mapping[str, int]) -> NodeTally:
    """Count the indexed rows: every index, key and foreign key of a table with `rows` rows counts as that many.

    Both are by table. An index of an empty table counts as one row.
    """

    def ask(connection: psycopg.Connection[Any]) -> int:
        done = dict(connection.execute(INDEXES_QUERY).fetchall())
        # A constraint may be an entry of its own besides its index.
        return int(sum(min(done.get(table, 0.0), count) * (1 + rows.get(table, 0)) for table, count in indexes.items()))

    return NodeTally(database, sum(n * (1 + rows.get(table, 0)) for table, n in indexes.items()), "indexed rows", ask)


@contextmanager
def tallying(progress: Progress, tallies: Sequence[NodeTally]) -> Iterator[Mapping[str, float]]:
    """While the block runs, tell `progress` about once a second how far the nodes are, each and all together.

    Yields, by node, after how many seconds its last progress was seen.
    """
    teller = _Teller(progress, tallies, sessions=_open_sessions(tallies))
    thread = threading.Thread(target=teller.run, name="tally", daemon=True)
    thread.start()
    try:
        yield teller.seconds
        teller.ended.set()
        # Its last round reports the present amount.
        thread.join(STOP_SECONDS_MAX)
    finally:
        teller.ended.set()
        # A node may not answer; and nothing may stay connected to a database that is renamed.
        for connection in list(teller.sessions.values()):
            shut_down(connection)
        thread.join(STOP_SECONDS_MAX)


def _open_sessions(tallies: Sequence[NodeTally]) -> dict[str, psycopg.Connection[Any]]:
    """A session for each node that can be reached.

    None is opened later: an owner's event trigger on login, which is created last, would run under our role.
    """
    sessions: dict[str, psycopg.Connection[Any]] = {}
    for tally in tallies:
        with suppress(psycopg.Error, SnapshotError):
            sessions[tally.database.id] = connect(tally.database)
    return sessions


@dataclass(slots=True)
class _Teller:
    """Asks in a thread of its own. `seconds`, `done` and `sessions` are by node."""

    progress: Progress
    tallies: Sequence[NodeTally]
    ended: threading.Event = field(default_factory=threading.Event)
    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, psycopg.Connection[Any]] = field(default_factory=dict)

    def run(self) -> None:
        is_last = not self.tallies
        while not is_last:
            is_last = self.ended.wait(TICK_SECONDS)
            for tally in self.tallies:
                with suppress(psycopg.Error):
                    self._ask(tally)
            self._tell()
        for connection in self.sessions.values():
            connection.close()

    def _ask(self, tally: NodeTally) -> None:
        node = tally.database.id
        if (session := self.sessions.get(node)) is None or session.closed:
            return
        now = tally.ask(session)
        if now > self.done.get(node, 0):
            self.done[node], self.seconds[node] = now, time.monotonic() - self.began

    def _tell(self) -> None:
        done = total = 0
        for tally in self.tallies:
            node_done = self.done.get(tally.database.id, 0)
            node_total = max(tally.total, node_done)
            self.progress.tell(Reading(node_done, node_total, tally.unit, tally.database.id))
            done, total = done + node_done, total + node_total
        self.progress.tell(Reading(done, total, self.tallies[0].unit))


# The parts of a step that progress names otherwise.
PARTS = {
    "check owners of large objects": RestoreStep.LARGE_OBJECTS,
    # Of a restore into tables that exist.
    "prepare tables": RestoreStep.DATABASES,
    "verify foreign keys": RestoreStep.INDEXES,
    "set sequences": RestoreStep.SWAP,
}
# Of these steps a reading says how much is done. Their own pace counts by the square of the part that is done, from a
# part on in full; and by how long it was seen: half of that after so many seconds. Readings come once a second, and the
# phases of a step differ in pace: with few indexes rows are counted first, and sorts tell nothing.
SEEN_SECONDS = {RestoreStep.ROWS: 4.0, RestoreStep.INDEXES: 60.0}
OWN_PACE_SHARE = 0.5
# The part of the estimate that has to pass until the pace so far counts as much as the estimate.
TRUST_SHARE = 0.15
# Steps of a restore that take as long as estimated still differ by about so much: such a difference says nothing
# about the next steps.
NOISE = 0.2
# The most by which the rest is thought to be slower than expected because of a single step of unknown progress.
FACTOR_MAX = 30.0
# A step of unknown progress that takes longer than expected takes about half as long again as it is late.
LATE_SHARE = 0.5
CORRECTED_SECONDS = 2.0


@dataclass(slots=True)
class RestorePace(Forwarding):
    """A Progress that passes everything on to `target`, with the seconds that are left by `estimate`.

    `seconds` are those of the steps so far, and `nodes` has the nodes that have ended. The step in progress counts by
    its own pace, as soon as a reading shows how much of it is done. The steps after it count by the estimate, and by
    how the steps so far compare with theirs. If it `is_resumed`, the first reading of a step counts earlier work.
    """

    target: Progress
    estimate: Estimate
    operation: str
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, NodeFigures] = field(default_factory=dict)
    is_resumed: bool = False
    _before: int | None = None
    _step: str = ""
    _done: float = 0.0
    _idle: float = 0.0
    # The remaining seconds, and the time of that figure.
    _left: float | None = None
    _read: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # Before the first step.
        self._left, self._read = self.estimate.total, self._began

    def step(self, name: str, *, total: int | None = None, unit: str = "") -> None:
        with self._lock:
            now = time.monotonic()
            if self._step:
                self.seconds[self._step] = self.seconds.get(self._step, 0.0) + now - self._began
            self._step, self._done, self._idle, self._began = PARTS.get(name, name), 0.0, 0.0, now
            self._before = None if self.is_resumed else 0
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
            # A phase that the server does not report: its duration is known at its end.
            return
        self._done = share
        self._left, self._read = self._estimate_left(now), now

    def correct(self) -> None:
        """Pass on what is left by now, in a step of which nothing tells how far it is."""
        with self._lock:
            if not self._step or self._done > 0.0:
                return
            now = time.monotonic()
            self._left, self._read = self._estimate_left(now), now
        self._pass_on(Reading(0))

    def seconds_left(self) -> float | None:
        """The seconds until the restore ends; None in a step that the estimate does not know."""
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
        # How the steps so far compare with their estimates.
        trust = TRUST_SHARE * self.estimate.total
        factor = (sum(self.seconds.get(step, 0.0) for step in before) + trust) / (
            sum(expected[step] for step in before) + trust
        )
        likely = due * _beyond_noise(factor)
        if done <= 0.0:
            # Its progress is unknown. If it takes longer than expected, so does the rest, probably.
            late = min(elapsed / max(due, 1.0), FACTOR_MAX)
            rest = likely - elapsed if elapsed < likely else LATE_SHARE * (elapsed - likely)
            return rest + after * max(_beyond_noise(factor), late)
        # Its pace is that of the work; a step that begins slowly need not continue slowly.
        fixed = self.estimate.fixed.get(RestoreStep(self._step), 0.0)
        seen = elapsed - min(self._idle, fixed)
        weight = min(done / OWN_PACE_SHARE, 1.0) ** 2 * seen / (seen + SEEN_SECONDS[RestoreStep(self._step)])
        # By the estimate the time that has not passed is left, or half of the work that is not done.
        left = weight * seen / done * (1 - done) + (1 - weight) * max(
            likely - elapsed, (likely - fixed) * (1 - done) / 2, 0.0
        )
        share = weight * done
        pace = share * (elapsed + left) / max(due, 0.1) + (1 - share) * factor
        return left + after * _beyond_noise(pace)

    def end_node(self, node: str, rows: int, seconds: Mapping[RestoreStep, float]) -> None:
        """Keep the measurements of one node."""
        self.nodes[node] = NodeFigures(rows, {str(step): round(taken, 3) for step, taken in seconds.items()})

    def figures(self, stored_bytes: int, transactions: int) -> RestoreFigures:
        """The measured figures, with the transactions of the increments, which the commits count."""
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
    """Correct the time that is left every few seconds, in a thread of its own."""
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
    """The weight of a factor for the next steps: nothing if it is near 1, all of it if it is far from it."""
    exponent = math.log(factor)
    return math.exp(exponent * exponent**2 / (exponent**2 + NOISE**2))
