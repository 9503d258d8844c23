"""Compare the rows of running databases with the newest cut of a snapshot.

Rows that were written since the cut differ legitimately. So only settled versions (live_horizon) prove something: they
existed at the cut, and the snapshot must have them as they are. Other rows are counted as equal, changed, gone or new.
A row that has disappeared from the database can't be told from a deleted row, except in an append-only table, from
which no row may disappear.

In a database that does not belong to the chain, such as a restored one, no version is settled: all rows are compared,
but rows that differ prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from cutline.check.live_entries import (
    FAILURES,
    FILES,
    ITEM_BITS,
    NO_PLACE,
    TOTALS,
    CutComparisonError,
    CutShard,
    Summary,
    compare_entries,
    live_entries,
    live_units,
    stored_entries,
    totals_of,
)
from cutline.check.live_pages import (
    LineAt,
    Reading,
    lines_at,
    shown,
)
from cutline.check.live_report import (
    APPEND_ONLY,
    CUT_ROWS,
    UNREADABLE,
    CutCompared,
    LiveConflict,
    LiveCopy,
    LiveReport,
    LiveRow,
    Repair,
    amounts_text,
)
from cutline.check.live_snapshots import take_snapshot
from cutline.check.named_rows import ROW_SCHEMA, NamingTask, read_rows
from cutline.check.report import NOT_OF_THE_OBJECT
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import (
    from_list,
    xxhash64,
)
from cutline.columns.row_batches import from_stream
from cutline.fleet.progress import Progress
from cutline.nodes.groups import Group, Table
from cutline.nodes.watch import Watch
from cutline.snapshots.base_copy.copy_ranges import PageRange
from cutline.snapshots.fold.sources import (
    PROBLEM,
    sources_of,
)
from cutline.snapshots.records.chain import Chain
from cutline.spark.spark_jobs import Dealing, job_progress, run_tasks
from cutline.storage.errors import ErrorReport, error_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import (
    DELETE,
    NO_GROUP,
    PARTIAL,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def match_tables(
    chain: Chain, shard: str, tables: Iterable[Table], report: LiveReport, *, is_own: bool
) -> tuple[dict[int, Table], dict[int, Group]]:
    """Return the shard's tables and groups, by number, that can be compared; note the others as skipped.

    If the database does not belong to the chain, its columns may have other numbers than at the cut.
    """
    live = {table.group.name: table for table in tables}
    matched: dict[int, Table] = {}
    groups: dict[int, Group] = {}
    for group in chain.groups(shard):
        table = live.get(group.name)
        if table is None:
            report.skip(f"{group.name} on {shard}", "the database has no such table that may be read")
        elif not _is_same(group, table.group, is_own=is_own):
            report.skip(f"{group.name} on {shard}", "its definition has changed since the cut: take an increment first")
        else:
            matched[group.number], groups[group.number] = table, group
    return matched, groups


def _is_same(stored: Group, live: Group, *, is_own: bool) -> bool:
    if is_own:
        return stored.definition() == live.definition()
    forms = [([(column.name, column.type) for column in group.columns], group.key_width) for group in (stored, live)]
    return forms[0] == forms[1]


@dataclass(frozen=True, slots=True)
class CutComparison:
    """A comparison of running primaries with the last cut of a chain."""

    chain: Chain
    shards: tuple[CutShard, ...]
    store: StoreLocation
    rows_max: int
    examples_max: int
    task_pages: int
    bytes_per_second: int | None

    @property
    def label(self) -> str:
        """The name of the cut in the output."""
        return f"{self.chain.name} at increment {self.chain.last.increment}"

    def _summary(self, multisets: frozenset[int]) -> Summary:
        own = frozenset(shard.number for shard in self.shards if shard.horizon.is_own)
        append_only = frozenset(
            (shard.number, number)
            for shard in self.shards
            for number, group in shard.groups.items()
            if group.identity == "append_only"
        )
        return Summary(multisets, own, append_only, self.examples_max)

    def run(
        self, session: SparkSession, lanes: Mapping[int, int], report: LiveReport, progress: Progress, watch: Watch
    ) -> None:
        """Compare all rows, and add the findings to the report.

        At most `lanes` tasks read from each shard, by number, at a time. A damaged snapshot is noted as skipped. The
        job is cancelled if `watch` finds that a node does not answer. Raises the errors of the store.
        """
        nodes = tuple(shard.node.id for shard in self.shards)
        progress.step("compare with the cut", unit="tasks")
        try:
            chosen = {shard.node.id: frozenset(shard.groups) for shard in self.shards}
            sources = sources_of(self.chain, nodes, self.store.open(), chosen=chosen)
            with job_progress(session, progress, watch):
                groups = {shard.number: frozenset(shard.groups) for shard in self.shards}
                stored, folded = stored_entries(session, sources, groups, self.store)
                try:
                    units = live_units(self.shards, self.task_pages, self.bytes_per_second)
                    live = live_entries(session, self.shards, units, lanes)
                    found = compare_entries(stored.unionByName(live), self._summary(sources.multisets))
                finally:
                    folded.release()
            self._judge(session, found, report, progress)
        except (CutComparisonError, ObjectDamagedError) as error:
            report.skip(f"snapshot {self.label}", f"{error.message}; see: snapshot check {self.chain.name}")

    def _judge(self, session: SparkSession, found: pa.Table, report: LiveReport, progress: Progress) -> None:
        """Turn the summary into conflicts, skipped parts, amounts and repairs."""
        is_total = to_numpy(found["is_total"].cast(pa.int8())) != 0
        group = to_numpy(found["group"])
        totals = {
            (row["node"], row["group"]): row for row in totals_of([found.filter(to_mask(is_total))]).to_pylist()
        }  # bounded by the tables
        bad = self._note_failures(found.filter(to_mask(group == FAILURES)), report)
        bad |= self._note_rewritten(found.filter(to_mask(group == FILES)), report)
        examples = found.filter(to_mask(~is_total & (group > NO_GROUP)))
        named = self._name(session, examples, bad, report, progress)
        for shard in self.shards:
            compared = CutCompared()
            for number, table in shard.groups.items():
                if (shard.number, number) in bad:
                    continue
                amounts = totals.get((shard.number, number), dict.fromkeys(TOTALS, 0))
                rows = named.get((shard.number, number), ())
                self._judge_table(shard, table, amounts, rows, report)
                counted = {name: amounts[name] for name in ("equal", "changed", "gone")}
                compared.add(CutCompared(tables=1, new=amounts["added"], **counted))
            report.of(shard.node.id).cut = compared

    def _judge_table(
        self, shard: CutShard, group: Group, amounts: Mapping[str, int], rows: tuple[LiveRow, ...], report: LiveReport
    ) -> None:
        node, place = shard.node.id, f"{group.name} on {shard.node.id}"
        if group.identity == "append_only" and amounts["gone"] and amounts["settled"]:
            detail = (
                f"{amounts['gone']:,} rows of snapshot {self.label} are no longer in the table: they were updated or"
                " deleted, which increments don't capture; to capture them, give the table a replica identity"
            )
            report.conflicts.append(LiveConflict(APPEND_ONLY, detail, node, group=group.name, rows=rows))
        elif amounts["wrong"]:
            claims = {
                "row has other contents|rows have other contents": amounts["wrong"] - amounts["unknown"],
                "row is missing|rows are missing": amounts["unknown"],
            }
            detail = (
                f"rows that have not been written since the cut differ from snapshot {self.label}: there,"
                f" {amounts_text(claims)}"
            )
            report.conflicts.append(LiveConflict(CUT_ROWS, detail, node, group=group.name, rows=rows))
        differing = sum(amounts[name] for name in ("changed", "gone", "added"))
        if not shard.horizon.is_own:
            if differing:
                report.skip(place, f"{differing:,} rows differ from the cut, but {shard.horizon.why}")
        elif not amounts["equal"] and amounts["changed"] + amounts["gone"]:
            why = shard.horizon.why or "all of them were written since"
            report.skip(place, f"none of its {amounts['changed'] + amounts['gone']:,} rows could be compared: {why}")
        elif shard.horizon.before is None and differing:
            report.skip(place, f"{differing:,} rows differ from the cut, but {shard.horizon.why}")

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
        examples: pa.Table,
        bad: Collection[tuple[int, int]],
        report: LiveReport,
        progress: Progress,
    ) -> dict[tuple[int, int], tuple[LiveRow, ...]]:
        """Read the rows of the examples on both sides; add repairs, and return up to `rows_max` rows of each table."""
        wanted = [row for row in examples.to_pylist() if (row["node"], row["group"]) not in bad]
        chosen: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for row in wanted:
            of_table = chosen.setdefault((row["node"], row["group"]), [])
            if len(of_table) < self.examples_max:
                of_table.append(row)
        if not chosen:
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
            repairs = list(self._repairs(self.shards[number], group, rows, stored))
            report.repairs += [repair for _, repair in repairs]
            named[number, group] = tuple(row for row, _ in repairs[: self.rows_max])
        return named

    def _repairs(
        self, shard: CutShard, number: int, rows: Sequence[Mapping[str, Any]], stored: Mapping[RowAtCut, LineAtCut]
    ) -> Iterator[tuple[LiveRow, Repair]]:
        """Yield the rows as they are in the database now and at the cut, without those that have changed meanwhile."""
        group = shard.groups[number]
        part = PageRange(group, shard.tables[number].oid)
        places = {row["identity"]: place_text(row["place"]) for row in rows}
        live: dict[str, LineAt] = {}
        if any(places.values()):
            with take_snapshot(shard.node) as snapshot:
                reading = Reading(shard.node, snapshot.exported)
                live = lines_at(reading, part, [place for place in places.values() if place])
        for row in rows:
            identity, place = row["identity"], places[row["identity"]]
            at_cut = stored.get(RowAtCut(shard.node.id, number, row["partition"], identity))
            now = live.get(place)
            if place and (now is None or identity_of(now, group) != identity):
                continue
            if now is None and at_cut is None:
                continue
            key = now.key if now else at_cut.key if at_cut else b""
            copies = (
                LiveCopy(shard.node.id, shown(now.line) if now else None),
                LiveCopy(self.label, at_cut.text if at_cut else None),
            )
            is_too_long = at_cut is not None and at_cut.is_cut
            live_line, stored_line = (one.line if one is not None else None for one in (now, at_cut))
            repair = Repair(shard.node.id, group, place, live_line, stored_line, is_too_long)
            yield LiveRow(shown(key), place, copies), repair


def place_text(place: int) -> str:
    """Return a place as a ctid; "" for NO_PLACE."""
    return f"({place >> ITEM_BITS},{place & ((1 << ITEM_BITS) - 1)})" if place != NO_PLACE else ""


def identity_of(line: LineAt, group: Group) -> int:
    """Return the identity of a row as in ENTRY_SCHEMA."""
    value = line.line if group.is_multiset else line.key
    return int(xxhash64(from_list([value])).view(np.int64)[0])


class RowAtCut(NamedTuple):
    """Identifies a row of a chain's state; `partition` is that of its identity."""

    node: str
    group: int
    partition: int
    identity: int


@dataclass(frozen=True, slots=True)
class LineAtCut:
    """The key and the line of a row in a chain's state. `is_cut`: only the beginning of the line is known."""

    key: bytes
    line: bytes
    is_cut: bool

    @property
    def text(self) -> str:
        """The line for people to read."""
        return shown(self.line) + ("…" if self.is_cut else "")


def read_stored(
    session: SparkSession, chain: Chain, store: StoreLocation, wanted: Collection[RowAtCut], progress: Progress
) -> dict[RowAtCut, LineAtCut]:
    """Read these rows at the chain's last cut, a bounded number; rows that are not there are missing from the result.

    A row that an object was to contain which can't be read, or whose newest image lacks values, is missing as well.
    """
    lines: dict[RowAtCut, LineAtCut] = {}
    for node in sorted({row.node for row in wanted}):
        rows = [row for row in wanted if row.node == node]
        groups = frozenset(row.group for row in rows)
        sources = sources_of(chain, (node,), store.open(), chosen={node: groups})
        places = frozenset((row.group, row.partition) for row in rows)
        identities = np.unique(np.array([row.identity for row in rows], np.int64).view(np.uint64))
        tasks = [
            NamingTask(source, places, sources.multisets, store, identities)
            for source in (*sources.bases, *sources.segments)
        ]
        dealing = Dealing[NamingTask](lambda task: task.source.source.size)
        reports = run_tasks(session, read_rows, tasks, progress, dealing)
        found = pa.concat_tables(
            [ROW_SCHEMA.empty_table(), *(from_stream(report.rows) for report in reports if report.problem is None)]
        )
        newest: dict[RowAtCut, dict[str, Any]] = {}
        for row in found.sort_by([("lsn", "ascending"), ("seq", "ascending")]).to_pylist():
            identity = int(np.array([row["identity"]], np.uint64).view(np.int64)[0])
            newest[RowAtCut(node, row["group"], row["partition"], identity)] = row
        lines |= {
            at: LineAtCut(row["key"], row["row"], row["is_cut"])
            for at, row in newest.items()
            if row["op"] not in (DELETE, PARTIAL)
        }
    return lines
