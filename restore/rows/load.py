"""Load rows: what a task of the load jobs does in an executor.

A task loads its rows and enters them in the database's ledger in one transaction. So Spark may repeat a task any
number of times: a task that is in the ledger loads nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus

from columns.bytes_column import column_of, runs
from fleet.config import Node
from fleet.nodes.connections import connect, unreachable_error
from fleet.nodes.encodings import RAW
from fleet.nodes.server_messages import shorten_message
from fleet.tables.groups import Group, column_list, qualify
from restore.estimates.tally import LOADING
from restore.rows.ledger import LoadError
from restore.rows.load_target import LoadTarget
from snapshots.base_copy.copy_ranges import BASE_SCHEMA
from snapshots.fold.base_rows import find_valid_rows
from snapshots.fold.changed_keys import Keys
from snapshots.fold.sources import PROBLEM, BaseSource, problem_of, read_at_cut
from storage.errors import ErrorReport, SnapshotError, error_of, report_of
from storage.location import StoreLocation

WRITE_BYTES = 1 << 20
CONTEXT_SHOWN_MAX = 200
SAY_SECONDS = 0.5
LOADED = "cutline"


@dataclass(frozen=True, slots=True)
class BaseLoadTask:
    """A base object to load; `changed` broadcasts the node's changed keys by group: their base rows don't hold."""

    base: BaseSource
    target: LoadTarget
    changed: Any
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How many rows a task sent, or the error that ended it."""

    rows: int = 0
    problem: ErrorReport | None = None


def load_base(task: BaseLoadTask) -> LoadReport:
    """Load the rows of the object whose key did not change."""
    try:
        tables = read_at_cut(task.store.open(), task.base, BASE_SCHEMA)
        changed: Mapping[int, Keys] = task.changed.value if task.changed is not None else {}
        with connect(task.target.node) as connection, connection.transaction():
            loader = Loader(connection, task.target, task.base.source.key)
            for batch in (batch for table in tables for batch in table.to_batches()):
                holds = find_valid_rows(batch, task.base, changed)
                loader.add(batch if holds.all() else batch.filter(pa.array(holds)))
            loader.finish()
        return LoadReport(loader.total)
    except SnapshotError as error:
        return LoadReport(problem=report_of(error))
    except psycopg.Error as error:
        return LoadReport(problem=report_of(load_error(task.target.node, error)))


def load_error(node: Node, error: psycopg.Error) -> SnapshotError:
    """The error for a node that refused rows, with the server's reason; unreachable if the session was lost."""
    if isinstance(error, psycopg.OperationalError) and error.diag.sqlstate is None:
        return unreachable_error(node, error)
    where = error.diag.table_name or (error.diag.context or "")[:CONTEXT_SHOWN_MAX]
    return LoadError(
        f"node {node.id}: {shorten_message(error)} {where}".rstrip(),
        hint="see the server's log, then repeat the command",
        details={"node": node.id},
    )


class Loader:
    """Sends a task's rows to one database in the caller's transaction, group by group.

    If the task is in the ledger already, `add` does nothing.
    """

    def __init__(self, connection: psycopg.Connection[Any], target: LoadTarget, task: str) -> None:
        self.total, self._said = 0, 0.0
        self._connection, self._target, self._task = connection, target, task
        self._rows: dict[int, int] = {}
        connection.execute("SET LOCAL synchronous_commit = off")
        entry = f"INSERT INTO {target.ledger} VALUES (%s, 0, 0) ON CONFLICT DO NOTHING"
        # This waits for another attempt of the same task that is still running.
        self._is_loaded = connection.execute(entry.encode(), (task,)).rowcount == 0
        connection.execute("SELECT set_config('search_path', %s, true)", (target.search_path,))

    def add(self, batch: pa.RecordBatch) -> None:
        """Send the batch's rows (columns group and row) with one COPY per group."""
        if self._is_loaded or len(batch) == 0:
            return
        lines, group = batch.column("row"), np.asarray(batch.column("group").to_numpy())
        if np.any(group[1:] < group[:-1]):
            order = np.argsort(group, kind="stable")
            lines, group = lines.take(pa.array(order)), group[order]
        for rows in runs(group):
            if (number := int(group[rows.start])) in self._target.groups:
                self._copy(self._target.groups[number], lines.slice(rows.start, rows.stop - rows.start))

    def _copy(self, group: Group, lines: pa.Array) -> None:
        column = column_of(lines)
        data = column.data.data[int(column.offsets[0]) : int(column.offsets[-1])]
        table = self._target.roots.get(group.number) or qualify(group)
        # A table may have no columns, or only generated ones: then there is no column list.
        columns = f" ({column_list(group)})" if group.columns else ""
        statement = f"COPY {table}{columns} FROM STDIN (ENCODING '{RAW}')"
        stored = _copy_in(self._connection, statement, data)
        if stored != len(lines):
            raise LoadError(
                f"node {self._target.node.id}: table {group.name}: COPY stored {stored} of {len(lines)} rows",
                hint="see the server's log, then repeat the command",
                details={"node": self._target.node.id, "group": group.name},
            )
        self._rows[group.number] = self._rows.get(group.number, 0) + len(lines)
        self.total += len(lines)
        self._say()

    def _say(self) -> None:
        """Let progress see what is sent, before it is committed (restore/estimates/tally.py)."""
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            self._connection.execute("SELECT set_config('application_name', %s, false)", (f"{LOADING}{self.total}",))

    def finish(self) -> None:
        """Enter the numbers of rows sent into the ledger."""
        if self._said:
            # Rows that the ledger has must not be counted twice.
            self._connection.execute("SELECT set_config('application_name', %s, false)", (LOADED,))
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


def load_images(
    batches: Iterator[pa.RecordBatch], targets: Mapping[int, LoadTarget], task: str
) -> Iterator[pa.RecordBatch]:
    """Load one Spark partition of folded rows (node, group, row, key); yield its report as one LOADED_ROWS row.

    `task` is its name in the ledger.
    """
    report = LoadReport()
    try:
        with ExitStack() as stack:
            loaders: dict[int, Loader] = {}
            for batch in batches:
                _check_whole(batch, targets)
                node = np.asarray(batch.column("node").to_numpy())
                for number in np.unique(node):
                    if int(number) not in loaders:
                        # Two copies may be loaded into one database.
                        loaders[int(number)] = _open_loaders(stack, targets[int(number)], f"{task}-{number}")
                    chosen = batch if (node == number).all() else batch.filter(pa.array(node == number))
                    loaders[int(number)].add(chosen)
            for loader in loaders.values():
                loader.finish()
            report = LoadReport(sum(loader.total for loader in loaders.values()))
    except SnapshotError as error:
        report = LoadReport(problem=report_of(error))
    except psycopg.Error as error:
        report = LoadReport(problem=report_of(load_error(next(iter(targets.values())).node, error)))
    yield report_batch(report)


def _check_whole(batch: pa.RecordBatch, targets: Mapping[int, LoadTarget]) -> None:
    lacking = np.flatnonzero(np.asarray(batch.column("group").to_numpy()) == PROBLEM)
    if len(lacking):
        if report := problem_of(batch.column("row")[int(lacking[0])].as_py()):
            raise error_of(report)
        node = targets[batch.column("node")[int(lacking[0])].as_py()].node.id
        key = batch.column("key")[int(lacking[0])].as_py()
        raise LoadError(
            f"node {node}: the row with key {key!r} can't be completed: the snapshot lacks an earlier image of it",
            hint="run: snapshot check   to see what is missing",
            details={"node": node},
        )


def _open_loaders(stack: ExitStack, target: LoadTarget, task: str) -> Loader:
    connection = stack.enter_context(connect(target.node))
    stack.enter_context(connection.transaction())
    return Loader(connection, target, task)


def report_batch(report: LoadReport) -> pa.RecordBatch:
    """The report as one LOADED_ROWS row: the number of rows sent, and the error as JSON."""
    problem = json.dumps(report.problem) if report.problem else None
    return pa.record_batch(
        [pa.array([report.rows], pa.int64()), pa.array([problem], pa.string())], names=["rows", "problem"]
    )
