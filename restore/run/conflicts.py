"""Before loading, find keys that several sources would send to the same target, and reference tables that differ.

One Spark job processes the keys. Each key is a *claim* by a source on a table in a target. Rows of tables with route
`all` are compared as a whole, by two hashes of each line.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from cutline.columns.bytes_column import BytesColumn, column_of, offsets_of, runs, xxhash64
from cutline.columns.row_batches import row_batches
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.restore.plan.topology import Topology
from cutline.restore.scope.table_routes import RouteKind, SourceRoutes, place_rows
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows, read_bases
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader, map_images
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, Sources, problem_of, read_at_cut, sources_of
from cutline.snapshots.records.chain import Chain
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import job_progress, raise_first
from cutline.storage.errors import RefusedError, SnapshotError, report_of
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# `key` is the row's key, or the hashes of its line where `target` is EQUAL. A task reports an error as a row whose
# table is PROBLEM and whose key is the report.
CLAIMS = "`table` int, target int, key binary, node int"
CLAIMS_SCHEMA = pa.schema([("table", pa.int32()), ("target", pa.int32()), ("key", pa.binary()), ("node", pa.int32())])
EQUAL = -1
HASHES_BYTES = 16
NAMED_MAX, KEY_SHOWN_MAX = 10, 80


class KeyConflictError(RefusedError):
    """Several sources have rows with the same key for one target, or a table with route `all` differs between them."""


def check_conflicts(
    session: SparkSession, chain: Chain, topology: Topology, store: StoreLocation, progress: Progress
) -> None:
    """Raise KeyConflictError if sources contradict each other, or RowWithoutTargetError if a row has no target.

    Reads all rows once, and shuffles the keys of tables that have a key.
    """
    progress.step("compare keys of the sources", unit="tasks")
    sources = sources_of(chain, topology.sources, store.open())
    routes = {number: topology.routes_of(chain, source) for number, source in enumerate(topology.sources)}
    folded = fold(session, sources, store)
    try:
        raise_first(folded.problems)
        frame = _find_conflicts(_claims(session, sources, folded, routes, store), topology).persist()
        with job_progress(session, progress):
            counts = frame.groupBy("table", "target").count().collect()  # bounded by tables and targets
        named = frame.orderBy("table", "target", "key").limit(NAMED_MAX).collect() if counts else []
        frame.unpersist()
    finally:
        folded.release()
    raise_first([json.loads(bytes(row["key"])) for row in named if row["table"] == PROBLEM])
    if named:
        by_table: Counter[int] = Counter()
        for row in counts:
            by_table[row["table"]] += row["count"]
        raise _conflict_error(topology, named, by_table)


def _find_conflicts(claims: DataFrame, topology: Topology) -> DataFrame:
    """Find contradictory claims: table, target, key, and the number of rows on each source (n0, n1 and so on)."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    numbers = range(len(topology.sources))
    total = " + ".join(f"n{number}" for number in numbers)
    differs = " OR ".join(f"n{number} <> n0" for number in numbers)
    counts = [F.expr(f"sum(int(node = {number})) AS n{number}") for number in numbers]
    grouped = claims.groupBy("table", "target", "key").agg(*counts)
    return grouped.where(
        f"`table` = {PROBLEM} OR (target = {EQUAL} AND ({differs})) OR (target <> {EQUAL} AND {total} > 1)"
    )


def _conflict_error(topology: Topology, named: list[Any], counts: Counter[int]) -> KeyConflictError:
    tables = {route.number: route for route in topology.routes.values()}
    totals = {tables[number].table: count for number, count in sorted(counts.items())}
    lines: list[str] = []
    details: list[dict[str, object]] = []
    for row in named:
        route = tables[row["table"]]
        rows = {source: row[f"n{number}"] for number, source in enumerate(topology.sources)}
        having = [source for source, count in rows.items() if count]
        if row["target"] == EQUAL:
            lines.append(
                f"{route.table} is not the same on all sources: "
                + ", ".join(f"a row occurs {count} times on {source}" for source, count in rows.items())
            )
            details.append({"table": route.table, "rows": rows})
            continue
        key = bytes(row["key"]).decode(errors="backslashreplace").replace("\t", ", ")[:KEY_SHOWN_MAX]
        target = topology.targets[row["target"]]
        lines.append(f"{route.table} key ({key}) on {', '.join(having)} for {target}")
        details.append({"table": route.table, "key": key, "sources": having, "target": target})
    total = counts.total()
    lines += [f"and {total - len(named)} more"] if total > len(named) else []
    amounts = list_some([f"{count} rows of {table}" for table, count in totals.items()], NAMED_MAX)
    return KeyConflictError(
        f"sources contradict each other in {amounts}, so nothing was changed: {'; '.join(lines)}",
        hint=[
            "remove the rows from all sources but one, then take another increment; or give the tables routes that"
            " send the rows to different targets",
            "for a table that is the same on all sources: --route 'SCHEMA.TABLE=all'",
        ],
        details={"conflicts": details, "totals": totals},
    )


def _claims(
    session: SparkSession,
    sources: Sources,
    folded: Fold,
    routes: Mapping[int, SourceRoutes],
    store: StoreLocation,
) -> DataFrame:
    groups = {number: frozenset(source_routes.by_group) for number, source_routes in routes.items()}
    changed = broadcast(session, folded.changed)

    def read_base(_: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
        return _claims_of_base(store, base, changed.value, routes[base.source.number])

    def change(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _claims_of_images(batches, routes)

    claims = read_bases(session, sources.bases, groups, read_base, CLAIMS)
    columns = ("node", "group", "row", "key")
    reader = long_image_reader(sources, store)
    for images in map_images(session, folded, reader, change, columns, (CLAIMS_SCHEMA, CLAIMS)):
        claims = claims.unionByName(images)
    return claims


def _claims_of_base(
    store: StoreLocation, base: BaseSource, changed: Mapping[int, Mapping[int, Keys]], routes: SourceRoutes
) -> Iterator[pa.RecordBatch]:
    try:
        for table in read_at_cut(store.open(), base, BASE_SCHEMA):
            for batch in row_batches(table):
                holds = find_valid_rows(batch, base, changed.get(base.source.number, {}))
                yield _claim(batch if holds.all() else batch.filter(pa.array(holds)), base.source.number, routes)
    except SnapshotError as error:
        yield _problem(error)


def _claims_of_images(
    batches: Iterator[pa.RecordBatch], routes: Mapping[int, SourceRoutes]
) -> Iterator[pa.RecordBatch]:
    try:
        for batch in batches:
            group, node = (np.asarray(batch.column(name).to_numpy()) for name in ("group", "node"))
            for lacking in np.flatnonzero(group == PROBLEM):
                # Incomplete rows are not reported here, because the load reports them.
                if report := problem_of(batch.column("row")[int(lacking)].as_py()):
                    yield _claim_batch(PROBLEM, 0, [json.dumps(report).encode()], 0)
            order = np.lexsort((group, node))
            ordered = batch.take(pa.array(order))
            for rows in runs(node[order]):
                number = int(node[order][rows.start])
                yield _claim(ordered.slice(rows.start, rows.stop - rows.start), number, routes[number])
    except SnapshotError as error:
        yield _problem(error)


def _claim(batch: pa.RecordBatch, number: int, routes: SourceRoutes) -> pa.RecordBatch:
    """Return the claims for a source's rows (columns group, key, row; sorted by group); raise SnapshotError."""
    group = np.asarray(batch.column("group").to_numpy())
    places = place_rows(batch, routes)
    tables, targets = np.full(len(batch), -1, np.int32), places.astype(np.int32)
    claims = np.zeros(len(batch), np.bool_)
    keys: list[pa.Array] = []
    for rows in runs(group):
        route = routes.by_group.get(int(group[rows.start]))
        if route is None or (route.key_width == 0 and route.kind is not RouteKind.ALL):
            continue
        tables[rows], claims[rows] = route.number, True
        part = slice(rows.start, rows.stop)
        if route.kind is RouteKind.ALL:
            targets[rows] = EQUAL
            keys.append(_hashes(column_of(batch.column("row")).part(part)).to_arrow())
        else:
            keys.append(batch.column("key").slice(rows.start, rows.stop - rows.start))
    key = pa.concat_arrays(keys) if keys else pa.array([], pa.binary())
    node = np.full(int(claims.sum()), number, np.int32)
    columns = [pa.array(tables[claims]), pa.array(targets[claims]), key.cast(pa.binary()), pa.array(node)]
    return pa.record_batch(columns, schema=CLAIMS_SCHEMA)


def _hashes(lines: BytesColumn) -> BytesColumn:
    """Return 16 bytes for each line: two hashes."""
    first = xxhash64(lines)
    data = np.stack([first, xxhash64(lines, first)], axis=1).view(np.uint8).reshape(-1)
    return BytesColumn(data, offsets_of(np.full(len(lines), HASHES_BYTES, np.int64)))


def _problem(error: SnapshotError) -> pa.RecordBatch:
    return _claim_batch(PROBLEM, 0, [json.dumps(report_of(error)).encode()], 0)


def _claim_batch(table: int, target: int, keys: list[bytes], node: int) -> pa.RecordBatch:
    values = [{"table": table, "target": target, "key": key, "node": node} for key in keys]
    return pa.RecordBatch.from_pylist(values, schema=CLAIMS_SCHEMA)
