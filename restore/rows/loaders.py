"""Send the rows of one task to the databases that they go to, each with its entry in the database's ledger."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus

from cutline.columns.bytes_column import column_of, runs
from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect, disrupted_error, unreachable_error
from cutline.fleet.nodes.disruptions import remedy_of
from cutline.fleet.nodes.encodings import RAW
from cutline.fleet.nodes.server_messages import shorten_message
from cutline.fleet.tables.groups import Group, column_list, qualify
from cutline.restore.ddl.function_paths import NOT_FOUND
from cutline.restore.estimates.tally import LOADING
from cutline.restore.routing.placing import EVERYWHERE, NOWHERE, Places, place_rows
from cutline.restore.rows.ledger import READS_OTHERS, LoadError
from cutline.restore.rows.load_target import Feed, LoadTarget
from cutline.storage.errors import SnapshotError

WRITE_BYTES = 1 << 20
CONTEXT_SHOWN_MAX = 200
SAY_SECONDS = 0.5
# Rows of one batch: fewer than this fit into few pages.
FROZEN_FROM = 10_000
# Operator intervention: the shutdown of the server, or of all sessions after one has crashed.
SHUTDOWN = "57P"
LOADED = "cutline"
SEE_LOG = "see the server's log, then repeat the command"


def load_error(node: Node, error: psycopg.Error) -> SnapshotError:
    """The error for a node that refused rows, with the server's reason; unreachable if they were not the reason."""
    # A server that shuts down says so; one that is gone says nothing.
    if isinstance(error, psycopg.OperationalError) and (error.diag.sqlstate or SHUTDOWN).startswith(SHUTDOWN):
        return unreachable_error(node, error)
    where = error.diag.table_name or (error.diag.context or "")[:CONTEXT_SHOWN_MAX]
    if remedy_of(error):
        return disrupted_error(node.id, error, where)
    return LoadError(
        f"node {node.id}: {shorten_message(error)} {where}".rstrip(),
        hint=READS_OTHERS if isinstance(error, psycopg.errors.CheckViolation) else SEE_LOG,
        details={"node": node.id},
    )


class Loader:
    """Sends a task's rows to one database in the caller's transaction, group by group.

    If the task is in the ledger already, `add` does nothing. `alone` are the groups that no other task has rows of.
    """

    def __init__(
        self, connection: psycopg.Connection[Any], target: LoadTarget, task: str, alone: Set[int] = frozenset()
    ) -> None:
        self._connection, self._target, self._task, self._alone = connection, target, task, alone
        self._rows: dict[int, int] = {}
        self._frozen: set[int] = set()
        self._widened: set[int] = set()
        self._said, self._path = 0.0, ""
        connection.execute("SET LOCAL synchronous_commit = off")
        entry = f"INSERT INTO {target.ledger} VALUES (%s, 0, 0) ON CONFLICT DO NOTHING"
        # This waits for another attempt of the same task that is still running.
        self._is_loaded = connection.execute(entry.encode(), (task,)).rowcount == 0

    def add(self, batch: pa.RecordBatch, groups: Mapping[int, Group]) -> None:
        """Send the batch's rows (columns group and row, in the order of the groups) with one COPY per group."""
        if self._is_loaded:
            return
        lines, group = batch.column("row"), np.asarray(batch.column("group").to_numpy())
        for rows in runs(group):
            if (number := int(group[rows.start])) in groups:
                self._copy(groups[number], lines.slice(rows.start, rows.stop - rows.start))

    def _copy(self, group: Group, lines: pa.Array) -> None:
        column = column_of(lines)
        data = column.data.data[int(column.offsets[0]) : int(column.offsets[-1])]
        table = self._target.roots.get(group.number) or qualify(group)
        # A table may have no columns, or only generated ones: then there is no column list.
        columns = f" ({column_list(group)})" if group.columns else ""
        frozen = ", FREEZE" if self._is_frozen(group, table, len(lines)) else ""
        stored = self._copy_in(group.number, f"COPY {table}{columns} FROM STDIN (ENCODING '{RAW}'{frozen})", data)
        if stored != len(lines):
            raise LoadError(
                f"node {self._target.node.id}: table {group.name}: COPY stored {stored} of {len(lines)} rows",
                hint=SEE_LOG,
                details={"node": self._target.node.id, "group": group.name},
            )
        self._rows[group.number] = self._rows.get(group.number, 0) + len(lines)
        self._say()

    def _copy_in(self, number: int, statement: str, data: memoryview) -> int:
        """Run a COPY of a group; if one of its functions does not find a name, once more with the wider search_path."""
        wider = self._target.wider_paths.get(number)
        self._set_path(wider if wider and number in self._widened else self._target.search_paths.get(number, ""))
        if wider is None or number in self._widened:
            return _copy_in(self._connection, statement, data)
        try:
            with self._connection.transaction():
                return _copy_in(self._connection, statement, data)
        except psycopg.Error as error:
            if not NOT_FOUND.fullmatch(error.diag.sqlstate or ""):
                raise
        self._widened.add(number)
        return self._copy_in(number, statement, data)

    def _set_path(self, path: str) -> None:
        if path and path != self._path:
            # The session has the path of the group before: of functions that others made none may be a better match.
            query = "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), true)"
            self._connection.execute(query, (path.encode(),))
            self._path = path

    def _is_frozen(self, group: Group, table: str, rows: int) -> bool:
        """Whether the group's rows are stored frozen, as VACUUM would leave them; the table is emptied for it.

        That is so where no other task has rows of it. PostgreSQL demands that the table was emptied in this
        transaction, which takes longer than few rows are worth.
        """
        is_first = group.number not in self._rows
        # A COPY in a savepoint can't freeze.
        may_freeze = self._alone - self._target.roots.keys() - self._target.wider_paths.keys()
        if is_first and rows >= FROZEN_FROM and group.number in may_freeze:
            self._connection.execute(f"TRUNCATE ONLY {table}".encode())
            self._frozen.add(group.number)
        return group.number in self._frozen

    def _say(self) -> None:
        """Let progress see what is sent, before it is committed (restore/estimates/tally.py)."""
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            name = f"{LOADING}{sum(self._rows.values())}"
            self._connection.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (name,))

    def finish(self) -> None:
        """Enter the numbers of rows sent into the ledger."""
        if self._said:
            # Rows that the ledger has must not be counted twice.
            self._connection.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (LOADED,))
        # With several arguments it is pg_catalog's, whatever the search_path; with a schema it takes only one.
        entries = f"INSERT INTO {self._target.ledger} SELECT %s::text, * FROM unnest(%s::int[], %s::bigint[])"
        self._connection.execute(entries.encode(), (self._task, list(self._rows), list(self._rows.values())))


def _copy_in(connection: psycopg.Connection[Any], statement: str, data: memoryview) -> int:
    """Run a COPY FROM STDIN with this data; return the number of rows. Raises psycopg.Error.

    A function of the table's owner may say something about every row. psycopg itself reads nothing while it writes, so
    both sides would wait for each other; libpq reads if it is the one that waits (PostgreSQL manual, "Asynchronous
    Command Processing").
    """
    libpq = connection.pgconn
    libpq.nonblocking = 0
    try:
        if (begun := libpq.exec_(statement.encode())).status != ExecStatus.COPY_IN:
            raise error_from_result(begun, "utf-8")
        for start in range(0, len(data), WRITE_BYTES):
            libpq.put_copy_data(data[start : start + WRITE_BYTES])
        libpq.put_copy_end()
        ended = libpq.get_result()
        while libpq.get_result() is not None:
            pass
    finally:
        if libpq.status == ConnStatus.OK:
            libpq.nonblocking = 1
    if ended is None or ended.status != ExecStatus.COMMAND_OK:
        raise error_from_result(ended, "utf-8") if ended else psycopg.OperationalError("the session was lost")
    return int(ended.command_tuples or 0)


@contextmanager
def loading(feeds: Mapping[int, Feed], task: str, alone: Set[int] = frozenset()) -> Iterator[Loaders]:
    """Load the rows of one task; each database commits when the block ends well, else none does.

    A process that ends between two commits leaves a task that some databases have in their ledgers: when it is
    repeated, the others load their rows. `feeds` are by source; `alone` are the groups that no other task has rows of.
    Raises SnapshotError.
    """
    with ExitStack() as stack:
        loaders = Loaders(stack, feeds, task, alone)
        yield loaders
        loaders.finish()


class Loaders:
    """The loaders of one task, by the targets' numbers.

    Where there are routes, `placed` counts the rows by the targets that they go to, also those that these have already.
    """

    def __init__(self, stack: ExitStack, feeds: Mapping[int, Feed], task: str, alone: Set[int]) -> None:
        self.placed: Counter[int] = Counter()
        self._stack, self._feeds, self._task, self._alone = stack, feeds, task, alone
        self._loaders: dict[int, Loader] = {}
        self._nodes: dict[int, Node] = {}

    def add(self, source: int, batch: pa.RecordBatch) -> None:
        """Send the rows of one source (columns group, key, row)."""
        if len(batch) == 0:
            return
        feed, group = self._feeds[source], np.asarray(batch.column("group").to_numpy())
        if np.any(group[1:] < group[:-1]):
            batch = batch.take(pa.array(np.argsort(group, kind="stable")))
        self._open(feed)
        if feed.routes is None:
            for number, target in feed.targets.items():
                self._send(number, batch, target)
            return
        places = place_rows(batch, feed.routes)
        self._count(places, len(feed.routes.targets))
        for number, target in feed.targets.items():
            chosen = (places == number) | (places == EVERYWHERE)
            if chosen.any():
                self._send(number, batch if chosen.all() else batch.filter(pa.array(chosen)), target)

    def finish(self) -> None:
        """Enter the numbers of rows sent into the ledgers."""
        for number, loader in self._loaders.items():
            with _naming(self._nodes[number]):
                loader.finish()

    def _send(self, number: int, batch: pa.RecordBatch, target: LoadTarget) -> None:
        with _naming(target.node):
            self._loaders[number].add(batch, target.groups)

    def _count(self, places: Places, targets: int) -> None:
        """Count the rows by their places; raise IndexError for one that is none."""
        everywhere, nowhere = (int(np.count_nonzero(places == one)) for one in (EVERYWHERE, NOWHERE))
        counts = np.bincount(places[places >= 0], minlength=targets)
        if len(counts) != targets or int(counts.sum()) + everywhere + nowhere != len(places):
            raise IndexError("a row was placed on a target that does not exist")
        self.placed.update({number: int(rows) + everywhere for number, rows in enumerate(counts)})

    def _open(self, feed: Feed) -> None:
        """Open the loaders of all the feed's targets, always in one order: two attempts of a task never block both."""
        for number in sorted(feed.targets.keys() - self._loaders.keys()):
            target = feed.targets[number]
            # Also for the commit, at the end.
            self._stack.enter_context(_naming(target.node))
            connection = self._stack.enter_context(connect(target.node))
            self._stack.enter_context(connection.transaction())
            # Rows of several sources may go to one table, and so may those of others.
            alone = frozenset[int]() if feed.routes or target.is_in_use else self._alone
            self._loaders[number] = Loader(connection, target, self._task, alone)
            self._nodes[number] = target.node


@contextmanager
def _naming(node: Node) -> Iterator[None]:
    """Raise an error of the database as one that names the node."""
    try:
        yield
    except psycopg.Error as error:
        raise load_error(node, error) from error
