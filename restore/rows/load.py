"""Load rows: what a load task does in an executor, and the databases that receive the rows.

A task loads its rows and records itself in the ledger of each database in one transaction. A task that is already in a
database's ledger loads nothing there, so Spark may run a task any number of times.

A table may refuse rows until others are there (restore/rows/rounds.py). Then nothing of the task is loaded at first.
When the task is loaded again, each of its tables is loaded that accepts its rows. In the ledger, a task that has only
some of its tables lacks the entry for itself, and loads only the others.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import psycopg
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus

from cutline.columns.arrow_numbers import to_mask
from cutline.columns.bytes_column import column_of, runs
from cutline.columns.row_batches import from_stream
from cutline.fleet.config import Node, restore_limit
from cutline.fleet.messages import CHECK_NAMED
from cutline.fleet.table_names import quote_identifier
from cutline.nodes.connections import connect, disrupted_error, unreachable_error
from cutline.nodes.encodings import RAW
from cutline.nodes.groups import Group, column_list, qualify
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.nodes.unlocked_results import exchange, next_result
from cutline.restore.ddl.session_settings import set_settings
from cutline.restore.ddl.statements import NOT_FOUND, path_of_owner
from cutline.restore.estimates.pace import LOADING
from cutline.restore.rows.refused_rows import SEE_LOG, WRONG_COUNT, hint_of, may_depend_on_others
from cutline.restore.scope.table_routes import EVERYWHERE, NOWHERE, Places, SourceRoutes, place_rows
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.ddl.database_facts import having_path, read_search_path
from cutline.snapshots.fold.anchored_images import OfTables, complete_base_rows, complete_changes
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows
from cutline.snapshots.fold.changes import unpack_flags
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, SegmentSource, filter_effective, problem_of, read_at_cut
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, error_of, find_behind, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.rate import RateLimit
from cutline.wal.segments.segments import SEGMENT_SCHEMA

# Each table's owner, and whether its constraints or generated columns call functions that set no search_path. A
# domain's functions may be called for any table.
OWNERS_QUERY = """
WITH functions AS (
    SELECT p.oid FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang
     WHERE p.oid >= 16384 AND l.lanname NOT IN ('c', 'internal') AND p.prosqlbody IS NULL
       AND NOT EXISTS (SELECT FROM unnest(p.proconfig) AS of (setting) WHERE setting ^@ 'search_path=')),
callers AS (
    SELECT d.classid, d.objid FROM pg_depend d
     WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid IN (SELECT oid FROM functions)),
tables AS (
    SELECT objid AS oid FROM callers WHERE classid = 'pg_class'::regclass
    UNION SELECT k.conrelid FROM pg_constraint k
            JOIN callers c ON c.classid = 'pg_constraint'::regclass AND c.objid = k.oid
    UNION SELECT a.adrelid FROM pg_attrdef a JOIN callers c ON c.classid = 'pg_attrdef'::regclass AND c.objid = a.oid)
SELECT n.nspname, c.relname, quote_ident(pg_get_userbyid(c.relowner)),
       c.oid IN (SELECT oid FROM tables) OR pg_partition_root(c.oid) IN (SELECT oid FROM tables)
       OR 0 IN (SELECT oid FROM tables)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'r'
"""
FUNCTION_SCHEMAS_QUERY = """
SELECT quote_ident(nspname) FROM pg_namespace
 WHERE oid IN (SELECT pronamespace FROM pg_proc WHERE oid >= 16384) AND nspname <> 'information_schema' ORDER BY 1
"""


class LoadTarget(Struct, frozen=True):
    """A database with its tables, and the groups that are loaded there, keyed by number.

    `ledger` is the table of the load's ledger. `roots` are the partitioned tables through which rows are loaded
    (restore/rows/jobs.py), by group number. `search_paths`, keyed by group number, are set while a group's rows are
    loaded, because the table's functions may depend on them. `wider_paths` are set instead if one of the table's
    functions fails to find a name; tables without functions have none. `settings` are those of the sessions in which
    the server computes values from the rows. `is_in_use`: other sessions also use the tables and may have written rows,
    so no table is emptied. `task_sessions` is the maximum number of concurrent task sessions
    on the database's node, and `bytes_per_second` how fast each task may send rows (None: no limit).
    """

    node: Node
    groups: Mapping[int, Group]
    ledger: str
    roots: Mapping[int, str] = field(default_factory=dict)
    search_paths: Mapping[int, str] = field(default_factory=dict)
    wider_paths: Mapping[int, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    is_in_use: bool = False
    task_sessions: int = 1
    bytes_per_second: float | None = None

    def select(self, numbers: Iterable[int]) -> LoadTarget:
        """Return the same database with only the groups with these `numbers`."""
        return replace(self, groups={number: self.groups[number] for number in numbers if number in self.groups})


class Feed(Struct, frozen=True):
    """The destinations of a source's rows: the databases in `targets`, keyed by target number.

    The databases' groups are keyed by the source's group numbers; the ledger uses the groups' own numbers. Without
    `routes`, all rows go to the only target. With routes, targets that are already loaded are omitted, and rows for
    them are skipped.
    """

    targets: Mapping[int, LoadTarget]
    routes: SourceRoutes | None = None

    @property
    def nodes(self) -> set[str]:
        """The ids of the databases' nodes."""
        return {target.node.id for target in self.targets.values()}

    def select(self, numbers: Collection[int]) -> Feed:
        """Return this feed with only the groups with these `numbers`, omitting targets that have none of them."""
        chosen = {number: target.select(numbers) for number, target in self.targets.items()}
        routes = self.routes.select(numbers) if self.routes else None
        return Feed({number: target for number, target in chosen.items() if target.groups}, routes)

    def at_rate(self, bytes_per_second: float | None) -> Feed:
        """Return this feed with a limit on how fast each task sends rows to each target."""
        limited = {number: replace(one, bytes_per_second=bytes_per_second) for number, one in self.targets.items()}
        return replace(self, targets=limited)


class LoadTargets(Struct, frozen=True):
    """The destinations of all rows in a restore: the feeds to load, keyed by shard; `shards` lists all its sources.

    `chosen` maps nodes to the numbers of the groups whose rows are taken from their copies; standbys in it provide rows
    for their shards. If a shard has no entry, all its rows are taken from the primary's copy. `parts` is the number of
    parts into which the changed rows of each source are divided, or of all sources together if they are routed
    (restore/rows/jobs.py). If `shards`, `chosen` and `parts` are the same, Spark tasks with the same name load the same
    rows.
    """

    shards: tuple[str, ...]
    feeds: Mapping[str, Feed]
    parts: int
    chosen: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose copies are read: the shards, then the standbys."""
        return (*self.shards, *sorted(self.chosen.keys() - set(self.shards)))

    @property
    def is_routed(self) -> bool:
        """Whether each row may go to any target."""
        return any(feed.routes for feed in self.feeds.values())

    @property
    def task_sessions(self) -> dict[str, int]:
        """The maximum number of concurrent task sessions, keyed by the target's node."""
        return {
            target.node.id: target.task_sessions for feed in self.feeds.values() for target in feed.targets.values()
        }

    @property
    def bytes_per_second(self) -> int | None:
        """How fast all tasks together may send rows to each target's node."""
        nodes = (target.node for feed in self.feeds.values() for target in feed.targets.values())
        return restore_limit(nodes)

    def feed_of(self, node: str, shard: str) -> Feed | None:
        """Return the destinations of rows from the node's copy of the shard, or None."""
        feed, groups = self.feeds.get(shard), self.chosen.get(node)
        chosen = feed if feed is None or groups is None else feed.select(groups)
        return chosen if chosen and chosen.targets else None


class LoadPaths(NamedTuple):
    """The values for `search_paths` and `wider_paths` in a LoadTarget."""

    search_paths: dict[int, str]
    wider_paths: dict[int, str]


def find_load_paths(connection: psycopg.Connection[Any], groups: Iterable[Group], path: str | None) -> LoadPaths:
    """Return, for each table, the search_path of its owner's sessions given the database's `path`, and a wider path.

    Sessions on the source may have used any path. The wider path appends the schemas of the table and of all functions
    at the end, so that names found without them keep their meaning.
    """
    tables = {(schema, table): facts for schema, table, *facts in connection.execute(OWNERS_QUERY)}
    schemas = [schema for (schema,) in connection.execute(FUNCTION_SCHEMAS_QUERY)]
    paths = LoadPaths({}, {})
    for group in groups:
        owner, has_functions = tables.get((group.schema, group.table), (None, False))
        if owner is None:
            continue
        paths.search_paths[group.number] = own = path_of_owner(path, owner)
        if has_functions:
            paths.wider_paths[group.number] = ", ".join([own, quote_identifier(group.schema), *schemas])
    return paths


TOKEN_BYTES = 16
# The maximum number of tables per query, because a query locks every table that it counts.
COUNTED_AT_ONCE = 100


class LoadError(RefusedError):
    """A target node refused rows, or contains a different number of rows than were loaded."""


class TablesInUseError(RefusedError):
    """Other sessions block a restore that fills or empties tables, so it can't continue; it can be resumed."""


def create_ledger(connection: psycopg.Connection[Any], schema: str | None = None) -> str:
    """Create the ledger in the database, in a new schema; return the table's qualified name.

    It has a row for each task that is done (group 0), the rows that each task has loaded, by group, and the images that
    it has completed, by the negative number of the source's group. If no name is given, the schema gets a random name,
    because the snapshot may have schemas with any name.
    """
    schema = schema or f"cutline_{secrets.token_hex(TOKEN_BYTES)}"
    connection.execute(f"CREATE SCHEMA {schema}")
    connection.execute(
        f"CREATE TABLE {schema}.ledger (task text, groupno int, rows bigint NOT NULL, PRIMARY KEY (task, groupno))"
    )
    return f"{schema}.ledger"


def has_ledger(connection: psycopg.Connection[Any], ledger: str) -> bool:
    """Whether the database has this ledger, which the last step drops (restore/ddl/ddl.py)."""
    row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (ledger,)).fetchone()
    return row == (True,)


def check_counts(connection: psycopg.Connection[Any], target: LoadTarget) -> int:
    """Count the rows in all tables and return their sum; raise LoadError if the ledger has a different number.

    Groups loaded through a root are counted together in the root, because their rows may be in any of its partitions.
    """
    query = f"SELECT groupno, sum(rows)::bigint FROM {target.ledger} GROUP BY groupno"
    loaded = dict(connection.execute(query.encode()).fetchall())
    expected: dict[str, int] = {}
    names: dict[str, str] = {}
    for group in target.groups.values():
        root = target.roots.get(group.number)
        table = root or f"ONLY {qualify(group)}"
        names[table] = root or group.name
        expected[table] = expected.get(table, 0) + loaded.get(group.number, 0)
    tables, path = list(expected), read_search_path(connection) if target.is_in_use else None
    for start in range(0, len(tables), COUNTED_AT_ONCE):
        some = tables[start : start + COUNTED_AT_ONCE]
        counts = (f"SELECT {number}, pg_catalog.count(*) FROM {table}" for number, table in enumerate(some))
        with having_path(connection, path) if target.is_in_use else nullcontext():
            counted = connection.execute(sql.SQL(" UNION ALL ".join(counts))).fetchall()
        for number, count in counted:
            if count != expected[some[number]]:
                name = names[some[number]]
                raise LoadError(
                    f"node {target.node.id}: table {name} has {count} rows, but {expected[some[number]]} were loaded",
                    hint="check whether something else writes to the restored database, then repeat the command",
                    details={"node": target.node.id, "group": name},
                )
    return sum(expected.values())


WRITE_BYTES = 1 << 20
CONTEXT_SHOWN_MAX = 200
SAY_SECONDS = 0.5
# The minimum number of rows in a batch for freezing: fewer rows occupy only a few pages.
FROZEN_FROM = 10_000
# SQLSTATE class 57P, operator intervention: the server shuts down, or ends all sessions after a crash.
SHUTDOWN = "57P"
LOADED = "cutline"
DETAIL_SHOWN_MAX = 200


def load_error(node: Node, error: psycopg.Error, hint: Sequence[str] = (SEE_LOG,)) -> SnapshotError:
    """Return the error for a failed statement; `hint` applies unless the node was lost or disrupted."""
    # A server that shuts down reports that, but a lost server reports nothing.
    if isinstance(error, psycopg.OperationalError) and (error.diag.sqlstate or SHUTDOWN).startswith(SHUTDOWN):
        return unreachable_error(node, error)
    where = error.diag.table_name or (error.diag.context or "")[:CONTEXT_SHOWN_MAX]
    if remedy_of(error):
        return disrupted_error(node.id, error, where)
    # The detail names the key that occurs twice. For other constraints, it contains the whole row.
    is_of_key = isinstance(error, (psycopg.errors.UniqueViolation, psycopg.errors.ExclusionViolation))
    detail = f": {(error.diag.message_detail or '')[:DETAIL_SHOWN_MAX]}" if is_of_key else ""
    return LoadError(
        f"node {node.id}: {shorten_message(error)}{detail} {where}".rstrip(),
        hint=hint,
        details={"node": node.id},
    )


# Why tables refused rows that they may accept once others are there, keyed by target number and group number.
Refused: TypeAlias = Mapping[tuple[int, int], ErrorReport]


class Loader:
    """Sends a task's rows to one database in the caller's transaction, group by group.

    Groups that the ledger already has of this task are skipped. `alone` are the groups that have no rows in other
    tasks. If `left_out` is given, the task is loaded again: these groups are left out, with the reasons, and groups
    that refuse rows are added to `refused` instead of raising an error, unless they can't ever accept them.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        target: LoadTarget,
        task: str,
        alone: Set[int] = frozenset(),
        left_out: Mapping[int, ErrorReport] | None = None,
    ) -> None:
        self._connection, self._target, self._task, self._alone = connection, target, task, alone
        self._is_again, self.refused = left_out is not None, dict(left_out or {})
        # Whether a group has refused rows after it had accepted others in this transaction.
        self.is_torn = False
        self._rows: dict[int, int] = {}
        self._frozen: set[int] = set()
        self._widened: set[int] = set()
        self._said, self._path = 0.0, ""
        self._pace = RateLimit(target.bytes_per_second)
        connection.execute("SET LOCAL synchronous_commit = off")
        entry = f"INSERT INTO {target.ledger} VALUES (%s, 0, 0) ON CONFLICT DO NOTHING"
        # The INSERT waits for a concurrent attempt at the same task, so what that has loaded is read afterwards.
        self._is_loaded = connection.execute(entry.encode(), (task,)).rowcount == 0
        earlier = f"SELECT groupno, rows FROM {target.ledger} WHERE task = %s AND groupno <> 0"
        entries = dict(connection.execute(earlier.encode(), (task,)).fetchall())
        self._loaded = {number for number in entries if number > 0}
        self._earlier = {-number: count for number, count in entries.items() if number < 0}
        self._completed: dict[int, int] = {}

    @property
    def has_progressed(self) -> bool:
        """Whether this attempt loads something that was not in the ledger."""
        return not self._is_loaded and (bool(self._rows) or not self.refused)

    def add(self, batch: pa.RecordBatch, groups: Mapping[int, Group]) -> None:
        """Send the batch's rows (columns group and row, in the order of the groups) with one COPY per group."""
        if self._is_loaded:
            return
        lines, group = batch.column("row"), np.asarray(batch.column("group").to_numpy())
        for rows in runs(group):
            if (number := int(group[rows.start])) in groups and not self._skips(groups[number].number):
                self._copy(groups[number], lines.slice(rows.start, rows.stop - rows.start))

    def _skips(self, number: int) -> bool:
        return self._is_loaded or number in self._loaded or number in self.refused

    def _copy(self, group: Group, lines: pa.Array) -> None:
        column = column_of(lines)
        data = column.data.data[int(column.offsets[0]) : int(column.offsets[-1])]
        table = self._target.roots.get(group.number) or qualify(group)
        # Omit the column list for a table without columns, or with only generated columns.
        columns = f" ({column_list(group)})" if group.columns else ""
        frozen = ", FREEZE" if self._is_frozen(group, table, len(lines)) else ""
        statement = f"COPY {table}{columns} FROM STDIN (ENCODING '{RAW}'{frozen})"
        try:
            with self._connection.transaction() if self._is_again else nullcontext():
                stored = self._copy_in(group.number, statement, data)
        except psycopg.Error as error:
            problem = load_error(self._target.node, error, hint_of(error))
            if not self._is_again or not may_depend_on_others(error):
                raise problem from error
            self.refused[group.number] = report_of(problem)
            self.is_torn = self.is_torn or group.number in self._rows
            return
        if stored != len(lines):
            raise LoadError(
                f"node {self._target.node.id}: table {group.name}: COPY stored {stored} of {len(lines)} rows",
                hint=WRONG_COUNT,
                details={"node": self._target.node.id, "group": group.name},
            )
        self._rows[group.number] = self._rows.get(group.number, 0) + len(lines)
        self._say()

    def _copy_in(self, number: int, statement: str, data: memoryview) -> int:
        """Run a COPY of a group; if one of its functions fails to find a name, repeat with the wider search_path."""
        wider = self._target.wider_paths.get(number)
        self._set_path(wider if wider and number in self._widened else self._target.search_paths.get(number, ""))
        if wider is None or number in self._widened:
            return _copy_in(self._connection, statement, data, self._pace)
        try:
            with self._connection.transaction():
                return _copy_in(self._connection, statement, data, self._pace)
        except psycopg.Error as error:
            if not NOT_FOUND.fullmatch(error.diag.sqlstate or ""):
                raise
        self._widened.add(number)
        return self._copy_in(number, statement, data)

    def _set_path(self, path: str) -> None:
        if path and path != self._path:
            # Qualify the function names: under the previous group's path, other roles' functions might match better.
            query = "SELECT pg_catalog.set_config('search_path', pg_catalog.convert_from(%s, 'UTF8'), true)"
            self._connection.execute(query, (path.encode(),))
            self._path = path

    def _is_frozen(self, group: Group, table: str, rows: int) -> bool:
        """Whether the group's rows are stored frozen, as after VACUUM; truncates the table first.

        Only groups without rows in other tasks qualify. PostgreSQL requires that the table was truncated in the same
        transaction; for only a few rows, that is not worth the time.
        """
        is_first = group.number not in self._rows and not self._is_again
        # A COPY in a savepoint can't freeze.
        may_freeze = self._alone - self._target.roots.keys() - self._target.wider_paths.keys()
        if is_first and rows >= FROZEN_FROM and group.number in may_freeze:
            self._connection.execute(f"TRUNCATE ONLY {table}".encode())
            self._frozen.add(group.number)
        return group.number in self._frozen

    def _say(self) -> None:
        """Publish the number of sent rows for progress, before the commit (restore/estimates/pace.py)."""
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            name = f"{LOADING}{sum(self._rows.values())}"
            self._connection.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (name,))

    def completed(self) -> dict[int, int]:
        """Return how many images this task has completed, by group; also if it did so earlier."""
        return self._earlier | self._completed

    def note_completed(self, number: int, count: int) -> None:
        """Count images of a group that this task has completed, unless the group's rows were skipped."""
        if not self._skips(self._target.groups[number].number):
            self._completed[number] = self._completed.get(number, 0) + count

    def finish(self) -> None:
        """Record the numbers of sent rows and of completed images in the ledger, and the task if no group is left."""
        if self._is_loaded:
            return
        if self._said:
            # Progress must not count rows twice once they are in the ledger.
            self._connection.execute("SELECT pg_catalog.set_config('application_name', %s, false)", (LOADED,))
        # An unqualified unnest of several arrays is pg_catalog's under any search_path; if qualified, unnest takes only
        # one argument.
        entries = f"INSERT INTO {self._target.ledger} SELECT %s::text, * FROM unnest(%s::int[], %s::bigint[])"
        counts = self._rows | {-number: count for number, count in self._completed.items()}
        self._connection.execute(entries.encode(), (self._task, list(counts), list(counts.values())))
        if self.refused:
            undone = f"DELETE FROM {self._target.ledger} WHERE task = %s AND groupno = 0"
            self._connection.execute(undone.encode(), (self._task,))


def _copy_in(connection: psycopg.Connection[Any], statement: str, data: memoryview, pace: RateLimit) -> int:
    """Run a COPY FROM STDIN with this data, at this pace; return the number of rows. Raises psycopg.Error.

    The table owner's functions may raise a notice for every row. psycopg does not read while it writes, so the server
    and psycopg would wait for each other (PostgreSQL manual, "Asynchronous Command Processing").
    """
    libpq = connection.pgconn
    begun = libpq.exec_(statement.encode())
    if begun.status != ExecStatus.COPY_IN:
        raise error_from_result(begun, "utf-8")
    for start in range(0, len(data), WRITE_BYTES):
        pace.spend(min(len(data) - start, WRITE_BYTES))
        while not libpq.put_copy_data(data[start : start + WRITE_BYTES]):
            exchange(libpq)
        while libpq.flush():
            exchange(libpq)
    while not libpq.put_copy_end():
        exchange(libpq)
    while libpq.flush():
        exchange(libpq)
    ended = next_result(libpq)
    while next_result(libpq) is not None:
        pass
    if ended is None or ended.status != ExecStatus.COMMAND_OK:
        raise error_from_result(ended, "utf-8") if ended else psycopg.OperationalError("the session was lost")
    return int(ended.command_tuples or 0)


class TornTableError(Exception):
    """A table refused rows after it had accepted others of the same attempt; `refused` is what to leave out next."""

    def __init__(self, refused: Refused) -> None:
        super().__init__()
        self.refused = refused


@contextmanager
def loading(
    feeds: Mapping[int, Feed], task: str, alone: Set[int] = frozenset(), left_out: Refused | None = None
) -> Iterator[Loaders]:
    """Load the rows of one task; if the block succeeds, all databases commit, otherwise none do.

    If the process ends between two commits, only some databases have the task in their ledgers; when the task runs
    again, the other databases load their rows. `feeds` are keyed by source; `alone` are the groups that have no rows in
    other tasks. If `left_out` is given, the task is loaded again without these tables, and tables that refuse rows are
    left out, too. Raises SnapshotError and TornTableError.
    """
    with ExitStack() as stack:
        loaders = Loaders(stack, feeds, task, alone, left_out)
        yield loaders
        loaders.finish()


class Loaders:
    """The loaders of one task, keyed by target number.

    With routes, `placed` counts the rows by target, including rows that a target already has, but not those of tables
    that it refused.
    """

    def __init__(
        self,
        stack: ExitStack,
        feeds: Mapping[int, Feed],
        task: str,
        alone: Set[int],
        left_out: Refused | None = None,
    ) -> None:
        self.placed: Counter[int] = Counter()
        self._left_out = left_out
        self._stack, self._feeds, self._task, self._alone = stack, feeds, task, alone
        self._loaders: dict[int, Loader] = {}
        self._nodes: dict[int, Node] = {}

    def add(self, source: int, batch: pa.RecordBatch) -> None:
        """Send a source's rows (columns group, key, row)."""
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
        self._count(places, batch, feed.routes)
        for number, target in feed.targets.items():
            chosen = (places == number) | (places == EVERYWHERE)
            if chosen.any():
                self._send(number, batch if chosen.all() else batch.filter(pa.array(chosen)), target)

    def add_completed(self, source: int, images: pa.Table) -> None:
        """Send a source's completed images (COMPLETED_SCHEMA) of one table. Its feed has no routes."""
        group = images["group"][0].as_py()
        for batch in images.select(["group", "row", "key"]).combine_chunks().to_batches():
            self.add(source, batch)
        for number, target in self._feeds[source].targets.items():
            if group in target.groups:
                self._loaders[number].note_completed(group, len(images))

    def completed(self, source: int) -> dict[tuple[int, int], int]:
        """Return how many images of the source the task has completed, by source and group."""
        self._open(self._feeds[source])
        (loader,) = self._loaders.values()
        return {(source, group): count for group, count in loader.completed().items()}

    def report(self, completed: Mapping[tuple[int, int], int] | None = None) -> LoadReport:
        """Return what was placed and refused."""
        problem, *others = self._refused().values() or (None,)
        return LoadReport(
            self.placed,
            problem,
            completed or {},
            tuple(others),
            may_be_accepted=problem is not None,
            has_progressed=any(loader.has_progressed for loader in self._loaders.values()),
        )

    def _refused(self) -> dict[tuple[int, int], ErrorReport]:
        return {
            (number, group): problem
            for number, loader in self._loaders.items()
            for group, problem in loader.refused.items()
        }

    def finish(self) -> None:
        """Record the numbers of sent rows in the ledgers; raise TornTableError if a table has only some of its rows."""
        if any(loader.is_torn for loader in self._loaders.values()):
            raise TornTableError(self._refused())
        for number, loader in self._loaders.items():
            with _naming(self._nodes[number]):
                loader.finish()

    def _send(self, number: int, batch: pa.RecordBatch, target: LoadTarget) -> None:
        with _naming(target.node):
            self._loaders[number].add(batch, target.groups)

    def _count(self, places: Places, batch: pa.RecordBatch, routes: SourceRoutes) -> None:
        """Count the rows by target, without those of tables that it refused; raise IndexError for an invalid target."""
        targets = len(routes.targets)
        everywhere, nowhere = (int(np.count_nonzero(places == place)) for place in (EVERYWHERE, NOWHERE))
        counts = np.bincount(places[places >= 0], minlength=targets)
        if len(counts) != targets or int(counts.sum()) + everywhere + nowhere != len(places):
            raise IndexError("a row was placed on a target that does not exist")
        self.placed.update({number: int(rows) + everywhere for number, rows in enumerate(counts)})
        for number, refused in routes.refused.items():
            group = np.asarray(batch.column("group").to_numpy())
            left_out = np.isin(group, list(refused)) & ((places == number) | (places == EVERYWHERE))
            self.placed[number] -= int(np.count_nonzero(left_out))

    def _open(self, feed: Feed) -> None:
        """Open the loaders of all the feed's targets, in a fixed order so that attempts at a task never deadlock."""
        for number in sorted(feed.targets.keys() - self._loaders.keys()):
            target = feed.targets[number]
            # This context also covers the commit at the end.
            self._stack.enter_context(_naming(target.node))
            connection = self._stack.enter_context(connect(target.node))
            set_settings(connection, target.settings)
            self._stack.enter_context(connection.transaction())
            # The table may also get rows from other sources or other users.
            alone = frozenset[int]() if feed.routes or target.is_in_use else self._alone
            left_out = None if self._left_out is None else _of_target(self._left_out, number)
            self._loaders[number] = Loader(connection, target, self._task, alone, left_out)
            self._nodes[number] = target.node


def _of_target(refused: Refused, number: int) -> dict[int, ErrorReport]:
    return {group: problem for (target, group), problem in refused.items() if target == number}


@contextmanager
def _naming(node: Node) -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise load_error(node, error) from error


class BaseLoadTask(Struct, frozen=True):
    """A base object to load; `changed` broadcasts, by group, the node's changed keys, whose base rows are obsolete.

    `alone` are the groups that have rows only in this object. `anchored` broadcasts the node's images (OfTables) that
    are to be completed with base rows.
    """

    base: BaseSource
    feed: Feed
    changed: Any
    store: StoreLocation
    alone: frozenset[int] = frozenset()
    anchored: Any = None

    @property
    def name(self) -> str:
        """The task's name in the ledgers."""
        return self.base.source.key

    @property
    def size(self) -> int:
        """The size of its object in bytes."""
        return self.base.source.size

    @property
    def nodes(self) -> set[str]:
        """The targets on which it has sessions."""
        return self.feed.nodes


class ImageLoadTask(Struct, frozen=True):
    """A source's images that the driver folded: an Arrow stream of group, row and key.

    `name` is the task's name in the ledgers.
    """

    name: str
    stream: bytes
    source: int
    feed: Feed

    @property
    def size(self) -> int:
        """The size of its images in bytes."""
        return len(self.stream)

    @property
    def nodes(self) -> set[str]:
        """The targets on which it has sessions."""
        return self.feed.nodes


class SegmentLoadTask(Struct, frozen=True):
    """A segment to load: the effective changes whose flag in `chosen` is set, and the images that others complete."""

    segment: SegmentSource
    feed: Feed
    chosen: bytes
    store: StoreLocation
    anchored: OfTables = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The task's name in the ledgers."""
        return self.segment.source.key

    @property
    def size(self) -> int:
        """The size of its object in bytes."""
        return self.segment.source.size

    @property
    def nodes(self) -> set[str]:
        """The targets on which it has sessions."""
        return self.feed.nodes


LoadTask: TypeAlias = BaseLoadTask | ImageLoadTask | SegmentLoadTask


class LoadReport(Struct, frozen=True):
    """The number of rows that a task placed on each target, keyed by target number, or the error that ended it.

    `completed` counts the images that were completed with base rows, by source and group. `others` are more problems,
    of further tables. `may_be_accepted`: the task can be loaded again once other rows are there. `has_progressed`: this
    attempt has loaded something. `torn` are the tables to leave out of the next attempt; then nothing was loaded.
    """

    placed: Mapping[int, int] = field(default_factory=dict)
    problem: ErrorReport | None = None
    completed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    others: tuple[ErrorReport, ...] = ()
    may_be_accepted: bool = False
    has_progressed: bool = False
    torn: Refused = field(default_factory=dict)

    @property
    def problems(self) -> list[ErrorReport]:
        """All problems: one for each table that refused rows."""
        return [self.problem, *self.others] if self.problem else []


def load_task(task: LoadTask) -> LoadReport:
    """Load the rows of a task; report an error instead of raising it."""
    return _attempt(partial(_load, task), None)


def load_again(task: LoadTask) -> LoadReport:
    """Load a task whose rows were refused: each of its tables that accepts its rows now."""
    left_out: Refused = {}
    while (report := _attempt(partial(_load, task), left_out)).torn:
        left_out = report.torn
    return report


def _attempt(load: Callable[[Refused | None], LoadReport], left_out: Refused | None) -> LoadReport:
    try:
        return load(left_out)
    except TornTableError as error:
        return LoadReport(problem=next(iter(error.refused.values())), may_be_accepted=True, torn=error.refused)
    except SnapshotError as error:
        cause = find_behind(error, psycopg.Error)
        return LoadReport(problem=report_of(error), may_be_accepted=cause is not None and may_depend_on_others(cause))


def _load(task: LoadTask, left_out: Refused | None) -> LoadReport:
    match task:
        case BaseLoadTask():
            return _load_base(task, left_out)
        case SegmentLoadTask():
            return _load_segment(task, left_out)
        case ImageLoadTask():
            batches = from_stream(task.stream).to_batches()
            return _load_images(batches, {task.source: task.feed}, task.name, left_out)


def _load_base(task: BaseLoadTask, left_out: Refused | None) -> LoadReport:
    tables = read_at_cut(task.store.open(), task.base, BASE_SCHEMA)
    changed: Mapping[int, Keys] = task.changed.value if task.changed is not None else {}
    anchored: OfTables = task.anchored.value if task.anchored is not None else {}
    number = task.base.source.number
    with loading({number: task.feed}, task.name, task.alone, left_out) as loaders:
        for batch in (batch for table in tables for batch in table.to_batches()):
            holds = find_valid_rows(batch, task.base, changed)
            loaders.add(number, batch if holds.all() else batch.filter(pa.array(holds)))
            for images in complete_base_rows(batch, task.base, anchored, ~holds) if anchored else ():
                loaders.add_completed(number, images)
        completed = loaders.completed(number) if anchored else {}
    return loaders.report(completed)


def _load_segment(task: SegmentLoadTask, left_out: Refused | None) -> LoadReport:
    source, seen, completed = task.segment.source, 0, 0
    with loading({source.number: task.feed}, task.name, left_out=left_out) as loaders:
        for table in read_at_cut(task.store.open(), task.segment, SEGMENT_SCHEMA):
            effective = filter_effective(table, task.segment)
            for images in complete_changes(effective, task.anchored):
                completed += len(images)
                for batch in images.select(["group", "row", "key"]).combine_chunks().to_batches():
                    loaders.add(source.number, batch)
            effective = effective.select(["group", "row", "key"])
            flags = unpack_flags(task.chosen, seen, len(effective))
            seen += len(effective)
            # A row may be 1 GB, so don't copy it, and release it before reading the next.
            chosen = effective if flags.all() else effective.filter(to_mask(flags))
            del table, effective
            for batch in chosen.to_batches():
                loaders.add(source.number, batch)
        if completed != sum(len(images.images) for images in task.anchored.values()):
            raise RuntimeError(f"{completed} images were completed with those in {source.key}")
    return loaders.report()


def load_images(
    batches: Iterator[pa.RecordBatch], feeds: Mapping[int, Feed], task: str, left_out: Refused | None = None
) -> Iterator[pa.RecordBatch]:
    """Load one Spark partition of folded rows (node, group, row, key); yield its report as one LOADED_ROWS row.

    `task` is the task's name in the ledgers, and `feeds` are keyed by node. `left_out` as for `loading`.
    """
    yield report_batch(_attempt(partial(_load_images, batches, feeds, task), left_out), task)


def _load_images(
    batches: Iterable[pa.RecordBatch], feeds: Mapping[int, Feed], task: str, left_out: Refused | None
) -> LoadReport:
    with loading(feeds, task, left_out=left_out) as loaders:
        for batch in batches:
            check_complete(batch, feeds)
            node = np.asarray(batch.column("node").to_numpy())
            for number in np.unique(node):
                chosen = batch if (node == number).all() else batch.filter(pa.array(node == number))
                loaders.add(int(number), chosen)
    return loaders.report()


def check_complete(batch: pa.RecordBatch | pa.Table, feeds: Mapping[int, Feed]) -> None:
    """Raise the error of the first row in the PROBLEM group, if there is one; all nodes have `feeds`."""
    lacking = np.flatnonzero(np.asarray(batch.column("group").to_numpy()) == PROBLEM)
    if len(lacking):
        if report := problem_of(batch.column("row")[int(lacking[0])].as_py()):
            raise error_of(report)
        feed = feeds[batch.column("node")[int(lacking[0])].as_py()]
        node = feed.routes.source if feed.routes else next(iter(feed.targets.values())).node.id
        key = batch.column("key")[int(lacking[0])].as_py()
        raise incomplete_error(node, f"the row with key {key!r}")


def incomplete_error(node: str, rows: str) -> LoadError:
    """Return the error for rows of which the snapshot lacks an earlier image."""
    return LoadError(
        f"node {node}: {rows} can't be completed: the snapshot lacks an earlier image",
        hint=f"to see what is missing: {CHECK_NAMED}",
        details={"node": node},
    )


def report_batch(report: LoadReport, task: str) -> pa.RecordBatch:
    """Return a task's report, without completed images, as one LOADED_ROWS row; `reported` is the inverse."""
    problem = json.dumps(report.problem) if report.problem else None
    rest = {
        "task": task,
        "others": report.others,
        "may_be_accepted": report.may_be_accepted,
        "has_progressed": report.has_progressed,
        "torn": [[*table, why] for table, why in report.torn.items()],
    }
    columns = [pa.array([text], pa.string()) for text in (json.dumps(report.placed), problem, json.dumps(rest))]
    return pa.record_batch(columns, names=["placed", "problem", "rest"])


def reported(placed: str, problem: str | None, rest: str) -> tuple[str, LoadReport]:
    """Return the task's name and its report from the columns of a LOADED_ROWS row."""
    fields = json.loads(rest)
    return fields["task"], LoadReport(
        {int(number): rows for number, rows in json.loads(placed).items()},
        json.loads(problem) if problem else None,
        others=tuple(fields["others"]),
        may_be_accepted=fields["may_be_accepted"],
        has_progressed=fields["has_progressed"],
        torn={(target, group): why for target, group, why in fields["torn"]},
    )
