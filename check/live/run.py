"""`check --live`: compare running primaries with their running standbys, and with the newest cut of a snapshot.

The tables of a shard are read in rounds of bounded size. In each round, the shards' primaries and standbys export
snapshots for a few seconds, so that no snapshot holds up VACUUM on a primary or replay on a standby for long. Pages
that differ between two nodes are read again in snapshots by turns (ordered_snapshots), which distinguish rows that
differ from rows that were being changed. Nothing is stopped or stored. The check continues without nodes that can't be
reached, also if they are lost later.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import psycopg
from msgspec import Struct, field, structs

from cutline.check.live.changes_since import ChangesSince, running_transactions
from cutline.check.live.cut_comparison import CutComparison, CutSource, match_tables
from cutline.check.live.entries import CutShard
from cutline.check.live.indexes import check_indexes
from cutline.check.live.ordered_snapshots import Shard, SnapshotOrderError, SnapshotTurn, take_turns
from cutline.check.live.pages import (
    BadRange,
    CompareReport,
    CompareTask,
    ConfirmReport,
    ConfirmTask,
    ImportedSnapshot,
    NamedVersion,
    TableDifference,
    compare_ranges,
    confirm_ranges,
)
from cutline.check.live.repair_script import qualified
from cutline.check.live.report import (
    STANDBY_ROWS,
    UNREADABLE,
    LiveConflict,
    LiveCopy,
    LiveReport,
    LiveRow,
    ShardReport,
    amounts_text,
    pages_text,
    row_claims,
)
from cutline.check.live.stored_lines import LineAtCut, RowAtCut, read_stored
from cutline.columns.bytes_column import Ints
from cutline.fleet.chain_ids import with_chain_ids
from cutline.fleet.config import Fleet, KnownServer, Node
from cutline.fleet.messages import list_some, without_node
from cutline.fleet.progress import Progress, Silent
from cutline.nodes.baseline import CHANGE_REASONS, NodeIdentity
from cutline.nodes.connections import NodeUnreachableError, connect, raising_unreachable
from cutline.nodes.encodings import encoding_of, texts_of
from cutline.nodes.free_connections import check_free_connections, task_sessions
from cutline.nodes.groups import Group, Table, read_tables
from cutline.nodes.left_out import find_planned_code
from cutline.nodes.publications import publication_names
from cutline.nodes.sessions import Sessions, identify, in_parallel, open_sessions
from cutline.nodes.table_state import read_printed, read_table_states
from cutline.nodes.watch import Watch
from cutline.snapshots.base_copy.copy_ranges import PAGE_BYTES, PageRange
from cutline.snapshots.base_copy.copy_tables import TASK_PAGES, plan_ranges
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import LostList
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import check_has_rows
from cutline.snapshots.records.store_identity import read_identity
from cutline.spark.amount import Amount
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import (
    Dealing,
    NodeShares,
    SparkSource,
    cores_of,
    limited_sessions,
    run_tasks,
    start_session,
)
from cutline.storage.errors import ErrorReport, RefusedError
from cutline.wal.drain.replay import ReplayState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Task = TypeVar("Task")
Report = TypeVar("Report")
# How much of a shard is read in one round. With a limit on the rate, a round takes ROUND_SECONDS, and a task, which
# locks tables against DDL, UNIT_SECONDS.
ROUND_BYTES = 1 << 30
ROUND_SECONDS, UNIT_SECONDS = 10, 5
PIECE_PAGES_MIN = 32
# A range that a node could not read is tried this often, in other rounds.
TRIES = 3
# Pages that are read again by one task, and in one job of a shard.
CONFIRMED_PAGES, CONFIRMED_AT_ONCE = 256, 4096
# Pages closer than this are read as one range.
GAP_PAGES = 4
# Once this many rows of a table are known to differ on a standby, its other pages are not read again.
ROWS_ENOUGH = 10_000
# The most pages that a conflict lists.
LISTED_PAGES_MAX = 1000
# The most rows that a repair script contains of one table.
REPAIRED_ROWS_MAX = 1000
NAMED_TABLES_MAX = 5
CONFLICT_HINT = (
    "if replay cancelled the query, set hot_standby_feedback = on there, or raise max_standby_streaming_delay"
)
RECOVERY_CONFLICT = "conflict with recovery"
RENAMED = (
    "labels of an enum, attributes of a type, or objects whose names the table contains were renamed during the check"
)
NO_PRIMARY = "its primary can't be reached"
WHY_UNPROVEN = (
    "because its indexes call functions of users, the table can only be read as a whole, which proves no difference:"
    " compare its rows yourself"
)


class LiveRequest(Struct, frozen=True):
    """The options of a check of running databases.

    `name` is the snapshot whose newest cut is compared as well. Up to `rows` rows are named for each table that
    differs. Each node is read at up to `bytes_per_second`. `indexes`: check indexes, too. `repairs`: collect rows for a
    script.
    """

    name: str | None = None
    rows: int = 0
    bytes_per_second: int | None = None
    indexes: bool = False
    repairs: bool = False

    @property
    def task_pages(self) -> int:
        """How many pages one task reads of a table."""
        if self.bytes_per_second is None:
            return TASK_PAGES
        pages = self.bytes_per_second * UNIT_SECONDS // PAGE_BYTES
        return min(max(pages, PIECE_PAGES_MIN), TASK_PAGES)

    @property
    def round_bytes(self) -> int:
        """How many bytes of a shard are read in one round."""
        return ROUND_BYTES if self.bytes_per_second is None else self.bytes_per_second * ROUND_SECONDS


def check_live(fleet: Fleet, request: LiveRequest, spark: SparkSource, progress: Progress) -> LiveReport:
    """Check the running databases; start Spark only if there is something to compare.

    Raises NodeUnreachableError if no primary can be reached, FleetTopologyError, and the errors of reading the
    snapshot. Other nodes that can't be reached are noted in the report.
    """
    began = time.monotonic()
    report = LiveReport(allows_one_copy=fleet.allows_one_copy)
    if (chain := _read_snapshot(fleet, request.name, report)) is not None:
        fleet = with_chain_ids(fleet, chain.renamed)
        if (lost := _lost_list(chain)) is not None:
            # Without the rows that it lists, all of them would seem to be too many in the databases.
            report.skip(
                f"snapshot {chain.name} at increment {chain.last.increment}",
                f"{lost_list_error(lost).message}; see: snapshot check {chain.name}",
            )
            chain = None
    progress.step("connect", total=len(fleet.nodes), unit="nodes")
    with (
        open_sessions(fleet, fleet.nodes, needs_all=True, away=report.unreachable) as sessions,
        _live_nodes(sessions, report) as live,
    ):
        check_free_connections(live.by_node)
        checks = _plan(live, fleet, request, report)
        away = _Away(report, sessions.watch, tuple(checks))
        needs = ExecutorNeeds(fleet.store, tuple(live.by_node))
        if any(check.left for check in checks) or chain is not None:
            spark.begin(needs, progress, _amount_of(checks) if chain is None else _amount_with_cut(chain))
            session = start_session(spark, progress)
            limits = limited_sessions(session, task_sessions(live.by_node))
            if request.bytes_per_second is not None:
                # Tasks on a node pause on their own, so there must be one at a time.
                limits |= {check.shard.primary.id: 1 for check in checks}
            run = _LiveRun(request, session, sessions, progress, report, limits, tuple(checks), away)
            run.compare_standbys()
            if chain is not None:
                compare_cut(run, fleet, chain, live)
            run.conclude(chain, fleet)
        if request.indexes:
            _check_indexes(checks, request, report, progress, away)
    # Threads have added them in any order.
    report.conflicts.sort(key=lambda one: (one.node, one.other_node or "", one.group or "", one.kind, one.index or ""))
    report.skipped.sort(key=lambda part: part.what)
    report.seconds = time.monotonic() - began
    return report


def _amount_of(checks: Iterable[_ShardCheck]) -> Amount:
    """Return the amount of work with comparing the tables of standbys: each copy is read."""
    return Amount(sum(unit.size * (1 + len(check.standbys)) for check in checks for unit in check.left))


def _amount_with_cut(chain: Chain) -> Amount:
    """Return the amount of work with comparing a cut, too: Spark shuffles the hashes of the primaries' rows by key."""
    return Amount(changes=sum(sum(chain.base_rows(shard).values()) for shard in chain.primaries))


def _read_snapshot(fleet: Fleet, name: str | None, report: LiveReport) -> Chain | None:
    """Read the chain whose newest cut the databases are compared with, if any."""
    if name is None:
        return None
    store = fleet.store.open()
    read_identity(store, fleet)
    # What lies before the newest merge may have been removed.
    chain = read_chain_lists(store, read_from_merge(store, name))
    check_has_rows(chain, "name a snapshot with rows: snapshot list")
    report.snapshot, report.increment = chain.name, chain.last.increment
    return chain


def _lost_list(chain: Chain) -> LostList | None:
    """Return a list of rows of a primary's copy that is missing or altered; None if all could be read."""
    entries = (entry for shard in chain.primaries for entry in chain.base_entries(shard))
    return next((entry for entry in entries if isinstance(entry, LostList)), None)


class _LiveNodes(Struct, frozen=True):
    """All nodes of the fleet, with a session on each of them, and their identities."""

    by_node: Mapping[Node, psycopg.Connection[Any]]
    identities: Mapping[str, NodeIdentity]

    @property
    def connections(self) -> dict[str, psycopg.Connection[Any]]:
        """The sessions by id."""
        return {node.id: connection for node, connection in self.by_node.items()}


@contextmanager
def _live_nodes(sessions: Sessions, report: LiveReport) -> Iterator[_LiveNodes]:
    """Also open sessions on the standbys that can't decode their WAL: they have no slots, but they can be read."""
    by_node, identities = dict(sessions.by_node), dict(sessions.identities)
    with ExitStack() as stack:
        for node in sessions.too_old:
            try:
                connection = connect(node)
                stack.callback(connection.close)
                identity = identify(node, connection).identity
            except NodeUnreachableError as error:
                report.unreachable[node.id] = without_node(error.message, node.id)
                sessions.watch.leave_out(node.id)
                continue
            server = KnownServer(identity.system_identifier, identity.in_recovery)
            by_node[replace(node, server=server)], identities[node.id] = connection, identity
        yield _LiveNodes(by_node, identities)


class _Unit(Struct, frozen=True):
    """Ranges that one task reads, and how often that has failed."""

    ranges: tuple[PageRange, ...]
    size: int
    tries: int = 0


class Suspects(Struct, frozen=True):
    """Pages of a table that differed on a standby, and how often they could not be read again."""

    standby: str
    oid: int
    pages: Ints
    tries: int = 0


class _Finding(Struct):
    """The rows of a table that are proven to differ on a standby."""

    changed: int = 0
    missing: int = 0
    extra: int = 0
    pages: list[int] = field(default_factory=list)
    rows: list[NamedVersion] = field(default_factory=list)
    is_cut_short: bool = False

    @property
    def total(self) -> int:
        """How many rows differ."""
        return self.changed + self.missing + self.extra

    def add(self, more: TableDifference, rows_max: int) -> None:
        """Add the difference that another task has found."""
        self.changed += more.changed
        self.missing += more.missing
        self.extra += more.extra
        self.pages += more.pages
        self.rows += more.rows[: rows_max - len(self.rows)]


class _ShardCheck(Struct):
    """A shard, the units that are left to read, and the findings about it.

    `whole` are the oids of tables that are copied whole. `standbys` are those that keep up with their primary.
    """

    shard: Shard
    report: ShardReport
    tables: dict[int, Table]
    whole: frozenset[int]
    standbys: list[Node]
    left: deque[_Unit] = field(default_factory=deque)
    suspects: list[Suspects] = field(default_factory=list)
    findings: dict[tuple[str, int], _Finding] = field(default_factory=dict)
    bad: dict[tuple[str, int], list[BadRange]] = field(default_factory=dict)
    filenodes: dict[int, set[int | None]] = field(default_factory=dict)
    restarted: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)

    def name(self, oid: int) -> str:
        """Return the table's name."""
        return self.tables[oid].group.name

    def take(self, bytes_max: int) -> list[_Unit]:
        """Take the units of the next round."""
        taken: list[_Unit] = []
        size = 0
        while self.left and (not taken or size + self.left[0].size <= bytes_max):
            taken.append(self.left.popleft())
            size += taken[-1].size
        return taken

    def put_back(self, units: Iterable[_Unit], suspects: Iterable[Suspects] = ()) -> None:
        """Put back units and pages that could not be read because a node was lost, without the pages of that node."""
        standbys = {node.id for node in self.standbys}
        for one in suspects:
            if one.standby in standbys:
                self.suspects.append(one)
            else:
                self.skipped.add(one.oid)
        if standbys:
            self.left.extendleft(reversed(list(units)))
        else:
            self.end(units)

    def drop(self, standby: str) -> None:
        """Continue without this standby."""
        self.skipped.update(one.oid for one in self.suspects if one.standby == standby)
        self.standbys = [node for node in self.standbys if node.id != standby]
        self.suspects = [one for one in self.suspects if one.standby != standby]

    def end(self, units: Iterable[_Unit] = ()) -> None:
        """Compare nothing more with standbys: tables of which a part is left do not count as compared."""
        self.skipped.update(part.oid for unit in (*self.left, *units) for part in unit.ranges)
        self.skipped.update(one.oid for one in self.suspects)
        self.left.clear()
        self.suspects.clear()


class _Away(Struct, frozen=True):
    """Continues the checks without nodes that are lost, and notes these in the report."""

    report: LiveReport
    watch: Watch
    checks: tuple[_ShardCheck, ...]

    def note(self, error: NodeUnreachableError) -> None:
        """Continue without the node that the error names."""
        node = str(error.details["node"])
        self._leave_out(node, without_node(error.message, node))

    def note_silent(self) -> bool:
        """Continue without the nodes that don't answer any more; return whether there are any."""
        silent = self.watch.silent()
        for node, seconds in silent.items():
            self._leave_out(node, f"no answer for {seconds:.0f} s")
        return bool(silent)

    def note_closed(self) -> None:
        """Continue without the primaries whose sessions have ended."""
        primaries = [check.shard.primary for check in self.checks]
        sessions = [
            (node, check.shard.connections[node.id]) for node, check in zip(primaries, self.checks, strict=True)
        ]

        def ask(one: tuple[Node, psycopg.Connection[Any]]) -> NodeUnreachableError | None:
            try:
                with raising_unreachable(one[0]):
                    one[1].execute("SELECT 1")
            except NodeUnreachableError as error:
                return error
            return None

        for error in in_parallel(ask, [one for one in sessions if one[0].id not in self.report.unreachable]):
            if error is not None:
                self.note(error)

    def _leave_out(self, lost: str, why: str) -> None:
        self.report.unreachable.setdefault(lost, why)
        self.watch.leave_out(lost)
        for check in self.checks:
            if lost == check.shard.primary.id:
                check.standbys.clear()
            check.drop(lost)
            if not check.standbys:
                check.end()


def _plan(live: _LiveNodes, fleet: Fleet, request: LiveRequest, report: LiveReport) -> list[_ShardCheck]:
    """Read the primaries' tables, and divide them into units; shards without standbys get none."""

    def plan(primary: Node) -> _ShardCheck:
        standbys = tuple(node for node in live.by_node if node.backup_of == primary.id)
        shard = Shard(primary, standbys, {node.id: live.connections[node.id] for node in (primary, *standbys)})
        connection = live.connections[primary.id]
        with raising_unreachable(primary):
            tables = read_tables(connection, fleet.groups)
            whole = find_planned_code(connection, [table.oid for table in tables])
        away = [node.id for node in fleet.nodes if node.backup_of == primary.id and node.id in report.unreachable]
        found = ShardReport(primary.id, tuple(node.id for node in standbys), tuple(away))
        readable = {table.oid: table for table in tables if table.readable and not table.hides_rows}
        for table in tables:
            if table.oid not in readable:
                report.skip(f"{table.group.name} on {primary.id}", "our role can't read all of its rows")
        check = _ShardCheck(shard, found, readable, whole, list(standbys))
        if standbys:
            check.left.extend(_units(readable.values(), request, whole))
        elif away:
            report.skip(f"rows of shard {primary.id} and its standbys", "no standby can be reached")
        elif request.name is None:
            report.skip(f"rows of shard {primary.id}", "it has no standby", is_one_copy=True)
        return check

    for node in fleet.primaries:
        if node.id in report.unreachable:
            report.skip(f"shard {node.id}", NO_PRIMARY)
    checks = in_parallel(plan, [node for node in live.by_node if node.backup_of is None])
    for check in checks:
        report.shards.append(check.report)
        report.quoted |= {table.group.name: qualified(table.group) for table in check.tables.values()}
    for node, connection in live.by_node.items():
        report.encodings[node.id] = encoding_of(connection)
        report.identities[node.id] = live.identities[node.id]
    return checks


def _units(tables: Iterable[Table], request: LiveRequest, whole: frozenset[int]) -> list[_Unit]:
    return [_Unit(planned.ranges, planned.size) for planned in plan_ranges(list(tables), request.task_pages, whole)]


def page_runs(pages: Ints, most: int) -> list[tuple[int, int]]:
    """Combine pages, in order, into ranges (low, high) of at most `most` pages; GAP_PAGES may lie between them."""
    if not len(pages):
        return []
    starts_run = np.append(True, np.diff(pages) > GAP_PAGES)
    # Pages of one run that are `most` pages apart belong to different ranges.
    first = np.maximum.accumulate(np.where(starts_run, pages, -1))
    block = (pages - first) // most
    starts = starts_run | np.append(True, np.diff(block) != 0)
    lows = pages[starts]
    highs = pages[np.append(np.flatnonzero(starts)[1:] - 1, len(pages) - 1)] + 1
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


class _UnitTask(NamedTuple):
    """A task, and the unit of a shard that it compares."""

    check: _ShardCheck
    unit: _Unit
    task: CompareTask


class _Confirmation(NamedTuple):
    """A task, and the pages of a shard's standby that it reads again."""

    check: _ShardCheck
    suspects: list[Suspects]
    task: ConfirmTask


# The stamps of how the values of a table are printed, by node and oid.
_Stamps = Mapping[tuple[str, int], frozenset[str]]


def _read_stamps(work: Iterable[_Confirmation]) -> _Stamps:
    """Read how the values of the tables are printed on their primaries and standbys now.

    Names of enum labels, regclass and the like come from the newest catalog of each server, and not from the snapshot.
    """
    wanted: dict[Node, set[int]] = {}
    connections: dict[str, psycopg.Connection[Any]] = {}
    for one in work:
        for reading in one.task.turns[:2]:
            wanted.setdefault(reading.node, set()).update(part.oid for part in one.task.ranges)
            connections[reading.node.id] = one.check.shard.connections[reading.node.id]
    stamps: dict[tuple[str, int], frozenset[str]] = {}
    for node, oids in wanted.items():
        with raising_unreachable(node):
            found = read_printed(connections[node.id], sorted(oids))
        stamps |= {(node.id, oid): some for oid, some in found.items()}
    return stamps


def is_unsteady(oid: int, nodes: Sequence[str], before: _Stamps, after: _Stamps) -> bool:
    """Whether the nodes may have printed equal values of the table differently between two readings of the stamps."""
    return len({stamps.get((node, oid)) for stamps in (before, after) for node in nodes}) > 1


class _NamedRow(NamedTuple):
    """A row of the table `oid` on a primary; `identity` is the hash of its key."""

    primary: str
    oid: int
    identity: int


class _LiveRun(Struct):
    """One check of running databases, its Spark session, and the shards that it compares."""

    request: LiveRequest
    session: SparkSession
    sessions: Sessions
    progress: Progress
    report: LiveReport
    limits: Mapping[str, int]
    checks: tuple[_ShardCheck, ...]
    away: _Away

    def compare_standbys(self) -> None:
        """Compare all standbys with their primaries; note what could not be compared."""
        if not any(check.left for check in self.checks):
            return
        self.progress.step("compare standbys", total=sum(len(check.left) for check in self.checks), unit="tasks")
        totals = Counter[str]()
        shares = NodeShares[CompareTask](self.progress, totals, lambda task: [(task.primary.node.id, task.size)])
        done = Counter[str]()
        while any(check.left for check in self.checks):
            # Units that could not be read, and tables that were rewritten, are read again.
            for check in self.checks:
                totals[check.shard.primary.id] = done[check.shard.primary.id] + sum(unit.size for unit in check.left)
            shares.begin()
            done += self._compare_round(shares)
            while any(check.suspects for check in self.checks):
                self._confirm_round()
            for check in self.checks:
                if not check.left:
                    self._restart_rewritten(check)

    def _compare_round(self, shares: NodeShares[CompareTask]) -> Counter[str]:
        """Compare the units of a round; return their bytes by primary."""
        taken = [(check, check.take(self.request.round_bytes)) for check in self.checks if check.left]
        with self._turns([check for check, _ in taken], 1) as turns:
            work: list[_UnitTask] = []
            for check, units in taken:
                if check.shard.primary.id not in turns:
                    check.put_back(units)
                for turn in turns.get(check.shard.primary.id, ()):
                    work += [_UnitTask(check, unit, self._compare_task(check, unit, turn)) for unit in units]
            dealing = Dealing[CompareTask](lambda task: task.size, lambda task: task.nodes, self.limits)
            reports = self._run(compare_ranges, [one.task for one in work], shares, dealing)
        if reports is None:
            for check, units in taken:
                if check.shard.primary.id in turns:
                    check.put_back(units)
            return Counter()
        failed: dict[str, list[tuple[_Unit, CompareReport]]] = {}
        for one, found in zip(work, reports, strict=True):
            if found.problem is not None:
                failed.setdefault(one.check.shard.primary.id, []).append((one.unit, found))
            else:
                self._take_in(one.check, found)
        for check in self.checks:
            if units_failed := failed.get(check.shard.primary.id):
                try:
                    self._try_again(check, units_failed)
                except NodeUnreachableError as error:
                    check.skipped.update(part.oid for unit, _ in units_failed for part in unit.ranges)
                    self.away.note(error)
        return Counter(
            {
                check.shard.primary.id: sum(unit.size for unit in units)
                for check, units in taken
                if check.shard.primary.id in turns
            }
        )

    def _run(
        self,
        work: Callable[[Task], Report],
        tasks: Sequence[Task],
        progress: Progress | NodeShares[Task],
        dealing: Dealing[Task],
    ) -> list[Report] | None:
        """Run the tasks; return None if that failed because a node fell silent, which is left out then."""
        try:
            return run_tasks(self.session, work, tasks, progress, dealing, self.sessions.watch)
        except Exception:
            if not self.away.note_silent():
                raise
            return None

    def _compare_task(self, check: _ShardCheck, unit: _Unit, turn: SnapshotTurn) -> CompareTask:
        taken = turn.standbys
        standbys = tuple(ImportedSnapshot(node, taken[node.id].exported) for node in check.standbys if node.id in taken)
        primary = ImportedSnapshot(check.shard.primary, turn.primary.exported)
        whole = check.whole & {part.oid for part in unit.ranges}
        return CompareTask(primary, standbys, unit.ranges, whole, unit.size, self.request.bytes_per_second)

    @contextmanager
    def _turns(self, checks: Sequence[_ShardCheck], turns: int) -> Iterator[dict[str, list[SnapshotTurn]]]:
        """Take snapshots on all of these shards by turns, for the block; the result is keyed by primary.

        Shards none of whose standbys keeps up are missing, and have no units left. Shards on which a node was lost are
        missing, too; their standbys are those that are left.
        """
        with ExitStack() as stack:
            # Closing the stack waits for nothing, so the stacks may be entered before their snapshots exist.
            stacks = [stack.enter_context(ExitStack()) for _ in checks]

            def take(one: tuple[_ShardCheck, ExitStack]) -> list[SnapshotTurn]:
                check, own = one
                return own.enter_context(
                    take_turns(check.shard, check.standbys, turns, self.progress, partial(self._drop, check))
                )

            def try_to_take(
                one: tuple[_ShardCheck, ExitStack],
            ) -> list[SnapshotTurn] | SnapshotOrderError | NodeUnreachableError:
                try:
                    return take(one)
                except (SnapshotOrderError, NodeUnreachableError) as error:
                    return error

            taken: dict[str, list[SnapshotTurn]] = {}
            results = in_parallel(try_to_take, zip(checks, stacks, strict=True))
            for check, result in zip(checks, results, strict=True):
                if isinstance(result, NodeUnreachableError):
                    self.away.note(result)
                elif isinstance(result, SnapshotOrderError):
                    self.report.skip(f"rows of shard {check.shard.primary.id}", result.message)
                    check.standbys.clear()
                    check.end()
                elif result[-1].standbys:
                    taken[check.shard.primary.id] = result
                else:
                    check.end()
            yield taken

    def _drop(self, check: _ShardCheck, state: ReplayState) -> None:
        """Continue without a standby that does not keep up with its primary."""
        check.drop(state.node)
        self.report.skip(f"standby {state.node}", state.text)

    def _take_in(self, check: _ShardCheck, found: CompareReport) -> None:
        check.report.compared.rows += found.rows
        check.report.compared.bytes += found.bytes
        self._note_bad(check, found.bad)
        for oid, filenode in found.filenodes.items():
            check.filenodes.setdefault(oid, set()).add(filenode)
        for standby, pages in found.differing.items():
            for oid in np.unique(pages[:, 0]).tolist():
                check.suspects.append(Suspects(standby, oid, pages[pages[:, 0] == oid, 1]))

    def _note_bad(self, check: _ShardCheck, bad: Iterable[BadRange]) -> None:
        for one in bad:
            known = check.bad.setdefault((one.node, one.oid), [])
            if one not in known:
                known.append(one)

    def _try_again(self, check: _ShardCheck, failed: Sequence[tuple[_Unit, CompareReport]]) -> None:
        """Put units that could not be read back, with the tables' present definitions; give up after TRIES."""
        with raising_unreachable(check.shard.primary):
            tables = {
                table.oid: table
                for table in read_tables(check.shard.connections[check.shard.primary.id], self.sessions.fleet.groups)
            }
            check.whole |= find_planned_code(check.shard.connections[check.shard.primary.id], list(tables))
        for unit, found in failed:
            # Dropped tables are not missing: their standbys drop them, too.
            ranges = [
                PageRange(tables[part.oid].group, part.oid)
                if part.oid in check.whole
                else structs.replace(part, group=tables[part.oid].group)
                for part in unit.ranges
                if part.oid in tables
            ]
            check.tables |= {part.oid: tables[part.oid] for part in ranges}
            if unit.tries + 1 < TRIES:
                # The next attempt finds out which of several tables can't be read.
                parts = [tuple(ranges)] if unit.tries == 0 or len(ranges) == 1 else [(part,) for part in ranges]
                size = unit.size // max(len(parts), 1)
                check.left.extend(_Unit(part, size, unit.tries + 1) for part in parts if part)
            elif ranges and found.problem is not None:
                self._give_up(check, [part.oid for part in ranges], found.problem, found.failed)

    def _give_up(self, check: _ShardCheck, oids: Sequence[int], problem: ErrorReport, failed: str) -> None:
        names = list_some((check.name(oid) for oid in dict.fromkeys(oids)), NAMED_TABLES_MAX)
        hint = f"; {CONFLICT_HINT}" if RECOVERY_CONFLICT in problem["message"] else ""
        self.report.skip(f"{names} on {failed or check.shard.primary.id}", f"{problem['message']}{hint}")
        check.skipped.update(oids)

    def _restart_rewritten(self, check: _ShardCheck) -> None:
        """Compare tables again whose rows have moved to another file between two rounds."""
        rewritten = [oid for oid, filenodes in check.filenodes.items() if len(filenodes) > 1]
        again = [check.tables[oid] for oid in rewritten if oid not in check.restarted and oid not in check.skipped]
        for oid in rewritten:
            if oid in check.restarted and oid not in check.skipped:
                check.skipped.add(oid)
                self.report.skip(f"{check.name(oid)} on {check.shard.primary.id}", "it was rewritten during the check")
            check.filenodes[oid] = set()
            check.restarted.add(oid)
            # Differences in the former file are found again if they still exist.
            for place in [place for place in check.findings if place[1] == oid]:
                del check.findings[place]
        check.left.extend(_units(again, self.request, check.whole))

    def _confirm_round(self) -> None:
        """Read the pages that differ again in snapshots by turns; keep the rows that are proven to differ."""
        busy = [check for check in self.checks if check.suspects]
        chosen = {check.shard.primary.id: self._choose(check) for check in busy}
        work: list[_Confirmation] = []
        with self._turns(busy, 2) as turns:
            for check in busy:
                taken = turns.get(check.shard.primary.id)
                by_standby: dict[str, list[Suspects]] = {}
                for one in chosen[check.shard.primary.id] if taken else ():
                    by_standby.setdefault(one.standby, []).append(one)
                for node in check.standbys:
                    for some in together(by_standby.get(node.id, [])):
                        if taken and node.id in taken[0].standbys:
                            work.append(_Confirmation(check, some, self._confirm_task(check, node, some, taken)))
            for check in busy:
                if check.shard.primary.id not in turns:
                    check.put_back((), chosen[check.shard.primary.id])
            dealing = Dealing[ConfirmTask](lambda _: 1, lambda task: task.nodes, self.limits)
            try:
                before = _read_stamps(work)
                reports = self._run(confirm_ranges, [one.task for one in work], Silent(), dealing)
                after = _read_stamps(work) if reports is not None else {}
            except NodeUnreachableError as error:
                self.away.note(error)
                reports = None
        if reports is None:
            for confirmation in work:
                confirmation.check.put_back((), confirmation.suspects)
            return
        for confirmation, found in zip(work, reports, strict=True):
            nodes = confirmation.check.shard.primary.id, confirmation.suspects[0].standby
            unsteady = {one.oid for one in confirmation.suspects if is_unsteady(one.oid, nodes, before, after)}
            self._conclude_pages(confirmation.check, confirmation.suspects, found, unsteady)

    def _choose(self, check: _ShardCheck) -> list[Suspects]:
        """Take the suspects of the next job, without pages of tables about which enough is known."""
        chosen: list[Suspects] = []
        left: list[Suspects] = []
        pages = 0
        for one in check.suspects:
            finding = check.findings.get((one.standby, one.oid))
            if finding is not None and finding.total >= ROWS_ENOUGH:
                finding.is_cut_short = True
                continue
            some = one.pages[: max(CONFIRMED_AT_ONCE - pages, 0)]
            pages += len(some)
            chosen += [structs.replace(one, pages=some)] if len(some) else []
            left += [structs.replace(one, pages=one.pages[len(some) :])] if len(some) < len(one.pages) else []
        check.suspects = left
        return chosen

    def _confirm_task(
        self, check: _ShardCheck, standby: Node, some: Sequence[Suspects], turns: Sequence[SnapshotTurn]
    ) -> ConfirmTask:
        ranges: list[PageRange] = []
        parts = [np.empty((0, 2), np.int64)]
        for one in some:
            group = check.tables[one.oid].group
            if one.oid in check.whole:
                ranges.append(PageRange(group, one.oid))
                parts.append(np.stack([np.full(len(one.pages), one.oid, np.int64), one.pages], axis=1))
            else:
                ranges += [PageRange(group, one.oid, low, high) for low, high in page_runs(one.pages, CONFIRMED_PAGES)]
        readings = [
            reading
            for turn in turns
            for reading in (
                ImportedSnapshot(check.shard.primary, turn.primary.exported),
                ImportedSnapshot(standby, turn.standbys[standby.id].exported),
            )
        ]
        return ConfirmTask(
            tuple(readings),
            tuple(ranges),
            check.whole & {one.oid for one in some},
            np.concatenate(parts),
            self.request.rows,
            self.request.bytes_per_second,
        )

    def _conclude_pages(
        self, check: _ShardCheck, some: Sequence[Suspects], found: ConfirmReport, unsteady: Collection[int]
    ) -> None:
        """Keep proven differences; read other pages again. Differences of `unsteady` tables (oids) prove nothing."""
        unproven = {one.oid for one in found.differences if one.unproven}
        renamed = {one.oid for one in found.differences if one.oid in unsteady}
        for one in some:
            is_unknown = found.problem is not None or one.oid in found.moved or one.oid in renamed
            if not is_unknown and one.oid not in unproven:
                continue
            if one.tries + 1 < TRIES:
                check.suspects.append(structs.replace(one, tries=one.tries + 1))
            elif one.oid in renamed:
                self.report.skip(f"{check.name(one.oid)} on {one.standby}", RENAMED)
            elif one.oid in unproven:
                lines = next(difference.unproven for difference in found.differences if difference.oid == one.oid)
                why = f"{lines:,} rows differ from {check.shard.primary.id} in every reading; {WHY_UNPROVEN}"
                self.report.skip(f"{check.name(one.oid)} on {one.standby}", why)
            elif found.problem is not None:
                self._give_up(check, [one.oid], found.problem, found.failed)
            else:
                self.report.skip(f"{check.name(one.oid)} on {one.standby}", "it was rewritten during the check")
        if found.problem is None:
            self._note_bad(check, found.bad)
        for difference in found.differences:
            if not difference.unproven and difference.oid not in renamed:
                finding = check.findings.setdefault((some[0].standby, difference.oid), _Finding())
                finding.add(difference, self.request.rows)

    def conclude(self, chain: Chain | None, fleet: Fleet) -> None:
        """Turn the findings about standbys and unreadable pages into conflicts."""
        evidence = self._evidence(chain, fleet) if chain is not None else {}
        for check in self.checks:
            primary = check.shard.primary.id
            if check.report.standbys:
                compared = set(check.filenodes) - check.skipped
                check.report.compared.tables = len(compared)
                check.report.compared.partial_tables = len(compared & {oid for _, oid in check.bad})
            for (standby, oid), finding in check.findings.items():
                detail, rows = _describe(finding), self._rows_of(check, standby, oid, finding, evidence)
                pages = tuple(sorted(set(finding.pages)))[:LISTED_PAGES_MAX]
                self.report.conflicts.append(
                    LiveConflict(STANDBY_ROWS, detail, primary, standby, check.name(oid), pages=pages, rows=rows)
                )
            for (node, oid), bad in check.bad.items():
                self._note_unreadable(check, node, oid, bad)

    def _note_unreadable(self, check: _ShardCheck, node: str, oid: int, bad: Sequence[BadRange]) -> None:
        damaged = [one for one in bad if one.is_damaged]
        if not damaged:
            what = f"{check.name(oid)}, {pages_text([one.low for one in bad], len(bad))} on {node}"
            self.report.skip(what, f"PostgreSQL can't print a row: {bad[0].text}")
            return
        pages = tuple(sorted(one.low for one in damaged))[:LISTED_PAGES_MAX]
        detail = f"{pages_text(pages, len(pages))} can't be read: {damaged[0].text}"
        self.report.conflicts.append(LiveConflict(UNREADABLE, detail, node, group=check.name(oid), pages=pages))

    def _evidence(self, chain: Chain, fleet: Fleet) -> dict[_NamedRow, LineAtCut]:
        """Return the named rows as they are at the cut."""
        wanted = {
            _NamedRow(primary, oid, row.identity): at
            for check in self.checks
            for (_, oid), finding in check.findings.items()
            for row in finding.rows
            if row.identity is not None
            and (at := row_at_cut(chain, primary := check.shard.primary.id, check.tables[oid].group, row.identity))
        }
        if not wanted:
            return {}
        self.progress.step("name the rows that differ")
        found = read_stored(self.session, chain, fleet.store, wanted.values(), self.progress)
        return {place: found[at] for place, at in wanted.items() if at in found}

    def _rows_of(
        self,
        check: _ShardCheck,
        standby: str,
        oid: int,
        finding: _Finding,
        evidence: Mapping[_NamedRow, LineAtCut],
    ) -> tuple[LiveRow, ...]:
        primary = check.shard.primary.id
        rows: list[LiveRow] = []
        for row in finding.rows:
            copies = [LiveCopy(primary, row.primary), LiveCopy(standby, row.standby)]
            if row.identity is not None and (at_cut := evidence.get(_NamedRow(primary, oid, row.identity))):
                label = f"{self.report.snapshot} at increment {self.report.increment}"
                note = f"can't be shown: {at_cut.unknown}" if at_cut.unknown else ""
                copies.append(LiveCopy(label, None if note else at_cut.text, note))
            rows.append(LiveRow(row.key, row.place, tuple(copies)))
        return tuple(rows)


def row_at_cut(chain: Chain, shard: str, live: Group, identity: int) -> RowAtCut | None:
    """Identify a row of the database by the hash of its key in the chain's state; None if the chain lacks the table."""
    if shard not in chain.baseline:
        return None
    for group in chain.groups(shard):
        if group.name == live.name and group.key_width == live.key_width:
            signed = int(np.array([identity], np.uint64).view(np.int64)[0])
            return RowAtCut(shard, group.number, identity & (group.partitions - 1), signed)
    return None


def together(suspects: Iterable[Suspects]) -> Iterator[list[Suspects]]:
    """Divide the suspects of a standby into tasks of at most CONFIRMED_AT_ONCE / 4 pages."""
    most = CONFIRMED_AT_ONCE // 4
    some: list[Suspects] = []
    room = most
    for one in suspects:
        left = one.pages
        while len(left):
            some.append(structs.replace(one, pages=left[:room]))
            left, room = left[room:], room - len(left[:room])
            if room == 0:
                yield some
                some, room = [], most
    if some:
        yield some


def _describe(finding: _Finding) -> str:
    claims = row_claims(finding.changed, finding.missing, finding.extra)
    pages = sorted(set(finding.pages))
    least = "at least: " if finding.is_cut_short else ""
    return f"{least}{amounts_text(claims)} on the standby, {pages_text(pages, len(pages))}"


def compare_cut(run: _LiveRun, fleet: Fleet, chain: Chain, live: _LiveNodes) -> None:
    """Compare the primaries with the chain's newest cut; note shards and tables that can't be compared."""
    fleet_id = read_identity(fleet.store.open(), fleet).fleet_id
    report = run.report
    for shard in chain.primaries:
        if shard not in live.connections:
            why = NO_PRIMARY if shard in report.unreachable else "fleet.toml has no such primary"
            report.skip(f"rows of shard {shard} in snapshot {chain.name}", why)
    found = len(report.conflicts), len(report.repairs), len(report.unproven)
    while sources := _cut_sources(run, chain, fleet_id, live):
        try:
            _compare_sources(run, fleet, chain, sources)
        except Exception:
            if not run.away.note_silent():
                raise
            # The job was cancelled: repeat it without these nodes.
            del report.conflicts[found[0] :], report.repairs[found[1] :], report.unproven[found[2] :]
        else:
            run.away.note_closed()
            return


def _cut_sources(run: _LiveRun, chain: Chain, fleet_id: str, live: _LiveNodes) -> tuple[CutSource, ...]:
    """Return the primaries that can be compared; note the others."""
    sources: list[CutSource] = []
    for check in run.checks:
        primary = check.shard.primary
        what = f"rows of shard {primary.id} and snapshot {chain.name}"
        if primary.id not in chain.primaries:
            run.report.skip(what, "the snapshot has no such shard")
        elif primary.id in run.report.unreachable:
            run.report.skip(what, NO_PRIMARY)
        else:
            try:
                with raising_unreachable(primary):
                    sources.append(_cut_source(run, check, chain, fleet_id, live, len(sources)))
            except NodeUnreachableError as error:
                run.away.note(error)
                run.report.skip(what, NO_PRIMARY)
            except RefusedError as error:
                # For example, the publications were dropped.
                run.report.skip(what, error.message)
    return tuple(sources)


def _compare_sources(run: _LiveRun, fleet: Fleet, chain: Chain, sources: tuple[CutSource, ...]) -> None:
    request = run.request
    examples = max(request.rows, REPAIRED_ROWS_MAX if request.repairs else 0)
    comparison = CutComparison(
        chain, sources, fleet.store, request.rows, examples, request.task_pages, request.bytes_per_second
    )
    # A unit takes two sessions: the first holds the snapshot that the second imports.
    cores = cores_of(run.session).now
    lanes = {
        source.shard.number: max(min(run.limits.get(source.shard.node.id, 2 * cores) // 2, cores), 1)
        for source in sources
    }
    comparison.run(run.session, lanes, run.report, run.progress, run.sessions.watch)


def _cut_source(
    run: _LiveRun, check: _ShardCheck, chain: Chain, fleet_id: str, live: _LiveNodes, number: int
) -> CutSource:
    node, connection = check.shard.primary, live.connections[check.shard.primary.id]
    other = why_other(chain, node.id, live.identities[node.id])
    is_own = not other
    tables = check.tables.values()
    states = read_table_states(connection, node.id, fleet_id, tables) if is_own else None
    matched, groups = match_tables(chain, node.id, tables, states, run.report)
    since = None
    if is_own:
        since = ChangesSince(
            node,
            chain,
            groups,
            matched,
            running_transactions(connection),
            publication_names(fleet_id),
            run.sessions.fleet.global_id,
            texts_of(connection),
        )
    shard = CutShard(number, node, matched, groups, check.whole)
    return CutSource(shard, connection, fleet_id, states or {}, since, other)


def why_other(chain: Chain, shard: str, identity: NodeIdentity) -> str:
    """Return why the running primary is not the database that the chain's snapshots were taken of; "" if it is."""
    was = chain.baseline.get(shard)
    if was is None:
        return "the snapshot was not taken of this shard"
    return other_database(was, identity)


def other_database(was: NodeIdentity, now: NodeIdentity) -> str:
    """Return how the database differs from the database that was copied; "" if it is the same database."""
    if was.system_identifier != now.system_identifier:
        return (
            f"this is another server than at the snapshot (system identifier {now.system_identifier}, not"
            f" {was.system_identifier}), such as a restored or upgraded one"
        )
    if was.timeline != now.timeline:
        return f"the server is on timeline {now.timeline}, the snapshot on {was.timeline}: {CHANGE_REASONS['timeline']}"
    if was.database_oid != now.database_oid:
        return CHANGE_REASONS["database_oid"]
    return ""


def _check_indexes(
    checks: Sequence[_ShardCheck], request: LiveRequest, report: LiveReport, progress: Progress, away: _Away
) -> None:
    """Check the indexes of all nodes, one at a time on each."""
    nodes = [(check, node) for check in checks for node in check.shard.nodes if node.id not in report.unreachable]
    progress.step("check indexes", unit="indexes")

    def check_one(one: tuple[_ShardCheck, Node]) -> int | NodeUnreachableError:
        check, node = one
        tables = {oid: table.group.name for oid, table in check.tables.items()}
        connection = check.shard.connections[node.id]
        try:
            return check_indexes(node, connection, tables, report, progress, request.bytes_per_second)
        except NodeUnreachableError as error:
            return error

    for (check, node), found in zip(nodes, in_parallel(check_one, nodes), strict=True):
        if isinstance(found, NodeUnreachableError):
            away.note(found)
            report.skip(f"indexes on {node.id}", "the node was lost while they were checked")
        else:
            check.report.compared.indexes += found
