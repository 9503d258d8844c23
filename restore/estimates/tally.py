"""Ask the nodes, while a step runs, how far they are: rows that are loaded, indexes that are built.

A tally only tells: whatever a node answers, or if it does not, the restore goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect
from cutline.fleet.nodes.shut_down import shut_down
from cutline.fleet.progress import Progress, Reading
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
# The indexes and foreign keys of every table, and how much is done of the indexes being built. Of a B-tree the scan,
# the sort, of which the server tells nothing, and the load into the tree take about a third each.
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
    """How to ask one node how much it has done: `database` is the one being restored, `total` what there is to do."""

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
        # Its last round tells what is done now.
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
    for one in tallies:
        with suppress(psycopg.Error, SnapshotError):
            sessions[one.database.id] = connect(one.database)
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
            for one in self.tallies:
                with suppress(psycopg.Error):
                    self._ask(one)
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
        for one in self.tallies:
            node_done = self.done.get(one.database.id, 0)
            node_total = max(one.total, node_done)
            self.progress.tell(Reading(node_done, node_total, one.unit, one.database.id))
            done, total = done + node_done, total + node_total
        self.progress.tell(Reading(done, total, self.tallies[0].unit))
