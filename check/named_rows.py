"""Name the rows that differ between the copies of a shard, and show them as they are in each copy.

Comparing copies shows in which partitions they differ. Two more jobs for each shard read only the objects with rows of
those tables, and keep only rows in those partitions: first the hashes, to find the keys that differ, then the rows with
these keys. If more than half of the copies of a row are equal, the others are likely to be wrong; of two copies,
neither is known to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.check.copies import Copies
from cutline.check.hashing import Sums
from cutline.check.report import Conflict, DifferentRow, Findings, StoredRow
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Hashes, Ints, column_of, xxhash64
from cutline.columns.row_batches import from_stream, to_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.sources import (
    BaseSource,
    SegmentSource,
    Sources,
    filter_effective,
    multiset_numbers_of,
    read_at_cut,
    sources_of,
)
from cutline.spark.spark_jobs import Dealing, run_tasks, shared_problem
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, SEGMENT_SCHEMA, UPSERT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_DIFFER = ("row-hash", "row-count", "version")
# Rows are named in at most this many partitions of each shard.
PARTITIONS_MAX = 20
# The driver holds the hashes of at most this many rows and changes, which take 41 bytes each.
HELD_ROWS_MAX = 4_000_000
# A line is at most 1 GB; this much of it is shown.
SHOWN_BYTES = 1000
# Base rows precede all changes.
BASE_LSN = -1
HASH_SCHEMA = pa.schema(
    [
        ("group", pa.int32()), ("partition", pa.int32()), ("identity", pa.uint64()), ("entry", pa.uint64()),
        ("lsn", pa.int64()), ("seq", pa.int64()), ("op", pa.int8()),
    ]
)  # fmt: skip
ROW_SCHEMA = pa.schema(
    [
        *HASH_SCHEMA, ("key", pa.binary()), ("row", pa.binary()), ("is_cut", pa.bool_()), ("xid", pa.int64()),
        ("global_id", pa.string()), ("object", pa.string()),
    ]
)  # fmt: skip
# A partition: the number of its group at the cut, and its own number.
Place = tuple[int, int]


class NamingTask(Struct, frozen=True):
    """An object whose rows in `places` are wanted: the hashes of all, or the last row with each of `identities`.

    The identity of a row is the hash of its key; in the groups in `multisets`, of its line.
    """

    source: BaseSource | SegmentSource
    places: frozenset[Place]
    multisets: frozenset[int]
    store: StoreLocation
    identities: Hashes | None = None


class NamingReport(Struct, frozen=True):
    """The rows as an Arrow stream (HASH_SCHEMA or ROW_SCHEMA), or the problem with the object."""

    rows: bytes = b""
    problem: ErrorReport | None = None


def read_rows(task: NamingTask) -> NamingReport:
    """Read the rows that the task wants."""
    schema = HASH_SCHEMA if task.identities is None else ROW_SCHEMA
    is_base = isinstance(task.source, BaseSource)
    tables: list[pa.Table] = [schema.empty_table()]
    try:
        for table in read_at_cut(task.store.open(), task.source, BASE_SCHEMA if is_base else SEGMENT_SCHEMA):
            chosen = table.filter(to_mask(_are_in(table, task.places)))
            if len(chosen):
                tables.append(_reported(chosen, task, schema))
    except SnapshotError as error:
        return NamingReport(problem=report_of(error))
    return NamingReport(to_stream(pa.concat_tables(tables)))


def _are_in(table: pa.Table, places: Iterable[Place]) -> Flags:
    group, partition = to_numpy(table["group"]), to_numpy(table["partition"])
    found = np.zeros(len(table), np.bool_)
    for number, place in places:
        found |= (group == number) & (partition == place)
    return found


def _reported(table: pa.Table, task: NamingTask, schema: pa.Schema) -> pa.Table:
    """Return the rows in the schema of the report, without those that do not belong to the state."""
    source = task.source
    if isinstance(source, BaseSource):
        table = _as_changes(table, source, task.multisets)
    else:
        table = filter_effective(table, source)
    if not len(table):
        return schema.empty_table()
    keys, rows = xxhash64(column_of(table["key"])), column_of(table["row"])
    is_multiset = np.isin(to_numpy(table["group"]), list(task.multisets))
    identity = np.where(is_multiset, xxhash64(rows), keys)
    table = table.append_column("identity", pa.array(identity)).append_column("entry", pa.array(xxhash64(rows, keys)))
    if task.identities is not None:
        table = table.filter(to_mask(np.isin(identity, task.identities)))
        table = table.filter(to_mask(_are_last(table)))
        is_cut = pc.greater(pc.binary_length(table["row"]), SHOWN_BYTES)
        shown = pc.binary_slice(table["row"], 0, SHOWN_BYTES)
        table = table.set_column(table.schema.get_field_index("row"), "row", shown)
        objects = pa.array([source.source.key] * len(table), pa.string())
        table = table.append_column("is_cut", is_cut).append_column("object", objects)
    return table.select(schema.names).cast(schema)


def _are_last(table: pa.Table) -> Flags:
    """Flag the last row of each group and identity: a row may have been updated a million times."""
    group, identity, lsn, seq = (to_numpy(table[name]) for name in ("group", "identity", "lsn", "seq"))
    order = np.lexsort((seq, lsn, identity, group))
    is_last = np.zeros(len(table), np.bool_)
    if len(order):
        differs = (group[order][1:] != group[order][:-1]) | (identity[order][1:] != identity[order][:-1])
        is_last[order[np.append(differs, True)]] = True
    return is_last


def _as_changes(table: pa.Table, source: BaseSource, multisets: frozenset[int]) -> pa.Table:
    """Return base rows with the columns of changes, as if they had been written before all of them."""
    if source.truncated:
        table = table.filter(to_mask(~np.isin(to_numpy(table["group"]), list(source.truncated))))
    count = len(table)
    op = np.where(np.isin(to_numpy(table["group"]), list(multisets)), INSERT, UPSERT).astype(np.int8)
    numbers = {"lsn": np.full(count, BASE_LSN), "seq": np.zeros(count, np.int64), "xid": np.zeros(count, np.int64)}
    return pa.table(
        {name: table[name] for name in ("group", "partition", "key", "row")}
        | {name: to_arrow(values) for name, values in (numbers | {"op": op}).items()}
        | {"global_id": pa.nulls(count, pa.string())}
    )


def name_rows(
    session: SparkSession,
    copies: Copies,
    store: StoreLocation,
    findings: Findings,
    progress: Progress,
    rows_max: int,
    state: Sums,
) -> None:
    """Add up to `rows_max` different rows to each conflict between two copies of a partition, or the reason for none.

    `state` has the numbers of rows by node, group and partition (PartitionHashes.rows). Raises a task's error if the
    store did not answer that task.
    """
    wanted = _conflicts_by_shard(copies, findings.report.conflicts)
    if not wanted or not rows_max:
        return
    progress.step("name the rows that differ")
    for shard, by_place in wanted.items():
        places = dict(list(by_place.items())[:PARTITIONS_MAX])
        for at in list(by_place)[PARTITIONS_MAX:]:
            _note(findings, by_place[at], f"rows are named in {PARTITIONS_MAX} partitions of a shard")
        nodes = tuple(node for node in copies.same_shard(shard) if node not in findings.damaged)
        try:
            search = _Search.of(copies, nodes, frozenset(places), store, state)
            if search.rows > HELD_ROWS_MAX:
                raise _NotSearchedError(f"there are too many rows and changes to search: {search.rows:,}")
            _name(search, session, progress, findings, places, rows_max)
        except (_NotSearchedError, ObjectDamagedError) as error:
            for numbers in places.values():
                _note(findings, numbers, str(error))


class _NotSearchedError(Exception):
    """Rows are not named, for this reason."""


def _conflicts_by_shard(copies: Copies, conflicts: Sequence[Conflict]) -> dict[str, dict[Place, list[int]]]:
    """Return the indexes of the conflicts that rows can be named for, by shard and partition."""
    numbers = {
        shard: {group.name: group.number for group in copies.chain.groups(shard)}
        for shard in set(copies.shard.values())
    }
    wanted: dict[str, dict[Place, list[int]]] = {}
    for index, conflict in enumerate(conflicts):
        if conflict.kind in ROWS_DIFFER and conflict.node and conflict.group and conflict.partition is not None:
            at = numbers[conflict.node][conflict.group], conflict.partition
            wanted.setdefault(conflict.node, {}).setdefault(at, []).append(index)
    return wanted


def _note(findings: Findings, indexes: Iterable[int], why: str) -> None:
    conflicts = findings.report.conflicts
    for index in indexes:
        conflicts[index] = replace(conflicts[index], rows_unnamed=why)


class _Search(Struct, frozen=True):
    """The copies of one shard, and the partitions in which to search; `rows` is the number of hashes to hold at most.

    `since` is the position from which all copies have the same changes.
    """

    copies: Copies
    nodes: tuple[str, ...]
    places: frozenset[Place]
    store: StoreLocation
    sources: Sources
    multisets: frozenset[int]
    since: Lsn
    rows: int

    @classmethod
    def of(
        cls, copies: Copies, nodes: tuple[str, ...], places: frozenset[Place], store: StoreLocation, state: Sums
    ) -> _Search:
        groups = frozenset(number for number, _ in places)
        sources = sources_of(copies.chain, nodes, store.open(), chosen=dict.fromkeys(nodes, groups))
        multisets = frozenset(number for node in nodes for number in multiset_numbers_of(copies.chain, node))
        since = max(copies.recopied_since(node).get(number, copies.since(node)) for node in nodes for number in groups)
        held = sum(
            value[0]
            for key, value in state.as_dict().items()
            if copies.nodes[key[0]] in nodes and (key[1], key[2]) in places
        )
        # A base row that was replaced, and each change, counts as well.
        return cls(copies, nodes, places, store, sources, multisets, since, held + 2 * sources.changes)

    def tasks(self, identities: Hashes | None = None) -> list[NamingTask]:
        """Return the tasks of a job."""
        found = (*self.sources.bases, *self.sources.segments)
        return [NamingTask(source, self.places, self.multisets, self.store, identities) for source in found]


def _name(
    search: _Search,
    session: SparkSession,
    progress: Progress,
    findings: Findings,
    places: Mapping[Place, list[int]],
    rows_max: int,
) -> None:
    conflicts = findings.report.conflicts
    hashes = _run(session, search, search.tasks(), progress, HASH_SCHEMA)
    states = {
        (node, at): _State.of(_at(table, at), search.since, is_multiset=at[0] in search.multisets)
        for node, table in hashes.items()
        for at in places
    }
    differing: dict[int, Hashes] = {}
    for at, indexes in places.items():
        for index in indexes:
            pair = [states[node, at] for node in (conflicts[index].node, conflicts[index].other_node) if node]
            differing[index] = _differing(*pair)[:rows_max]
    identities = np.unique(np.concatenate([np.empty(0, np.uint64), *differing.values()]))
    rows = _run(session, search, search.tasks(identities), progress, ROW_SCHEMA) if len(identities) else {}
    increments = _Increments.of(search)
    for at, indexes in places.items():
        of_place = {node: states[node, at] for node in search.nodes}
        shown = {node: _at(table, at) for node, table in rows.items()}
        for index in indexes:
            named = tuple(
                _different_row(identity, of_place, shown, increments) for identity in differing[index].tolist()
            )
            why = "" if named else "the rows that differ could not be told apart"
            conflicts[index] = replace(conflicts[index], rows=named, rows_unnamed=why)


def _at(table: pa.Table, at: Place) -> pa.Table:
    return table.filter(to_mask(_are_in(table, [at])))


def _run(
    session: SparkSession, search: _Search, tasks: list[NamingTask], progress: Progress, schema: pa.Schema
) -> dict[str, pa.Table]:
    """Return the tasks' rows by node; raise _NotSearchedError if an object can't be read any more."""
    dealing = Dealing[NamingTask](lambda task: task.source.source.size)
    streams: dict[str, list[pa.Table]] = {node: [schema.empty_table()] for node in search.nodes}
    reports = run_tasks(session, read_rows, tasks, progress, dealing, problem_of=shared_problem)
    for task, report in zip(tasks, reports, strict=True):
        if report.problem is not None:
            raise _NotSearchedError(report.problem["message"])
        streams[search.nodes[task.source.source.number]].append(from_stream(report.rows))
    return {node: pa.concat_tables(tables) for node, tables in streams.items()}


class _State(Struct, frozen=True):
    """The rows of a copy in one partition, ordered by `identity`: the hash, last writer and number of each.

    `unclear` has the identities whose entries can't be compared with those of other copies.
    """

    identity: Hashes
    entry: Hashes
    lsn: Ints
    count: Ints
    unclear: Hashes = field(default_factory=lambda: np.empty(0, np.uint64))

    @classmethod
    def of(cls, table: pa.Table, since: Lsn, *, is_multiset: bool) -> _State:
        """Fold the rows (HASH_SCHEMA); copies have the same changes from `since` on."""
        identity, entry, lsn, seq, op = (to_numpy(table[name]) for name in ("identity", "entry", "lsn", "seq", "op"))
        if is_multiset:
            return cls._counted(identity, entry, op)
        if not len(identity):
            return cls(identity, entry, lsn, np.empty(0, np.int64))
        order = np.lexsort((seq, lsn, identity))
        identity, entry, lsn, op = identity[order], entry[order], lsn[order], op[order]
        starts = np.flatnonzero(np.append(True, identity[1:] != identity[:-1]))
        lengths = np.diff(np.append(starts, len(identity)))
        ends = starts + lengths - 1
        # A partial image is completed from the images before it, back to the last complete one.
        complete = np.maximum.reduceat(np.where(op == PARTIAL, -1, np.arange(len(op))), starts)
        is_counted = np.arange(len(op)) >= np.repeat(complete, lengths)
        combined = np.add.reduceat(np.where(is_counted, entry, np.uint64(0)), starts)
        # One copy may have such an image in its base row, and another as a change.
        is_unclear = np.logical_or.reduceat((op == PARTIAL) & (lsn < int(since)), starts)
        kept = op[ends] != DELETE
        last = np.where(lsn[ends] < int(since), BASE_LSN, lsn[ends])
        one_each = np.ones(int(kept.sum()), np.int64)
        return cls(identity[ends][kept], combined[kept], last[kept], one_each, identity[starts][is_unclear])

    @classmethod
    def _counted(cls, identity: Hashes, entry: Hashes, op: Any) -> _State:
        unique, places = np.unique(identity, return_inverse=True)
        counts, first = np.zeros(len(unique), np.int64), np.zeros(len(unique), np.uint64)
        np.add.at(counts, places, np.where(op == DELETE, -1, 1))
        first[places] = entry
        kept = counts > 0
        # Equal rows can't be told apart, so none of them has a last writer.
        return cls(unique[kept], first[kept], np.full(int(kept.sum()), BASE_LSN), counts[kept])

    def value(self, identity: int) -> tuple[int, int] | None:
        """Return the entry and the number of a row; None if there is no such row."""
        place = int(np.searchsorted(self.identity, np.uint64(identity)))
        if place == len(self.identity) or int(self.identity[place]) != identity:
            return None
        return int(self.entry[place]), int(self.count[place])


def _differing(first: _State, second: _State) -> Hashes:
    """Return the identities of the rows that the copies have differently; if there are none, of other last writers."""
    unclear = np.union1d(first.unclear, second.unclear)
    for with_writers in (False, True):
        names = ("identity", "entry", "count", *(["lsn"] if with_writers else []))
        both = pa.concat_tables([pa.table({name: getattr(state, name) for name in names}) for state in (first, second)])
        counted = both.group_by(list(names)).aggregate([([], "count_all")])
        unequal = counted.filter(pc.field("count_all") == 1)
        found = np.setdiff1d(np.unique(to_numpy(unequal["identity"])), unclear)
        if len(found):
            break
    return found


class _Increments(Struct, frozen=True):
    """The increments that list objects, by segment key and by the operation in the key of a base object."""

    segments: Mapping[str, int]
    operations: Mapping[str, int]

    @classmethod
    def of(cls, search: _Search) -> _Increments:
        commits = search.copies.chain.commits
        segments = {
            segment.key: commit.increment
            for commit in commits
            for node in search.nodes
            for segment in commit.segments.get(node, ())
        }
        return cls(segments, {commit.operation: commit.increment for commit in commits})

    def with_object(self, key: str) -> int | None:
        """Return the increment that lists the object; None if it is unknown."""
        if key in self.segments:
            return self.segments[key]
        return next((self.operations[part] for part in key.split("/") if part in self.operations), None)


def _different_row(
    identity: int, states: Mapping[str, _State], rows: Mapping[str, pa.Table], increments: _Increments
) -> DifferentRow:
    stored: list[StoredRow] = []
    values = {node: state.value(identity) for node, state in states.items()}
    key = ""
    for node, value in values.items():
        with_identity = rows[node].filter(pc.field("identity") == pa.scalar(identity, pa.uint64())).to_pylist()
        last = max(with_identity, key=lambda row: (row["lsn"], row["seq"]), default=None)
        if last is not None:
            key = key or last["key"].decode(errors="backslashreplace")
        if value is None or last is None:
            stored.append(StoredRow(node))
            continue
        line = last["row"].decode(errors="backslashreplace").rstrip("\n") + ("…" if last["is_cut"] else "")
        has_writer = last["lsn"] != BASE_LSN and bool(last["key"])
        stored.append(
            StoredRow(
                node,
                line,
                value[1],
                last["object"],
                increments.with_object(last["object"]),
                str(Lsn(last["lsn"])) if has_writer else None,
                last["xid"] if has_writer else None,
                last["global_id"] if has_writer else None,
            )
        )
    return DifferentRow(key, tuple(stored), _outvoted(values))


def _outvoted(values: Mapping[str, tuple[int, int] | None]) -> tuple[str, ...]:
    """Return the copies that differ from more than half of the copies; none if there is no such majority."""
    every = list(values.values())
    most = max(every, key=every.count)
    if every.count(most) * 2 <= len(every):
        return ()
    return tuple(node for node, value in values.items() if value != most)
