"""The level below a drill: read everything that a restore would load, build it, and throw it away.

Rows are read, verified, converted, folded and filtered as a restore does it, in one Spark job. Instead of being loaded,
they are counted by table, and their keys are compared: a key that occurs twice would be refused by its index, after all
rows were loaded. If this machine has PostgreSQL's programs, the DDL is rehearsed as well, in empty databases on
temporary servers, without owners and privileges.

What only loaded rows show is left to a drill: constraints and foreign keys, functions of indexes, and types whose
values only PostgreSQL can parse.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import column_of, xxhash64
from cutline.columns.python_workers import broadcast
from cutline.columns.row_batches import row_batches
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.programs import PostgresMissingError
from cutline.restore.drill.servers import CONTRIB, DrillUnfitError, drill_servers, naming_unfit, without_servers
from cutline.restore.plan.plan import RestorePlan, plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.ddl.dump import read_stored_ddl
from cutline.snapshots.ddl.extension_tables import read_extension_rows
from cutline.snapshots.ddl.server_globals_object import read_stored_globals
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows, read_bases
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader, map_images
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, Sources, problem_of, read_at_cut, sources_of
from cutline.snapshots.records.proven_chains import read_full
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource, job_progress
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, RefusedError, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A row that a restore would load, identified by two hashes of its key (0 in a table without a key), or a problem: the
# report on an object, or that a row can't be completed (INCOMPLETE).
LOADED = "node int, `group` int, h1 bigint, h2 bigint, problem string"
LOADED_SCHEMA = pa.schema(
    [("node", pa.int32()), ("group", pa.int32()), ("h1", pa.int64()), ("h2", pa.int64()), ("problem", pa.string())]
)
INCOMPLETE = "incomplete"
DdlResult = Literal["run", "read", "refused"]


@dataclass(frozen=True, slots=True)
class RestoreProblem:
    """Why a restore would fail: the shard or node, the table if it is known, and the detail."""

    node: str
    group: str | None
    detail: str


@dataclass(slots=True)
class RestorableReport:
    """What a restore would have loaded: the number of rows by shard, and the problems.

    `ddl` is "run" if all DDL was run on temporary servers, "read" if it was only read, and "refused" if these servers
    refused it, which other servers may not do; `ddl_detail` says why.
    """

    increment: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[RestoreProblem] = field(default_factory=list)
    ddl: DdlResult = "read"
    ddl_detail: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON output."""
        return {
            "increment": self.increment,
            "rows": self.rows,
            "ddl": self.ddl,
            "ddl_detail": self.ddl_detail or None,
            "seconds": round(self.seconds, 3),
        }


def check_restorable(
    source: Fleet, name: str, increment: int | None, spark: SparkSource, progress: Progress
) -> RestorableReport:
    """Build everything that a restore of the increment (None: the newest) would load, and throw it away.

    Reports what a restore would refuse; raises errors of the store, and those for a snapshot that does not exist.
    """
    began, report = time.monotonic(), RestorableReport()
    store = source.store.open()
    shards = read_full(store, name).primaries
    # A rehearsal creates no roles, so it leaves out what needs them.
    request = RestoreRequest(name, increment, is_drill=True, scope=RestoreScope(no_owner=True))
    try:
        plan = plan_restore(source, without_servers(source, shards), request)
        if plan.damage is not None:
            raise plan.damage
    except RefusedError as error:
        report.problems.append(RestoreProblem(str(error.details.get("node", "")), None, error.message))
        return report
    report.increment = plan.chain.last.increment
    spark.begin(ExecutorNeeds(source.store), progress)
    is_read = _read_ddl(plan, report)
    _build_rows(plan, source.store, spark, progress, report)
    if is_read and not report.problems:
        _rehearse(source, plan, progress, report)
    report.seconds = time.monotonic() - began
    return report


def _read_ddl(plan: RestorePlan, report: RestorableReport) -> bool:
    """Read the DDL, the globals and the rows of extensions as a restore does; return whether all can be read."""
    store = plan.store.open()
    for shard in plan.sources:
        try:
            read_stored_ddl(store, plan.chain, shard)
            read_stored_globals(store, plan.chain, shard)
            read_extension_rows(store, plan.chain.last, shard)
        except ObjectDamagedError as error:
            report.problems.append(RestoreProblem(shard, None, error.message))
    return not report.problems


def _build_rows(
    plan: RestorePlan, store: StoreLocation, spark: SparkSource, progress: Progress, report: RestorableReport
) -> None:
    """Build the rows of all tables; add their numbers and the problems to the report."""
    session, chain = spark.session(), plan.chain
    progress.step("build rows", unit="tasks")
    nodes = plan.sources
    try:
        sources = sources_of(chain, nodes, store.open())
    except ObjectDamagedError as error:
        report.problems.append(RestoreProblem(str(error.details["node"]), None, error.message))
        return
    folded = fold(session, sources, store)
    try:
        for problem in folded.problems:
            _add_problem(report, problem)
        if folded.problems:
            return
        found = _count(session, _loaded(session, sources, folded, store), sources, progress)
    finally:
        folded.release()
    names = {number: {group.number: group.name for group in chain.groups(node)} for number, node in enumerate(nodes)}
    report.rows = dict.fromkeys(nodes, 0)
    # A row for each table, and for each object that could not be read.
    for row in found.to_pylist():
        node, group = nodes[row["node"]], names[row["node"]].get(row["group"])
        if row["problem"] not in (None, INCOMPLETE):
            _add_problem(report, json.loads(row["problem"]))
        elif row["problem"] == INCOMPLETE:
            detail = f"{row['rows']} rows can't be completed: the snapshot lacks earlier images of them"
            report.problems.append(RestoreProblem(node, group, detail))
        else:
            report.rows[node] += row["rows"]
        if row["repeated"]:
            detail = f"{row['repeated']} keys occur more than once in the rows that a restore would load"
            report.problems.append(RestoreProblem(node, group, detail))


def _add_problem(report: RestorableReport, problem: ErrorReport) -> None:
    if problem["exit_code"] in NOT_OF_THE_OBJECT:
        raise error_of(problem)
    report.problems.append(RestoreProblem(str(problem["details"].get("node", "")), None, problem["message"]))


def _loaded(session: SparkSession, sources: Sources, folded: Fold, store: StoreLocation) -> DataFrame:
    """Return a row (LOADED) for each row that a restore would load."""
    multisets = sources.multisets
    changed = broadcast(session, folded.changed)
    groups = {node.number: node.groups for node in sources.bases.nodes}

    def read_base(_: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
        return _rows_of_base(store, base, changed.value.get(base.source.number, {}), multisets)

    def change(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _rows_of_images(batches, multisets)

    rows = read_bases(session, sources.bases, groups, read_base, LOADED)
    columns = ("node", "group", "partition", "row", "key")
    reader = long_image_reader(sources, store)
    for images in map_images(session, folded, reader, change, columns, (LOADED_SCHEMA, LOADED)):
        rows = rows.unionByName(images)
    return rows


def _rows_of_base(
    store: StoreLocation, base: BaseSource, changed: Mapping[int, Keys], multisets: frozenset[int]
) -> Iterator[pa.RecordBatch]:
    try:
        for table in read_at_cut(store.open(), base, BASE_SCHEMA):
            for batch in row_batches(table):
                holds = find_valid_rows(batch, base, changed)
                chosen = batch if holds.all() else batch.filter(to_mask(holds))
                yield _identities(chosen, np.full(len(chosen), base.source.number, np.int32), multisets)
    except SnapshotError as error:
        yield _problem_batch(base.source.number, 0, json.dumps(report_of(error)))


def _rows_of_images(batches: Iterator[pa.RecordBatch], multisets: frozenset[int]) -> Iterator[pa.RecordBatch]:
    try:
        for batch in batches:
            group, node = to_numpy(batch.column("group")), to_numpy(batch.column("node"))
            for at in np.flatnonzero(group == PROBLEM).tolist():
                report = problem_of(batch.column("row")[at].as_py())
                # The `partition` of a row that can't be completed is its group.
                table = 0 if report or "partition" not in batch.schema.names else batch.column("partition")[at].as_py()
                yield _problem_batch(int(node[at]), table, json.dumps(report) if report else INCOMPLETE)
            is_row = group != PROBLEM
            chosen = batch if is_row.all() else batch.filter(to_mask(is_row))
            yield _identities(chosen, node[is_row], multisets)
    except SnapshotError as error:
        yield _problem_batch(0, 0, json.dumps(report_of(error)))


def _identities(batch: pa.RecordBatch, node: Any, multisets: frozenset[int]) -> pa.RecordBatch:
    """Return rows (columns group and key) as LOADED."""
    count, group = len(batch), to_numpy(batch.column("group"))
    keys = column_of(batch.column("key"))
    first = xxhash64(keys)
    second, has_key = xxhash64(keys, first), ~np.isin(group, list(multisets))
    hashes = [to_arrow(np.where(has_key, one, np.uint64(0)).view(np.int64)) for one in (first, second)]
    columns = [to_arrow(np.asarray(node, np.int32)), to_arrow(np.asarray(group, np.int32)), *hashes]
    return pa.record_batch([*columns, pa.nulls(count, pa.string())], schema=LOADED_SCHEMA)


def _problem_batch(node: int, group: int, problem: str) -> pa.RecordBatch:
    values = [{"node": node, "group": group, "h1": 0, "h2": 0, "problem": problem}]
    return pa.RecordBatch.from_pylist(values, schema=LOADED_SCHEMA)


def _count(session: SparkSession, rows: DataFrame, sources: Sources, progress: Progress) -> pa.Table:
    """Count the rows, and the keys that occur more than once: node, group, problem, rows, repeated."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    numbers = ", ".join(map(str, sorted(sources.multisets))) or "-2"
    by_key = rows.groupBy("node", "group", "problem", "h1", "h2").agg(F.count(F.lit(1)).alias("times"))
    is_repeated = F.expr(f"times > 1 AND problem IS NULL AND `group` NOT IN ({numbers})")
    counted = by_key.groupBy("node", "group", "problem").agg(
        F.sum("times").alias("rows"), F.sum(is_repeated.cast("long")).alias("repeated")
    )
    # Bounded by the tables and the objects.
    with job_progress(session, progress):
        return counted.orderBy("node", "group").toArrow()


def _rehearse(source: Fleet, plan: RestorePlan, progress: Progress, report: RestorableReport) -> None:
    """Run the DDL in empty databases on temporary servers, if this machine can start them."""
    progress.step("start PostgreSQL")
    extensions = CONTRIB | set(source.drill.extensions)
    try:
        with drill_servers(source, plan, extensions, progress) as place, naming_unfit(plan.request.name):
            preview = preview_restore(replace(place.plan, doubts=()), progress)
    except PostgresMissingError as error:
        report.ddl_detail = error.message
        return
    except DrillUnfitError as error:
        report.ddl, report.ddl_detail = "refused", error.message
        return
    except RefusedError as error:
        # Such as UnconfinedError: the servers would run as this user.
        report.ddl_detail = error.message
        return
    report.ddl, report.ddl_detail = "run", ""
    if preview.untried:
        report.ddl, report.ddl_detail = "read", f"not run for {', '.join(preview.untried)}: its roles are missing"
