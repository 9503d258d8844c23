"""Compare the rows of running databases with the newest cut of a snapshot.

Rows that were written since the cut may differ, and changes_since finds out which rows these are. All other rows must
be those of the cut. In a database that does not belong to the chain, such as a restored database, it is not known which
rows were written: all rows are compared, but rows that differ prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psycopg
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from cutline.check.live.changes_since import ChangesSince, Touched
from cutline.check.live.entries import (
    FAILURES,
    FILES,
    ITEM_BITS,
    NO_PLACE,
    OVERFLOW,
    TOTALS,
    CutComparisonError,
    CutShard,
    compare_entries,
    entry_buckets,
    live_entries,
    live_units,
    stored_entries,
)
from cutline.check.live.ordered_snapshots import take_snapshot, write_position
from cutline.check.live.pages import ImportedSnapshot, LineAt, lines_at, shown
from cutline.check.live.report import (
    APPEND_ONLY,
    CUT_ROWS,
    UNREADABLE,
    CutCompared,
    LiveConflict,
    LiveCopy,
    LiveReport,
    LiveRow,
    LiveVersion,
    RowRepair,
    UnprovenRows,
    amounts_text,
    row_claims,
)
from cutline.check.live.stored_lines import LineAtCut, RowAtCut, read_stored
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.fleet.progress import Progress
from cutline.nodes.connections import NodeUnreachableError, raising_unreachable
from cutline.nodes.groups import Group, Table
from cutline.nodes.table_state import TableState, read_table_states
from cutline.nodes.watch import Watch
from cutline.snapshots.base_copy.copy_ranges import PageRange
from cutline.snapshots.fold.sources import PROBLEM, sources_of
from cutline.snapshots.records.chain import Chain
from cutline.spark.spark_jobs import job_progress
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, SnapshotError, error_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import NO_GROUP

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LONG_RUNNING = (
    "a transaction has been running since before the check, and may have written them long ago: if it waits for a"
    " synchronous standby, they belong to the cut (pg_stat_activity, wait_event SyncRep)"
)
PLACE_UNKNOWN = "can't be shown: the table is copied whole, so the places of its rows are not known"
UNKNOWN = "it was not found when the snapshot was read again"
# The columns of a table that are GENERATED ALWAYS AS IDENTITY, which refuse an UPDATE.
FIXED_QUERY = "SELECT attname FROM pg_attribute WHERE attrelid = %s AND attidentity = 'a' AND NOT attisdropped"
REDEFINED = "its definition or its publication has changed since the cut: take an increment first"


def match_tables(
    chain: Chain,
    shard: str,
    tables: Iterable[Table],
    states: Mapping[str, TableState] | None,
    report: LiveReport,
) -> tuple[dict[int, Table], dict[int, Group]]:
    """Return the shard's tables and groups, by number, that can be compared; note the others as skipped.

    `states` are the tables' states, None if the database does not belong to the chain: then only names and types of
    columns must be equal.
    """
    live = {table.group.name: table for table in tables}
    were = chain.tables(shard)
    matched: dict[int, Table] = {}
    groups: dict[int, Group] = {}
    for group in chain.groups(shard):
        table = live.get(group.name)
        if table is None:
            report.skip(f"{group.name} on {shard}", "the database has no such table that our role may read")
        elif not (
            is_continued(group, table.group, were.get(group.name), states.get(group.name))
            if states is not None
            else _has_same_columns(group, table.group)
        ):
            report.skip(f"{group.name} on {shard}", REDEFINED)
        else:
            matched[group.number], groups[group.number] = table, group
    return matched, groups


def is_continued(stored: Group, live: Group, was: TableState | None, now: TableState | None) -> bool:
    """Whether the WAL since the cut has all changes of the table, and its values are still printed in the same way."""
    if was is None or now is None or stored.definition() != live.definition():
        return False
    names = ("oid", "publication", "membership", "attributes", "columns", "printed")
    return all(getattr(was, name) == getattr(now, name) for name in names)


def _has_same_columns(stored: Group, live: Group) -> bool:
    forms = [([(column.name, column.type) for column in group.columns], group.key_width) for group in (stored, live)]
    return forms[0] == forms[1]


class CutSource(Struct, frozen=True):
    """A primary that is compared: its session, and what decides which of its rows were written since the cut.

    `states` are those of its tables before any row was read. `since` is None if the database does not belong to the
    chain, for the reason `other`.
    """

    shard: CutShard
    connection: psycopg.Connection[Any]
    fleet_id: str
    states: Mapping[str, TableState]
    since: ChangesSince | None
    other: str = ""

    def redefined(self) -> set[int]:
        """Return the tables that were changed or altered while the rows were read."""
        tables = self.shard.tables.values()
        node = self.shard.node.id
        now = read_table_states(self.connection, node, self.fleet_id, tables)
        return {
            number
            for number, group in self.shard.groups.items()
            if not is_continued(group, group, self.states.get(group.name), now.get(group.name))
        }


class TableVerdict(NamedTuple):
    """How the rows of a table that differ compare with the cut.

    `written` rows were written since. Of the others, `changed` have other contents, `lost` are at the cut only, and
    `unknown` in the database only.
    """

    written: int = 0
    changed: int = 0
    lost: int = 0
    unknown: int = 0

    @property
    def wrong(self) -> int:
        """How many rows differ although nobody has written them."""
        return self.changed + self.lost + self.unknown


def judge_rows(rows: pa.Table, is_written: Any, *, is_multiset: bool) -> tuple[TableVerdict, pa.Table]:
    """Judge the rows of a table that differ (SUMMARY_SCHEMA); also return those that nobody has written.

    Equal lines of a table without a key can't be told apart, so none of them has changed.
    """
    left, more = to_numpy(rows["left"]), to_numpy(rows["more"])
    written = int(np.maximum(left, more)[is_written].sum())
    wrong = rows.filter(to_mask(~is_written))
    left, more = left[~is_written], more[~is_written]
    changed = np.zeros(len(wrong), np.int64) if is_multiset else np.minimum(left, more)
    lost, unknown = left - changed, more - changed
    return TableVerdict(written, int(changed.sum()), int(lost.sum()), int(unknown.sum())), wrong


def _judge_tables(
    shard: CutShard, of_tables: Mapping[int, pa.Table], touched: Touched | None
) -> dict[int, tuple[TableVerdict, pa.Table]]:
    """Judge the rows of each table that differ, by number; `touched` is None if it is not known which were written."""
    judged: dict[int, tuple[TableVerdict, pa.Table]] = {}
    for number, rows in of_tables.items():
        identities = to_numpy(rows["identity"]).view(np.uint64)
        is_written = touched.covers(number, identities) if touched is not None else np.zeros(len(rows), np.bool_)
        judged[number] = judge_rows(rows, is_written, is_multiset=shard.groups[number].is_multiset)
    return judged


class _Verdicts(NamedTuple):
    """The rows that differ; the verdicts, and the rows that nobody has written, by shard and group.

    `unproven` has the reason why it is not known which rows of a table were written, by shard and group.
    """

    rows: pa.Table
    of_table: dict[tuple[int, int], TableVerdict]
    wrong: dict[tuple[int, int], pa.Table]
    unproven: dict[tuple[int, int], str]


class CutComparison(Struct, frozen=True):
    """A comparison of running primaries with the last cut of a chain. The sources are numbered from 0."""

    chain: Chain
    sources: tuple[CutSource, ...]
    store: StoreLocation
    rows_max: int
    examples_max: int
    task_pages: int
    bytes_per_second: int | None

    @property
    def label(self) -> str:
        """The name of the cut in the output."""
        return f"{self.chain.name} at increment {self.chain.last.increment}"

    @property
    def shards(self) -> tuple[CutShard, ...]:
        """The shards, in the order of their numbers."""
        return tuple(source.shard for source in self.sources)

    def run(
        self, session: SparkSession, lanes: Mapping[int, int], report: LiveReport, progress: Progress, watch: Watch
    ) -> None:
        """Compare all rows, and add the findings to the report.

        At most `lanes` tasks read from each shard, by number, at a time. A damaged snapshot is noted as skipped. The
        job is cancelled if `watch` finds that a node does not answer. Raises the errors of the store.
        """
        progress.step("compare with the cut", unit="tasks")
        try:
            with job_progress(session, progress, watch):
                found = self._compare(session, lanes)
            group = to_numpy(found["group"])
            bad = self._note_failures(found.filter(to_mask(group == FAILURES)), report)
            bad |= self._note_rewritten(found.filter(to_mask(group == FILES)), report)
            bad |= self._note_overflow(found.filter(to_mask(group == OVERFLOW)), report)
            progress.step("read the WAL since the cut")
            verdicts = _Verdicts(found.filter(to_mask(group > NO_GROUP)), {}, {}, {})
            for source in self.sources:
                self._judge(source, verdicts, bad, report)
        except (CutComparisonError, ObjectDamagedError) as error:
            report.skip(f"snapshot {self.label}", f"{error.message}; see: snapshot check {self.chain.name}")
            return
        equal: dict[tuple[int, int], int] = {}
        for row in found.filter(to_mask(group == TOTALS)).select(["node", "partition", "equal"]).to_pylist():
            place = row["node"], row["partition"]
            equal[place] = equal.get(place, 0) + row["equal"]
        named = self._name(session, verdicts, report, progress)
        for source in self.sources:
            self._report(source, verdicts, equal, named, report)

    def _compare(self, session: SparkSession, lanes: Mapping[int, int]) -> pa.Table:
        shards = self.shards
        nodes = tuple(shard.node.id for shard in shards)
        chosen = {shard.node.id: frozenset(shard.groups) for shard in shards}
        sources = sources_of(self.chain, nodes, self.store.open(), chosen=chosen)
        groups = {shard.number: frozenset(shard.groups) for shard in shards}
        # About as many rows in the databases as at the cut.
        rows = sum(sum(self.chain.base_rows(node).values()) for node in nodes) + sources.changes
        buckets = entry_buckets(session, 2 * rows)
        stored, folded = stored_entries(session, sources, groups, self.store, buckets)
        try:
            units = live_units(shards, self.task_pages, self.bytes_per_second)
            entries = stored.unionByName(live_entries(session, shards, units, lanes, buckets))
            return compare_entries(entries, buckets)
        finally:
            folded.release()

    def _judge(
        self, source: CutSource, verdicts: _Verdicts, bad: Collection[tuple[int, int]], report: LiveReport
    ) -> None:
        """Find out which rows of a shard were written since the cut, and judge the others."""
        shard = source.shard
        touched: Touched | None = None
        skipped = {number for node, number in bad if node == shard.number}
        why = f"it is not known whether they were written since: {source.other}"
        if source.since is not None:
            try:
                # After the rows were read: all that they show has been written by now.
                finish = write_position(shard.node, source.connection)
                touched = source.since.find(self.store.open(), finish)
                with raising_unreachable(shard.node):
                    redefined = source.redefined()
                for number in redefined - skipped:
                    report.skip(f"{shard.groups[number].name} on {shard.node.id}", REDEFINED)
                    skipped.add(number)
            except ObjectDamagedError:
                raise
            except SnapshotError as error:
                why = error.message
        rows = verdicts.rows.filter(to_mask(to_numpy(verdicts.rows["node"]) == shard.number))
        group = to_numpy(rows["group"])
        of_tables = {number: rows.filter(to_mask(group == number)) for number in shard.groups if number not in skipped}
        judged = _judge_tables(shard, of_tables, touched)
        if touched is not None and source.since is not None and any(verdict.wrong for verdict, _ in judged.values()):
            # Perhaps transactions wrote these rows that belong to the cut, and that no session sees yet.
            try:
                why = "" if source.since.add_unseen(self.store.open(), touched) else LONG_RUNNING
            except ObjectDamagedError:
                raise
            except SnapshotError as error:
                why = error.message
            judged = _judge_tables(shard, of_tables, touched)
            touched = None if why else touched
        for number, (verdict, wrong) in judged.items():
            definition = shard.groups[number]
            verdicts.of_table[shard.number, number] = verdict
            if len(wrong):
                verdicts.wrong[shard.number, number] = wrong
            if verdict.wrong and touched is None:
                place = f"{definition.name} on {shard.node.id}"
                differing = amounts_text({"row differs|rows differ": verdict.wrong})
                report.skip(place, f"{differing} from the cut, but {why}")
                verdicts.unproven[shard.number, number] = why

    def _report(
        self,
        source: CutSource,
        verdicts: _Verdicts,
        equal: Mapping[tuple[int, int], int],
        named: Mapping[tuple[int, int], tuple[LiveRow, ...]],
        report: LiveReport,
    ) -> None:
        """Add the conflicts and amounts of a shard to the report."""
        shard, compared = source.shard, CutCompared()
        for number, group in shard.groups.items():
            if (verdict := verdicts.of_table.get((shard.number, number))) is None:
                continue
            amount = equal.get((shard.number, number), 0)
            rows = named.get((shard.number, number), ())
            if why := verdicts.unproven.get((shard.number, number)):
                compared.add(CutCompared(1, amount, verdict.written, unproven=verdict.wrong))
                report.unproven.append(UnprovenRows(shard.node.id, group.name, verdict.wrong, why, rows))
                continue
            compared.add(CutCompared(1, amount, verdict.written, verdict.wrong))
            if verdict.wrong:
                report.conflicts.append(self._conflict(shard, group, verdict, rows))
        report.of(shard.node.id).cut = compared

    def _conflict(
        self, shard: CutShard, group: Group, verdict: TableVerdict, rows: tuple[LiveRow, ...]
    ) -> LiveConflict:
        if group.identity == "append_only" and verdict.lost:
            detail = (
                f"{verdict.lost:,} rows of snapshot {self.label} are no longer in the table: they were updated or"
                " deleted, which increments don't capture; to capture that, give the table a replica identity"
            )
            return LiveConflict(APPEND_ONLY, detail, shard.node.id, group=group.name, rows=rows)
        claims = row_claims(verdict.changed, verdict.lost, verdict.unknown)
        them = "it" if sum(claims.values()) == 1 else "them"
        detail = f"compared with {self.label}, {amounts_text(claims)}, although nobody has written {them} since"
        return LiveConflict(CUT_ROWS, detail, shard.node.id, group=group.name, rows=rows)

    def _note_overflow(self, overflow: pa.Table, report: LiveReport) -> set[tuple[int, int]]:
        """Note and return the tables with more rows that differ than the driver can hold."""
        full = {(row["node"], row["partition"]) for row in overflow.to_pylist()}  # bounded by the tables
        for number, group in sorted(full):
            shard = self.shards[number]
            why = "too many of its rows differ from the cut: take an increment first"
            report.skip(f"{shard.groups[group].name} on {shard.node.id}", why)
        return full

    def _note_failures(self, failures: pa.Table, report: LiveReport) -> set[tuple[int, int]]:
        """Note and return the tables that could not be read; raise the store's error or CutComparisonError."""
        bad: set[tuple[int, int]] = set()
        for row in failures.to_pylist():  # bounded by the tables and objects
            problem: ErrorReport = json.loads(row["problem"])
            if row["partition"] == PROBLEM:
                error = error_of(problem)
                raise error if problem["exit_code"] in NOT_OF_THE_OBJECT else CutComparisonError(error.message)
            shard = self.shards[row["node"]]
            group = shard.groups[row["partition"]]
            bad.add((row["node"], row["partition"]))
            if problem["details"].get("damaged"):
                detail = f"page {problem['details']['page']}: {problem['message']}"
                report.conflicts.append(LiveConflict(UNREADABLE, detail, shard.node.id, group=group.name))
            else:
                report.skip(f"{group.name} on {shard.node.id}", problem["message"])
        return bad

    def _note_rewritten(self, files: pa.Table, report: LiveReport) -> set[tuple[int, int]]:
        """Note and return the tables whose files were replaced meanwhile: rows may have been counted twice."""
        seen: dict[tuple[int, int], set[int]] = {}
        for row in files.to_pylist():  # bounded by the tables
            seen.setdefault((row["node"], row["partition"]), set()).add(row["identity"])
        rewritten = {table for table, filenodes in seen.items() if len(filenodes) > 1}
        for number, group in sorted(rewritten):
            shard = self.shards[number]
            report.skip(f"{shard.groups[group].name} on {shard.node.id}", "it was rewritten during the check")
        return rewritten

    def _name(
        self,
        session: SparkSession,
        verdicts: _Verdicts,
        report: LiveReport,
        progress: Progress,
    ) -> dict[tuple[int, int], tuple[LiveRow, ...]]:
        """Read some of the wrong rows on both sides; add repairs, and return up to `rows_max` rows of each table."""
        chosen = {table: rows.slice(0, self.examples_max).to_pylist() for table, rows in verdicts.wrong.items()}
        if not self.examples_max or not chosen:
            return {}
        progress.step("name the rows that differ")
        at_cut = [
            RowAtCut(self.shards[number].node.id, group, row["partition"], row["identity"])
            for (number, group), rows in chosen.items()
            for row in rows
        ]
        stored = read_stored(session, self.chain, self.store, at_cut, progress)
        named: dict[tuple[int, int], tuple[LiveRow, ...]] = {}
        for (number, group), rows in chosen.items():
            source = self.sources[number]
            try:
                with raising_unreachable(source.shard.node):
                    found = source.connection.execute(FIXED_QUERY, (source.shard.tables[group].oid,)).fetchall()
                fixed = frozenset(name for (name,) in found)
                repairs = list(self._repairs(source.shard, group, rows, stored, fixed))
            except NodeUnreachableError:
                # The rows are counted, although they can't be shown.
                continue
            unproven = verdicts.unproven.get((number, group), "")
            report.repairs += [replace(repair, unproven=unproven) for _, repair in repairs]
            named[number, group] = tuple(row for row, _ in repairs[: self.rows_max])
        return named

    def _repairs(
        self,
        shard: CutShard,
        number: int,
        rows: Sequence[Mapping[str, Any]],
        stored: Mapping[RowAtCut, LineAtCut],
        fixed: frozenset[str] = frozenset(),
    ) -> Iterator[tuple[LiveRow, RowRepair]]:
        """Yield the rows (of SUMMARY_SCHEMA) as they are in the database now and at the cut, and their repairs.

        Rows whose versions have gone meanwhile were written by the application, and are left out.
        """
        group = shard.groups[number]
        part = PageRange(group, shard.tables[number].oid)
        listed = [[place_text(place) for place in row["places"] or ()] for row in rows]
        places = [place for some in listed for place in some]
        live: dict[str, LineAt] = {}
        if places:
            with take_snapshot(shard.node) as snapshot:
                live = lines_at(ImportedSnapshot(shard.node, snapshot.exported), part, places)
        for row, named in zip(rows, listed, strict=True):
            versions = [
                LiveVersion(place, now.xmin, now.file, now.line)
                for place, entry in zip(named, row["entries"] or (), strict=True)
                if (now := live.get(place)) is not None and entry_of(now) == entry
            ]
            if len(versions) < len(named):
                continue
            at_cut = stored.get(RowAtCut(shard.node.id, number, row["partition"], row["identity"]))
            line, why = line_and_reason(at_cut, is_expected=row["left"] > 0)
            repair = RowRepair(
                shard.node.id, group, row["left"], row["more"], line, tuple(versions), why, fixed
            )  # fmt: skip
            keys = [live[place].key for place in named] + ([at_cut.key] if at_cut is not None else [])
            copies = (self._copy_in_database(repair, row["equal"]), self._copy_at_cut(repair, row["equal"], at_cut))
            yield LiveRow(shown(next(iter(keys), b"")), next(iter(named), ""), copies), repair

    def _copy_in_database(self, repair: RowRepair, equal: int) -> LiveCopy:
        """Return the row in the database; `equal` of its versions are at the cut as well."""
        if repair.group.is_multiset:
            line = repair.versions[0].line if repair.versions else repair.stored
            return _counted_copy(repair.node, line, equal + repair.more)
        if repair.versions:
            return LiveCopy(repair.node, shown(repair.versions[0].line))
        return LiveCopy(repair.node, None, PLACE_UNKNOWN if repair.more else "")

    def _copy_at_cut(self, repair: RowRepair, equal: int, at_cut: LineAtCut | None) -> LiveCopy:
        """Return the row at the cut."""
        if not repair.left and not equal:
            return LiveCopy(self.label, None)
        if at_cut is None or at_cut.unknown:
            return LiveCopy(self.label, None, f"can't be shown: {at_cut.unknown if at_cut else UNKNOWN}")
        if repair.group.is_multiset:
            return _counted_copy(self.label, at_cut.line, equal + repair.left)
        return LiveCopy(self.label, at_cut.text)


def _counted_copy(of: str, line: bytes | None, count: int) -> LiveCopy:
    """Return a line that occurs `count` times in a copy."""
    times = amounts_text({"time|times": count})
    if not count:
        return LiveCopy(of, None)
    return LiveCopy(of, None, f"{times}: {PLACE_UNKNOWN}") if line is None else LiveCopy(of, shown(line), times)


def line_and_reason(at_cut: LineAtCut | None, *, is_expected: bool) -> tuple[bytes | None, str]:
    """Return the line of a row at the cut for a repair, or the reason why it is not known.

    `is_expected`: the comparison has found the row at the cut. Otherwise, both are empty.
    """
    if not is_expected:
        return None, ""
    if at_cut is None:
        return None, UNKNOWN
    if at_cut.unknown or at_cut.is_cut:
        return None, at_cut.unknown or "the row is too long for this script"
    return at_cut.line, ""


def place_text(place: int) -> str:
    """Return a place as a ctid; "" for NO_PLACE."""
    return f"({place >> ITEM_BITS},{place & ((1 << ITEM_BITS) - 1)})" if place != NO_PLACE else ""


def entry_of(line: LineAt) -> int:
    """Return the entry of a row version as in ENTRY_SCHEMA."""
    keys = xxhash64(from_list([line.key]))
    return int(xxhash64(from_list([line.line]), keys).view(np.int64)[0])
