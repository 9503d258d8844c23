"""Name the rows that differ between the copies of a shard, and show what each copy has.

Comparing copies shows in which partitions they differ. A second pass reads only the objects with rows of those tables,
and keeps only rows in those partitions: first the hashes, to find the keys that differ, then the rows with these keys.
If most copies of a shard agree about a key, the others are likely to be wrong; of two copies, neither is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.check.report import Copies, DifferentRow, Findings, StoredRow
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, column_of, xxhash64
from cutline.columns.row_batches import from_stream, to_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.sources import (
    BaseSource,
    SegmentSource,
    filter_effective,
    multiset_numbers_of,
    read_at_cut,
    sources_of,
)
from cutline.snapshots.records.chain import Chain
from cutline.spark.spark_jobs import Dealing, run_tasks
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, SEGMENT_SCHEMA, UPSERT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KINDS = ("row-hash", "row-count", "version")
# The driver holds the hashes of at most this many rows and changes, which take 40 bytes each.
HELD_ROWS_MAX = 4_000_000
# A line is at most 1 GB; this much of it is shown.
SHOWN_BYTES = 1000
# Base rows precede all changes.
BASE_LSN = -1
IDENTITY_SCHEMA = pa.schema(
    [
        ("group", pa.int32()), ("partition", pa.int32()), ("identity", pa.uint64()), ("entry", pa.uint64()),
        ("lsn", pa.int64()), ("seq", pa.int64()), ("op", pa.int8()),
    ]
)  # fmt: skip
ROW_SCHEMA = pa.schema(
    [
        *IDENTITY_SCHEMA, ("key", pa.binary()), ("row", pa.binary()), ("xid", pa.int64()),
        ("global_id", pa.string()), ("object", pa.string()),
    ]
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NamingTask:
    """An object whose rows in `places` (pairs of group and partition) are wanted.

    With `identities`, only the rows with these hashes of their keys, and complete; else the hashes of all rows.
    """

    source: BaseSource | SegmentSource
    places: frozenset[tuple[int, int]]
    multisets: frozenset[int]
    store: StoreLocation
    identities: Hashes | None = None


@dataclass(frozen=True, slots=True)
class NamingReport:
    """The rows as an Arrow stream (IDENTITY_SCHEMA or ROW_SCHEMA), or the problem with the object."""

    rows: bytes = b""
    problem: ErrorReport | None = None


def read_rows(task: NamingTask) -> NamingReport:
    """Read the rows that the task wants."""
    schema = IDENTITY_SCHEMA if task.identities is None else ROW_SCHEMA
    is_base = isinstance(task.source, BaseSource)
    tables: list[pa.Table] = [schema.empty_table()]
    try:
        for table in read_at_cut(task.store.open(), task.source, BASE_SCHEMA if is_base else SEGMENT_SCHEMA):
            chosen = table.filter(to_mask(_is_wanted(table, task.places)))
            if len(chosen):
                tables.append(_described(chosen, task, schema))
    except SnapshotError as error:
        return NamingReport(problem=report_of(error))
    return NamingReport(to_stream(pa.concat_tables(tables)))


def _is_wanted(table: pa.Table, places: Iterable[tuple[int, int]]) -> Flags:
    group, partition = to_numpy(table["group"]), to_numpy(table["partition"])
    found = np.zeros(len(table), np.bool_)
    for number, place in places:  # a few partitions
        found |= (group == number) & (partition == place)
    return found


def _described(table: pa.Table, task: NamingTask, schema: pa.Schema) -> pa.Table:
    source, count = task.source, len(table)
    if isinstance(source, BaseSource):
        group = to_numpy(table["group"])
        table = table.filter(to_mask(~np.isin(group, list(source.truncated)))) if source.truncated else table
        count = len(table)
        added = {
            "lsn": np.full(count, BASE_LSN), "seq": np.zeros(count, np.int64), "xid": np.zeros(count, np.int64),
            "op": np.where(np.isin(to_numpy(table["group"]), list(task.multisets)), INSERT, UPSERT).astype(np.int8),
        }  # fmt: skip
        table = pa.table(
            {name: table[name] for name in ("group", "partition", "key", "row")}
            | {name: to_arrow(values) for name, values in added.items()}
            | {"global_id": pa.nulls(count, pa.string())}
        )
    else:
        table = filter_effective(table, source)
        count = len(table)
    if not count:
        return schema.empty_table()
    keys, rows = xxhash64(column_of(table["key"])), column_of(table["row"])
    is_multiset = np.isin(to_numpy(table["group"]), list(task.multisets))
    # Only its line identifies a row without a key.
    identity = np.where(is_multiset, xxhash64(rows), keys)
    table = table.append_column("identity", pa.array(identity)).append_column("entry", pa.array(xxhash64(rows, keys)))
    if task.identities is not None:
        table = table.filter(to_mask(np.isin(identity, task.identities)))
        shown = pc.binary_slice(table["row"], 0, SHOWN_BYTES)
        table = table.set_column(table.schema.get_field_index("row"), "row", shown)
        table = table.append_column("object", pa.array([source.source.key] * len(table), pa.string()))
    return table.select(schema.names).cast(schema)


def name_rows(
    session: SparkSession,
    copies: Copies,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    rows_max: int,
) -> None:
    """Add up to `rows_max` different rows to each conflict between two copies of a partition.

    Partitions that are too large to be held are left without rows, and so are those with an object that can't be read.
    """
    numbers = {
        shard: {group.name: group.number for group in copies.chain.groups(shard)}
        for shard in set(copies.shard.values())
    }
    wanted: dict[str, dict[tuple[int, int], list[int]]] = {}
    for place, conflict in enumerate(findings.report.conflicts):
        if conflict.kind in KINDS and conflict.node and conflict.group and conflict.partition is not None:
            number = numbers[conflict.node].get(conflict.group)
            if number is not None:
                at = number, conflict.partition
                wanted.setdefault(conflict.node, {}).setdefault(at, []).append(place)
    if not wanted or not rows_max:
        return
    progress.step("name the rows that differ")
    for shard, places in wanted.items():
        nodes = tuple(node for node in copies.same_shard(shard) if node not in findings.damaged)
        for at, conflicts in places.items():
            found = _name(session, copies.chain, nodes, at, store, progress, rows_max)
            for place in conflicts:
                conflict = findings.report.conflicts[place]
                pair = {conflict.node, conflict.other_node}
                differing = tuple(row for row in found if _differ(row, pair))
                findings.report.conflicts[place] = replace(conflict, rows=differing)


def _differ(row: DifferentRow, nodes: Iterable[str | None]) -> bool:
    lines = {(stored.line, stored.position) for stored in row.copies if stored.node in nodes}
    return len(lines) > 1


def _name(
    session: SparkSession,
    chain: Chain,
    nodes: tuple[str, ...],
    at: tuple[int, int],
    store: StoreLocation,
    progress: Progress,
    rows_max: int,
) -> list[DifferentRow]:
    sources = sources_of(chain, nodes, store.open(), chosen={node: frozenset({at[0]}) for node in nodes})
    multisets = frozenset(number for node in nodes for number in multiset_numbers_of(chain, node))
    tasks = [NamingTask(source, frozenset({at}), multisets, store) for source in (*sources.bases, *sources.segments)]
    # All rows of an object may be in one partition, but usually it is a small part of them.
    reports = _run(session, tasks, progress)
    if reports is None:
        return []
    states: dict[str, pa.Table] = {}
    for number, node in enumerate(nodes):
        streams = [rows for task, rows in zip(tasks, reports, strict=True) if task.source.source.number == number]
        table = pa.concat_tables([IDENTITY_SCHEMA.empty_table(), *map(from_stream, streams)])
        if len(table) > HELD_ROWS_MAX:
            return []
        states[node] = _state(table, is_multiset=at[0] in multisets)
    identities = _differing(states)[:rows_max]
    if not len(identities):
        return []
    reports = _run(session, [replace(task, identities=identities) for task in tasks], progress)
    if reports is None:
        return []
    rows = {
        node: pa.concat_tables(
            [
                ROW_SCHEMA.empty_table(),
                *(
                    from_stream(stream)
                    for task, stream in zip(tasks, reports, strict=True)
                    if task.source.source.number == number
                ),
            ]
        )
        for number, node in enumerate(nodes)
    }
    return [_described_row(chain, identity, states, rows) for identity in identities.tolist()]


def _run(session: SparkSession, tasks: list[NamingTask], progress: Progress) -> list[bytes] | None:
    """Return the tasks' rows; None if an object can't be read, which the first pass has reported or will not repeat."""
    dealing = Dealing[NamingTask](lambda task: task.source.source.size)
    reports = run_tasks(session, read_rows, tasks, progress, dealing)
    if any(report.problem for report in reports):
        return None
    return [report.rows for report in reports]


def _state(table: pa.Table, *, is_multiset: bool) -> pa.Table:
    """Return the state's rows: identity, entry, lsn and count, sorted by identity."""
    identity, entry, lsn, seq, op = (to_numpy(table[name]) for name in ("identity", "entry", "lsn", "seq", "op"))
    if is_multiset:
        unique, places = np.unique(identity, return_inverse=True)
        counts = np.zeros(len(unique), np.int64)
        np.add.at(counts, places, np.where(op == DELETE, -1, 1))
        first = np.zeros(len(unique), np.uint64)
        first[places] = entry
        chosen = counts > 0
        # Equal rows can't be told apart, so none of them has a last writer.
        return _state_table(unique[chosen], first[chosen], np.zeros(int(chosen.sum()), np.int64), counts[chosen])
    if not len(identity):
        return _state_table(identity, entry, lsn, np.ones(0, np.int64))
    order = np.lexsort((seq, lsn, identity))
    identity, entry, lsn, op = identity[order], entry[order], lsn[order], op[order]
    starts = np.flatnonzero(np.append(True, identity[1:] != identity[:-1]))
    ends = np.append(starts[1:], len(identity)) - 1
    # A partial image is completed from the images before it, back to the last complete one.
    complete = np.maximum.reduceat(np.where(op == PARTIAL, -1, np.arange(len(op))), starts)
    is_counted = np.arange(len(op)) >= np.repeat(complete, np.diff(np.append(starts, len(op))))
    combined = np.add.reduceat(np.where(is_counted, entry, np.uint64(0)), starts)
    kept = op[ends] != DELETE
    return _state_table(identity[ends][kept], combined[kept], lsn[ends][kept], np.ones(int(kept.sum()), np.int64))


def _state_table(identity: Any, entry: Any, lsn: Any, count: Any) -> pa.Table:
    return pa.table({"identity": identity, "entry": entry, "lsn": lsn, "count": count})


def _differing(states: Mapping[str, pa.Table]) -> Hashes:
    """Return the identities that two copies have differently, or only one of them has, in ascending order."""
    names = ("identity", "entry", "count")
    whole = pa.concat_tables([state.select(names) for state in states.values()])
    counted = whole.group_by(list(names)).aggregate([([], "count_all")])
    # A row that all copies have equally occurs once for each of them.
    unequal = counted.filter(pc.field("count_all") != len(states))
    by_row = np.unique(to_numpy(unequal["identity"]))
    if len(by_row):
        return by_row
    # The rows are equal, so their writers differ.
    written = pa.concat_tables([state.select(["identity", "lsn"]) for state in states.values()])
    counted = written.group_by(["identity", "lsn"]).aggregate([([], "count_all")])
    return np.unique(to_numpy(counted.filter(pc.field("count_all") != len(states))["identity"]))


def _described_row(
    chain: Chain, identity: int, states: Mapping[str, pa.Table], rows: Mapping[str, pa.Table]
) -> DifferentRow:
    stored: list[StoredRow] = []
    entries: dict[str, tuple[int, int]] = {}
    key = ""
    for node, state in states.items():
        mine = state.filter(pc.field("identity") == pa.scalar(identity, pa.uint64())).to_pylist()
        of_key = rows[node].filter(pc.field("identity") == pa.scalar(identity, pa.uint64())).to_pylist()
        last = max(of_key, key=lambda row: (row["lsn"], row["seq"]), default=None)
        if last is not None and not key:
            key = last["key"].decode(errors="backslashreplace")
        if not mine or last is None:
            entries[node] = 0, 0
            stored.append(StoredRow(node))
            continue
        entries[node] = mine[0]["entry"], mine[0]["count"]
        line = last["row"].decode(errors="backslashreplace").rstrip("\n")
        is_base = last["lsn"] == BASE_LSN
        stored.append(
            StoredRow(
                node, line, last["object"],
                increment=_increment_of(chain, node, last["object"]),
                position=None if is_base else str(Lsn(last["lsn"])),
                xid=None if is_base else last["xid"],
                global_id=last["global_id"],
            )
        )  # fmt: skip
    return DifferentRow(key, tuple(stored), _outvoted(entries))


def _increment_of(chain: Chain, node: str, key: str) -> int:
    """Return the number of the commit that lists the object; 0 for objects in lists of base copies."""
    for commit in chain.commits:
        if any(segment.key == key for segment in commit.segments.get(node, ())):
            return commit.increment
    return 0


def _outvoted(entries: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """Return the copies that differ from what more than half of the copies have; none if there is no such majority."""
    values: Sequence[tuple[int, int]] = list(entries.values())
    most = max(set(values), key=values.count)
    if values.count(most) * 2 <= len(values):
        return ()
    return tuple(node for node, value in entries.items() if value != most)
