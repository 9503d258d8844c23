"""The level below a drill: read the objects of a restore, build the rows that it would load, and throw them away.

Rows are read, verified, converted, folded and filtered as a restore does it, in one Spark job, or by the command itself
if there are few. Instead of being loaded, they are counted by table, and the constraints are evaluated that follow from
the text of values (restore/drill/row_constraints.py): the server would refuse the rows, or an index or foreign key
after all rows were loaded. If this machine has PostgreSQL's programs, the DDL is rehearsed as well, in empty databases
on temporary servers, without owners and privileges.

A drill shows the rest, because only loaded rows do: constraints of other forms, functions of indexes, and types whose
values only PostgreSQL can parse.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, column_of, xxhash64
from cutline.columns.row_batches import row_batches
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.nodes.programs import PostgresMissingError
from cutline.restore.drill.counted_values import count_values
from cutline.restore.drill.row_constraints import (
    AddedValues,
    Breach,
    ShardRules,
    TableRules,
    compile_rules,
    evaluate,
    hashes_of,
    shown_value,
)
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
from cutline.snapshots.records.proven_chains import OnlyCutError, read_all_shards
from cutline.spark.amount import Amount
from cutline.spark.driver_session import runs_in_driver
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import Dealing, SparkSource, job_progress, run_tasks
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, RefusedError, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# A value that a row adds to a set of values (ValueUse), or a problem: the report on an object, that a row can't be
# completed (INCOMPLETE), or a constraint that it breaks. Each row adds its key to set 0 of its group (0 in a table
# without a key), so that the values of the sets 0 are the rows.
LOADED = "node int, `group` int, `set` int, h1 bigint, h2 bigint, reference bigint, problem string"
LOADED_SCHEMA = pa.schema(
    [
        ("node", pa.int32()),
        ("group", pa.int32()),
        ("set", pa.int32()),
        ("h1", pa.int64()),
        ("h2", pa.int64()),
        ("reference", pa.int64()),
        ("problem", pa.string()),
    ]
)
# Values with wanted hashes, in full, to name them.
NAMED = "node int, `group` int, `set` int, h1 bigint, value binary"
NAMED_SCHEMA = pa.schema(
    [("node", pa.int32()), ("group", pa.int32()), ("set", pa.int32()), ("h1", pa.int64()), ("value", pa.binary())]
)
# With more rows than this, Spark groups their values: each has one for its key, and one for each constraint.
ROWS_IN_COMMAND_MAX = 500_000
INCOMPLETE = "incomplete"
DdlResult = Literal["run", "read", "refused"]
BREACH = "breach"
NO_RULES = ShardRules({})
Numbers: TypeAlias = npt.NDArray[Any]
Hashes: TypeAlias = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
# The rules by the number of the shard, and those of its tables by the number of the group.
Rules: TypeAlias = Mapping[int, ShardRules]
TablesByNode: TypeAlias = Mapping[int, Mapping[int, TableRules]]
# Gets a batch of rows (group, row, key) and the numbers of their nodes.
RowReader: TypeAlias = Callable[[pa.RecordBatch, Numbers], Iterator[pa.RecordBatch]]
Schemas: TypeAlias = tuple[pa.Schema, str]


class RestoreProblem(Struct, frozen=True):
    """Why a restore would fail: the shard or node, the table if it is known, and the detail."""

    node: str
    group: str | None
    detail: str


class RestorableReport(Struct):
    """The report on the rows that a restore would load: their number by shard, and the problems.

    `ddl` is "run" if all DDL was run on temporary servers, "read" if it was only read, and "refused" if these servers
    refused it, which other servers may not do; `ddl_detail` says why. `constraints` and `other_constraints` are the
    numbers of constraints of all shards that were and were not evaluated.
    """

    increment: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    problems: list[RestoreProblem] = field(default_factory=list)
    ddl: DdlResult = "read"
    ddl_detail: str = ""
    constraints: int = 0
    other_constraints: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the report for JSON output."""
        return {
            "increment": self.increment,
            "rows": self.rows,
            "ddl": self.ddl,
            "ddl_detail": self.ddl_detail or None,
            "constraints": self.constraints,
            "other_constraints": self.other_constraints,
            "seconds": round(self.seconds, 3),
        }


def check_restorable(
    source: Fleet, name: str, increment: int | None, spark: SparkSource, progress: Progress
) -> RestorableReport:
    """Build everything that a restore of the increment (None: the newest) would load, and throw it away.

    Problems that a restore would refuse are in the report. Raises errors of the store, and those for a snapshot that
    does not exist or has no rows.
    """
    began, report = time.monotonic(), RestorableReport()
    store = source.store.open()
    shards = read_all_shards(store, name)
    # A rehearsal creates no roles, so it leaves out what needs them.
    request = RestoreRequest(name, increment, is_drill=True, scope=RestoreScope(no_owner=True))
    try:
        plan = plan_restore(source, without_servers(source, shards), request)
        if plan.damage is not None:
            raise plan.damage
    except OnlyCutError:
        # Nothing is wrong with it.
        raise
    except RefusedError as error:
        report.problems.append(RestoreProblem(str(error.details.get("node", "")), None, error.message))
        return report
    report.increment = plan.chain.last.increment
    spark.begin(ExecutorNeeds(source.store), progress, _amount(plan))
    rules, is_read = _read_ddl(plan, report)
    _build_rows(plan, source.store, spark, progress, report, rules)
    if is_read and not report.problems:
        _rehearse(source, plan, progress, report)
    report.seconds = time.monotonic() - began
    return report


def _amount(plan: RestorePlan) -> Amount:
    """Return the amount of work, with an unknown size if Spark is to group the values."""
    amount = plan.amount
    return amount if amount.rows <= ROWS_IN_COMMAND_MAX else Amount(changes=amount.changes)


def _read_ddl(plan: RestorePlan, report: RestorableReport) -> tuple[Rules, bool]:
    """Read the DDL, the globals and the rows of extensions as a restore does; return whether all can be read.

    Also returns the rules of the shards whose DDL can be read, by their numbers in the plan.
    """
    store, rules = plan.store.open(), dict[int, ShardRules]()
    for number, shard in enumerate(plan.sources):
        try:
            rules[number] = compile_rules(plan.chain, shard, read_stored_ddl(store, plan.chain, shard))
            read_stored_globals(store, plan.chain, shard)
            read_extension_rows(store, plan.chain.last, shard)
        except ObjectDamagedError as error:
            report.problems.append(RestoreProblem(shard, None, error.message))
    report.constraints = sum(one.evaluated for one in rules.values())
    report.other_constraints = sum(one.others for one in rules.values())
    return rules, not report.problems


def _build_rows(
    plan: RestorePlan,
    store: StoreLocation,
    spark: SparkSource,
    progress: Progress,
    report: RestorableReport,
    rules: Rules,
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
        tables = broadcast(session, {number: one.tables for number, one in rules.items()})
        found = _count(session, sources, folded, store, tables, progress)
        refused = found.filter(pc.is_valid(found["example"]))
        named = _name_values(session, sources, folded, store, tables, refused, progress) if len(refused) else {}
    finally:
        folded.release()
    names = {number: {group.number: group.name for group in chain.groups(node)} for number, node in enumerate(nodes)}
    report.rows = dict.fromkeys(nodes, 0)
    breaches: dict[_Breached, tuple[int, str]] = {}
    # A row for each set of values, for each object that could not be read, and for each batch with breaches.
    for row in found.to_pylist():
        node, group = nodes[row["node"]], names[row["node"]].get(row["group"])
        problem = row["problem"]
        if problem == INCOMPLETE:
            detail = f"{row['rows']} rows can't be completed: the snapshot lacks earlier images of them"
            report.problems.append(RestoreProblem(node, group, detail))
        elif problem is not None and BREACH in (document := json.loads(problem)):
            of = _Breached(node, group, document[BREACH])
            count, example = breaches.get(of, (0, document["example"]))
            breaches[of] = count + row["rows"], example
        elif problem is not None:
            _add_problem(report, document)
        elif row["set"] == 0:
            report.rows[node] += row["rows"]
        if row["example"] is not None:
            value = named.get(_Example(row["node"], row["group"], row["set"], row["example"]))
            report.problems += _refusals(rules.get(row["node"], NO_RULES), node, row, value)
    for (node, group, what), (count, example) in breaches.items():
        detail = f"rows that {what}: {count}{f', for example where {example}' if example else ''}"
        report.problems.append(RestoreProblem(node, group, detail))


class _Breached(NamedTuple):
    """A table, and what its rows break."""

    node: str
    group: str | None
    what: str


class _Example(NamedTuple):
    """The hash of a value in a set of values (row_constraints) of a table, which are given by their numbers."""

    node: int
    group: int
    set: int
    hash: int


def _refusals(rules: ShardRules, node: str, row: Mapping[str, Any], value: bytes | None) -> Iterator[RestoreProblem]:
    """Yield the problems with a set of values: those that occur more than once, and those that are missing."""
    of = row["group"], row["set"]
    table, what = rules.sets.get(of, (None, "the key"))
    example = "" if value is None else f", for example {shown_value(value)}"
    if row["repeated"]:
        detail = f"values of {what} that occur more than once in the rows that a restore would load: {row['repeated']}"
        yield RestoreProblem(node, table, detail + example)
    for bit, key in enumerate(rules.references.get(of, ())):
        if row["missing"] >> bit & 1:
            referring = ".".join(key.table)
            detail = (
                f"values of foreign key {key.name} ({', '.join(key.columns)}) that are not in"
                f" {'.'.join(key.referenced)} ({', '.join(key.referenced_columns)}): {row['absent']}"
            )
            yield RestoreProblem(node, referring, detail + example)


def _add_problem(report: RestorableReport, problem: ErrorReport) -> None:
    if problem["exit_code"] in NOT_OF_THE_OBJECT:
        raise error_of(problem)
    report.problems.append(RestoreProblem(str(problem["details"].get("node", "")), None, problem["message"]))


def _values_of(sources: Sources, tables: Any) -> RowReader:
    """Return the reader of the values (LOADED) of rows; `tables` is a broadcast of the rules."""
    multisets = sources.multisets

    def values(batch: pa.RecordBatch, node: Numbers) -> Iterator[pa.RecordBatch]:
        yield _identities(batch, node, multisets)
        yield from _constrained(batch, node, tables.value)

    return values


def _is_in_driver(session: SparkSession, folded: Fold) -> bool:
    """Whether the rows are built in this process: all of them are in base objects or were folded here."""
    return runs_in_driver(session) and folded.images is None and folded.long_images is None


def _read_in_driver(
    session: SparkSession,
    sources: Sources,
    folded: Fold,
    store: StoreLocation,
    reader: RowReader,
    schema: pa.Schema,
    progress: Progress,
) -> pa.Table:
    """Return what `reader` yields for the batches of all rows, and the problems if the schema has them."""

    def read(base: BaseSource) -> pa.Table:
        changed = folded.changed.get(base.source.number, {})
        return pa.Table.from_batches(_filled(_rows_of_base(store, base, changed, reader), schema), schema)

    dealing = Dealing[BaseSource](lambda base: base.source.size)
    # Bounded by ROWS_IN_COMMAND_MAX and the constraints.
    found = run_tasks(session, read, list(sources.bases), progress, dealing)
    if folded.local is not None:
        images = _rows_of_images(iter(folded.local.to_batches()), reader)
        found.append(pa.Table.from_batches(_filled(images, schema), schema))
    return pa.concat_tables([schema.empty_table(), *found])


def _map_rows(
    session: SparkSession, sources: Sources, folded: Fold, store: StoreLocation, reader: RowReader, schema: Schemas
) -> DataFrame:
    """Return what `reader` yields for the batches of all rows, and the problems if the schema has them."""
    changed = broadcast(session, folded.changed)
    groups = {node.number: node.groups for node in sources.bases.nodes}
    wanted = schema[0]

    def read_base(_: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
        yield from _filled(_rows_of_base(store, base, changed.value.get(base.source.number, {}), reader), wanted)

    def change(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from _filled(_rows_of_images(batches, reader), wanted)

    rows = read_bases(session, sources.bases, groups, read_base, schema[1])
    columns = ("node", "group", "partition", "row", "key")
    images_reader = long_image_reader(sources, store)
    for images in map_images(session, folded, images_reader, change, columns, schema):
        rows = rows.unionByName(images)
    return rows


def _filled(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Leave out batches of another schema, and those without rows."""
    return (batch for batch in batches if len(batch) and batch.schema == schema)


def _rows_of_base(
    store: StoreLocation, base: BaseSource, changed: Mapping[int, Keys], reader: RowReader
) -> Iterator[pa.RecordBatch]:
    try:
        for table in read_at_cut(store.open(), base, BASE_SCHEMA):
            for batch in row_batches(table):
                holds = find_valid_rows(batch, base, changed)
                chosen = batch if holds.all() else batch.filter(to_mask(holds))
                yield from reader(chosen, np.full(len(chosen), base.source.number, np.int32))
    except SnapshotError as error:
        yield _problem_batch(base.source.number, 0, json.dumps(report_of(error)))


def _rows_of_images(batches: Iterator[pa.RecordBatch], reader: RowReader) -> Iterator[pa.RecordBatch]:
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
            yield from reader(chosen, node[is_row])
    except SnapshotError as error:
        yield _problem_batch(0, 0, json.dumps(report_of(error)))


def _identities(batch: pa.RecordBatch, node: Numbers, multisets: frozenset[int]) -> pa.RecordBatch:
    """Return the keys of rows (columns group and key) as LOADED."""
    group = to_numpy(batch.column("group"))
    has_key = ~np.isin(group, list(multisets))
    hashes = [np.where(has_key, one, np.uint64(0)) for one in hashes_of(column_of(batch.column("key")))]
    return _values_batch(node, group, 0, (hashes[0], hashes[1]))


def _values_batch(node: Numbers, group: Numbers, number: int, hashes: Hashes, reference: int = 0) -> pa.RecordBatch:
    count = len(node)
    columns = [
        to_arrow(np.asarray(node, np.int32)),
        to_arrow(np.asarray(group, np.int32)),
        to_arrow(np.full(count, number, np.int32)),
        *(to_arrow(one.view(np.int64)) for one in hashes),
        to_arrow(np.full(count, reference, np.int64)),
        pa.nulls(count, pa.string()),
    ]
    return pa.record_batch(columns, schema=LOADED_SCHEMA)


def _constrained(batch: pa.RecordBatch, node: Numbers, tables: TablesByNode) -> Iterator[pa.RecordBatch]:
    """Return the values of rows (columns group and row) in the sets of constraints, and the constraints they break."""
    for number, found in _evaluated(batch, node, tables):
        if isinstance(found, Breach):
            problem = json.dumps({BREACH: found.what, "example": found.example})
            yield _problem_batch(number, found.group, problem, found.count)
        else:
            use, count = found.use, len(found.values)
            places = np.full(count, number, np.int32), np.full(count, use.group, np.int32)
            yield _values_batch(*places, use.number, hashes_of(found.values), use.reference)


def _evaluated(
    batch: pa.RecordBatch, node: Numbers, tables: TablesByNode
) -> Iterator[tuple[int, AddedValues | Breach]]:
    """Yield the values and breaches of the rows according to the rules, with the number of their node."""
    lines, group = column_of(batch.column("row")), to_numpy(batch.column("group"))
    # A base copy's batch has one node.
    for number in np.unique(node).tolist():
        of_node = tables.get(number, {})
        rows = np.flatnonzero((node == number) & np.isin(group, list(of_node)))
        if len(rows):
            chosen = lines if len(rows) == len(lines) else lines.take(rows)
            yield from ((number, found) for found in evaluate(of_node, group[rows], chosen))


def _problem_batch(node: int, group: int, problem: str, count: int = 1) -> pa.RecordBatch:
    """Return a problem that `count` rows have as LOADED, with a row for each of them."""
    none = np.zeros(count, np.uint64)
    batch = _values_batch(np.full(count, node), np.full(count, group), 0, (none, none))
    return pa.record_batch([*batch.columns[:-1], pa.repeat(pa.scalar(problem, pa.string()), count)], LOADED_SCHEMA)


def _count(
    session: SparkSession, sources: Sources, folded: Fold, store: StoreLocation, tables: Any, progress: Progress
) -> pa.Table:
    """Count the values of each set (COUNTED_SCHEMA; see `count_values`)."""
    values = _values_of(sources, tables)
    if _is_in_driver(session, folded):
        loaded = _read_in_driver(session, sources, folded, store, values, LOADED_SCHEMA, progress)
        return count_values(loaded, sources.multisets)
    return _count_in_spark(
        session, _map_rows(session, sources, folded, store, values, (LOADED_SCHEMA, LOADED)), sources, progress
    )


def _count_in_spark(session: SparkSession, rows: DataFrame, sources: Sources, progress: Progress) -> pa.Table:
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    numbers = ", ".join(map(str, sorted(sources.multisets))) or "-2"
    by_value = rows.groupBy("node", "group", "set", "problem", "h1", "h2").agg(
        F.sum(F.expr("bigint(reference = 0)")).alias("times"), F.expr("bit_or(reference)").alias("references")
    )
    is_repeated = F.expr(f"times > 1 AND problem IS NULL AND (`set` > 0 OR `group` NOT IN ({numbers}))")
    is_absent = F.expr("times = 0")
    missing = F.when(is_absent, F.col("references")).otherwise(F.lit(0).cast("long")).alias("missing")
    counted = by_value.groupBy("node", "group", "set", "problem", missing).agg(
        F.sum("times").alias("rows"),
        F.sum(is_repeated.cast("long")).alias("repeated"),
        F.sum(is_absent.cast("long")).alias("absent"),
        F.min(F.when(is_repeated | is_absent, F.col("h1"))).alias("example"),
    )
    # Bounded by the tables, their constraints, the objects, and the batches with rows that break a constraint.
    with job_progress(session, progress):
        return counted.orderBy("node", "group", "set").toArrow()


def _name_values(
    session: SparkSession,
    sources: Sources,
    folded: Fold,
    store: StoreLocation,
    tables: Any,
    refused: pa.Table,
    progress: Progress,
) -> dict[_Example, bytes]:
    """Read all rows again to find the values behind the hashes of examples."""
    # Bounded by the tables and their constraints.
    wanted = np.unique(to_numpy(refused["example"].combine_chunks()).view(np.uint64))

    def values(batch: pa.RecordBatch, node: Numbers) -> Iterator[pa.RecordBatch]:
        keys = column_of(batch.column("key"))
        yield _named(node, to_numpy(batch.column("group")), 0, keys, wanted)
        for number, found in _evaluated(batch, node, tables.value):
            if isinstance(found, AddedValues):
                use, count = found.use, len(found.values)
                places = np.full(count, number, np.int32), np.full(count, use.group, np.int32)
                yield _named(*places, use.number, found.values, wanted)

    progress.step("name values", unit="tasks")
    if _is_in_driver(session, folded):
        found = _read_in_driver(session, sources, folded, store, values, NAMED_SCHEMA, progress).to_pylist()
    else:
        rows = _map_rows(session, sources, folded, store, values, (NAMED_SCHEMA, NAMED))
        with job_progress(session, progress):
            found = rows.dropDuplicates(["node", "group", "set", "h1"]).toArrow().to_pylist()
    return {_Example(row["node"], row["group"], row["set"], row["h1"]): row["value"] for row in found}


def _named(
    node: Numbers, group: Numbers, number: int, values: BytesColumn, wanted: npt.NDArray[np.uint64]
) -> pa.RecordBatch:
    """Return the values whose first hash is wanted as NAMED."""
    hashes = xxhash64(values)
    rows = np.flatnonzero(np.isin(hashes, wanted))
    columns = [
        to_arrow(np.asarray(node[rows], np.int32)),
        to_arrow(np.asarray(group[rows], np.int32)),
        to_arrow(np.full(len(rows), number, np.int32)),
        to_arrow(hashes[rows].view(np.int64)),
        values.take(rows).to_arrow(),
    ]
    return pa.record_batch(columns, schema=NAMED_SCHEMA)


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
        report.ddl, report.ddl_detail = "refused", "; ".join([error.message, *error.hint.splitlines()])
        return
    except RefusedError as error:
        # Such as UnconfinedError: the servers would run as this user.
        report.ddl_detail = error.message
        return
    report.ddl, report.ddl_detail = "run", ""
    if preview.untried:
        report.ddl, report.ddl_detail = "read", f"not run for {', '.join(preview.untried)}: its roles are missing"
