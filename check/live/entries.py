"""The rows of running databases and of a cut, as hashes that a Spark job compares.

Each row is reduced to its identity (the hash of its key or, without a key, of its line) and its entry (the hash of key
and line). So lines stay where they are, and Spark's shuffle bounds the memory for any number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from cutline.check.live.ordered_snapshots import take_snapshot
from cutline.check.live.pages import (
    VERSION,
    ImportedSnapshot,
    RangeReader,
    fields_after,
    tids_of,
)
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.buckets import BUCKETS_DDL, BUCKETS_SCHEMA, RowBuckets, read_buckets
from cutline.columns.bytes_column import (
    BytesColumn,
    Hashes,
    Ints,
    column_of,
    from_arrow,
    partition_of,
    xxhash64,
)
from cutline.columns.lines import keys_of
from cutline.columns.python_workers import local_frame, map_batches
from cutline.fleet.config import Node
from cutline.nodes.groups import Group, Table
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA, PageRange
from cutline.snapshots.base_copy.copy_tables import plan_ranges
from cutline.snapshots.fold.changed_keys import Keys, find_valid_rows, read_bases
from cutline.snapshots.fold.changes import ENTRY
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader
from cutline.snapshots.fold.long_lines import LongImageReader, order_by_place
from cutline.snapshots.fold.sources import (
    PROBLEM,
    BaseSource,
    Sources,
    problem_of,
    read_at_cut,
)
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import cores_of
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.rate import RateLimit
from cutline.storage.store import ObjectStore
from cutline.wal.segments.segments import NO_GROUP

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The rows of the comparison: `stored` and `live` count how often a row is at the cut and in a running database. `place`
# is the page and the item of a version in the database, else NO_PLACE. Rows in the groups FILES and FAILURES are about
# tables: their `partition` is the table's number, or PROBLEM if the snapshot is damaged. A row in FILES has the table's
# file in `identity`, and a row in FAILURES has the report in `problem`.
ENTRY_SCHEMA = pa.schema(
    [
        ("node", pa.int32()), ("group", pa.int32()), ("partition", pa.int32()), ("identity", pa.int64()),
        ("entry", pa.int64()), ("stored", pa.int32()), ("live", pa.int32()), ("place", pa.int64()),
        ("problem", pa.binary()),
    ]
)  # fmt: skip
FILES, FAILURES, TOTALS, OVERFLOW = range(-2, -6, -1)
NO_PLACE = -1
ITEM_BITS = 16
# The result: the rows that differ, the number of equal rows of each table (in TOTALS), and the rows about tables. If
# too many rows differ in a Spark partition, some are left out, and OVERFLOW has a row for each of their tables.
# `places` are those of versions that only the database has, and `entries` their entries.
SUMMARY_SCHEMA = pa.schema(
    [
        ("node", pa.int32()), ("group", pa.int32()), ("partition", pa.int32()), ("identity", pa.int64()),
        ("equal", pa.int64()), ("left", pa.int64()), ("more", pa.int64()), ("places", pa.list_(pa.int64())),
        ("entries", pa.list_(pa.int64())), ("problem", pa.binary()),
    ]
)  # fmt: skip
SUMMARY_DDL = (
    "node int, `group` int, partition int, identity bigint, equal bigint, left bigint, more bigint,"
    " places array<bigint>, entries array<bigint>, problem binary"
)
# The most rows that differ which the driver holds; each takes 70 bytes, and 16 more for each place.
DIFFERING_MAX = 4_000_000
# The most places of equal lines without a key that are known of a row.
PLACES_MAX = 16
# A task holds about this many rows, which take 50 bytes each, and as much again while they are sorted.
ROWS_PER_TASK = 1_000_000


class CutComparisonError(RefusedError):
    """The snapshot can't be compared with the databases, because it is damaged."""


class CutShard(Struct, frozen=True):
    """A primary that is compared with the cut: its number in the job, its tables and the chain's groups by number.

    `whole` are the oids of the tables that are copied whole.
    """

    number: int
    node: Node
    tables: Mapping[int, Table]
    groups: Mapping[int, Group]
    whole: frozenset[int]


class LiveUnit(Struct, frozen=True):
    """Ranges of a shard's tables that a session reads in a snapshot of its own; `numbers` are those of the groups."""

    shard: int
    node: Node
    ranges: tuple[PageRange, ...]
    numbers: Mapping[int, int]
    whole: frozenset[int]
    bytes_per_second: int | None = None

    def entries(self, part: PageRange, lines: BytesColumn) -> pa.RecordBatch:
        """Return lines of a range as ENTRY_SCHEMA."""
        group, count = part.group, len(lines)
        rows, places = lines, np.full(count, NO_PLACE, np.int64)
        if part.oid not in self.whole:
            rows = fields_after(lines, len(VERSION))
            pages, items = tids_of(lines)
            places = (pages << ITEM_BITS) | items
        keys = keys_of(rows, group.key_width, len(group.columns))
        key_hashes = xxhash64(keys)
        identities = xxhash64(rows) if group.is_multiset else key_hashes
        partitions = partition_of(rows if group.is_multiset else keys, group.partitions)
        numbers = np.full(count, self.numbers[part.oid], np.int32)
        batch = entry_batch(self.shard, numbers, partitions, identities, xxhash64(rows, key_hashes), live=places)
        return merged(batch) if group.is_multiset else batch


def live_units(shards: Sequence[CutShard], task_pages: int, bytes_per_second: int | None) -> list[LiveUnit]:
    """Divide the tables of the shards into units, alternating between shards."""
    by_shard: list[list[LiveUnit]] = []
    for shard in shards:
        # Rows are read with the columns that they have at the cut.
        chosen = [replace(table, group=shard.groups[number]) for number, table in shard.tables.items()]
        numbers = {table.oid: table.group.number for table in chosen}
        by_shard.append(
            [
                LiveUnit(shard.number, shard.node, planned.ranges, numbers, shard.whole, bytes_per_second)
                for planned in plan_ranges(chosen, task_pages, shard.whole)
            ]
        )
    return [
        units[turn] for turn in range(max(map(len, by_shard), default=0)) for units in by_shard if turn < len(units)
    ]


def read_unit(unit: LiveUnit) -> Iterator[pa.RecordBatch]:
    """Yield the unit's rows as ENTRY_SCHEMA; a problem is one row for each of its tables."""
    try:
        with take_snapshot(unit.node) as snapshot:
            reading = ImportedSnapshot(unit.node, snapshot.exported)
            read = RangeReader(reading, unit.whole, RateLimit(unit.bytes_per_second), unit.entries).read(unit.ranges)
    except SnapshotError as error:
        numbers = {unit.numbers[part.oid] for part in unit.ranges}
        yield from _problems(unit.shard, {number: report_of(error) for number in numbers})
        return
    yield from read.found
    for oid, filenode in read.filenodes.items():
        yield fact_batch(unit.shard, FILES, unit.numbers[oid], filenode or 0)
    damaged = {
        unit.numbers[bad.oid]: report_of(RefusedError(bad.text, details={"damaged": bad.is_damaged, "page": bad.low}))
        for bad in read.bad
    }
    yield from _problems(unit.shard, damaged)


def entry_batch(
    node: int, group: Any, partition: Any, identity: Hashes, entry: Hashes, live: Ints | None = None
) -> pa.RecordBatch:
    """Return rows of ENTRY_SCHEMA without problems: stored rows, or rows at the places `live` of a database."""
    count = len(identity)
    is_live = int(live is not None)
    columns: list[npt.NDArray[Any]] = [
        np.full(count, node, np.int32),
        np.asarray(group, np.int32),
        np.asarray(partition, np.int32),
        identity.view(np.int64),
        entry.view(np.int64),
        np.full(count, 1 - is_live, np.int32),
        np.full(count, is_live, np.int32),
        np.full(count, NO_PLACE, np.int64) if live is None else live,
    ]
    arrays = [to_arrow(column) for column in columns]
    return pa.record_batch([*arrays, pa.nulls(count, pa.binary())], schema=ENTRY_SCHEMA)


def merged(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Count equal rows of tables without a key: a table may consist of a billion equal lines, which go to one task.

    Of rows in a database, the places of the first PLACES_MAX are kept; the last of these rows counts the rest as well.
    """
    if not len(batch):
        return batch
    values = {name: to_numpy(batch.column(name)).astype(np.int64) for name in ("group", "identity", "entry")}
    order = np.lexsort((values["entry"], values["identity"], values["group"]))
    starts = _starts({name: column[order] for name, column in values.items()}, ("group", "identity", "entry"))
    sizes = np.diff(np.append(starts, len(order)))
    has_places = bool(to_numpy(batch.column("live")).any())
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    kept = np.flatnonzero(rank < (PLACES_MAX if has_places else 1))
    columns = pa.Table.from_batches([batch]).take(pa.array(order[kept]))
    for name in ("stored", "live"):
        # A row that is kept counts the rows up to the next one.
        summed = np.add.reduceat(to_numpy(batch.column(name))[order], kept)
        at = columns.schema.get_field_index(name)
        columns = columns.set_column(at, ENTRY_SCHEMA.field(name), to_arrow(summed.astype(np.int32)))
    return columns.combine_chunks().to_batches()[0]


def fact_batch(node: int, kind: int, number: int, identity: int = 0, problem: ErrorReport | None = None) -> Any:
    """Return one row of ENTRY_SCHEMA about the table `number`; `kind` is FILES or FAILURES."""
    value = np.array([identity], np.int64).view(np.uint64)
    columns = entry_batch(node, [kind], [number], value, value).columns
    report = None if problem is None else json.dumps(problem).encode()
    return pa.record_batch([*columns[:-1], pa.array([report], pa.binary())], schema=ENTRY_SCHEMA)


def _problems(node: int, reports: Mapping[int, ErrorReport]) -> Iterator[pa.RecordBatch]:
    for number, report in reports.items():
        yield fact_batch(node, FAILURES, number, problem=report)


def stored_entries(
    session: SparkSession,
    sources: Sources,
    chosen: Mapping[int, frozenset[int]],
    store: StoreLocation,
    buckets: RowBuckets,
) -> tuple[DataFrame, Fold]:
    """Return the rows at the cut in `buckets`, and the fold, which the caller must release after the job.

    `sources` are those of the groups in `chosen`, by node number; their objects may contain rows of other groups.
    Raises CutComparisonError if an object can't be read; objects that can't be read later are rows in FAILURES.
    """
    folded = fold(session, sources, store, hashed=True)
    try:
        if folded.problems:
            raise CutComparisonError(folded.problems[0]["message"])
        sent = broadcast(session, (folded.changed, dict(chosen)))
        multisets = sources.multisets

        def read(_: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
            changed, chosen = sent.value
            number = base.source.number
            return buckets.fill(base_entries(store.open(), base, changed.get(number, {}), chosen[number]))

        entries = read_bases(session, sources.bases, chosen, read, BUCKETS_DDL)
        if folded.local is not None:
            numbers = to_numpy(folded.local["node"])
            batches = [
                stored_batch(folded.local.filter(to_mask(numbers == number)), number, multisets)
                for number in np.unique(numbers).tolist()
            ]
            filled = pa.Table.from_batches(buckets.fill(batches), BUCKETS_SCHEMA)
            entries = entries.unionByName(local_frame(session, filled))
        if folded.images is not None:
            entries = entries.unionByName(map_batches(_of_images(folded.images, multisets), buckets.fill, BUCKETS_DDL))
        if folded.long_images is not None:
            reader = broadcast(session, long_image_reader(sources, store))

            def read_long(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                return buckets.fill(long_entries(batches, reader.value, multisets))

            divided = order_by_place(folded.long_images, lambda rows, by: rows.repartition(cores_of(session).now, by))
            entries = entries.unionByName(map_batches(divided, read_long, BUCKETS_DDL))
    except BaseException:
        folded.release()
        raise
    return entries, folded


def base_entries(
    store: ObjectStore, base: BaseSource, changed: Mapping[int, Keys], chosen: frozenset[int]
) -> Iterator[pa.RecordBatch]:
    """Yield the base rows of an object that are part of the state and of the `chosen` groups, as ENTRY_SCHEMA."""
    try:
        for table in read_at_cut(store, base, BASE_SCHEMA):
            for batch in table.to_batches():
                is_valid = find_valid_rows(batch, base, changed, xxhash64(from_arrow(batch.column("key"))))
                is_valid &= np.isin(to_numpy(batch.column("group")), list(chosen))
                valid = pa.Table.from_batches([batch]).filter(to_mask(is_valid))
                yield stored_batch(valid, base.source.number, base.multisets)
    except SnapshotError as error:
        yield from _problems(base.source.number, {PROBLEM: report_of(error)})


def stored_batch(rows: pa.Table, node: int, multisets: Collection[int]) -> pa.RecordBatch:
    """Return stored rows (with group, partition, key and row) of a node as ENTRY_SCHEMA."""
    group, lines = to_numpy(rows["group"]), column_of(rows["row"])
    keys = xxhash64(column_of(rows["key"]))
    is_multiset = np.isin(group, list(multisets))
    identity = np.where(is_multiset, xxhash64(lines), keys)
    batch = entry_batch(node, group, to_numpy(rows["partition"]), identity, xxhash64(lines, keys))
    return merged(batch) if is_multiset.any() else batch


def long_entries(
    batches: Iterable[pa.RecordBatch], reader: LongImageReader, multisets: Collection[int]
) -> Iterator[pa.RecordBatch]:
    """Yield folded rows that are read from the store again, as ENTRY_SCHEMA."""
    for batch in reader.read_images(batches):
        rows = pa.Table.from_batches([batch])
        group, nodes = to_numpy(rows["group"]), to_numpy(rows["node"])
        for row in rows.filter(to_mask(group == PROBLEM))["row"].to_pylist():  # at most one object, or a few rows
            yield from _problems(0, {PROBLEM: problem_of(row) or _incomplete()})
        for node in np.unique(nodes[group != PROBLEM]).tolist():
            of_node = rows.filter(to_mask((nodes == node) & (group != PROBLEM)))
            yield stored_batch(of_node, node, multisets)


def _incomplete() -> ErrorReport:
    return report_of(CutComparisonError("earlier images of changed rows are missing from the snapshot"))


def _of_images(images: DataFrame, multisets: Collection[int]) -> DataFrame:
    """Return folded rows as ENTRY_SCHEMA. Spark's xxhash64 returns the hashes that tasks compute."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    is_problem = F.col("group") == PROBLEM
    is_multiset = F.col("group").isin(list(multisets))
    hashed = F.xxhash64("key", "row")
    entry = F.coalesce(F.col(ENTRY), hashed) if ENTRY in images.columns else hashed
    failed = json.dumps(_incomplete()).encode()
    report = F.when(F.col("row").startswith(F.lit(b"{")), F.col("row")).otherwise(F.lit(failed))
    return images.select(
        "node",
        F.when(is_problem, F.lit(FAILURES)).otherwise(F.col("group")).cast("int").alias("group"),
        F.when(is_problem, F.lit(PROBLEM)).otherwise(F.col("partition")).cast("int").alias("partition"),
        F.when(is_multiset, F.xxhash64("row")).otherwise(F.xxhash64("key")).alias("identity"),
        entry.alias("entry"),
        F.lit(1).alias("stored"),
        F.lit(0).alias("live"),
        F.lit(NO_PLACE).cast("bigint").alias("place"),
        F.when(is_problem, report).alias("problem"),
    )


def entry_buckets(session: SparkSession, rows: int) -> RowBuckets:
    """Return the buckets for about this many rows: rows with the same identity go to the same task."""
    partitions = int(session.conf.get("spark.sql.shuffle.partitions") or 1)
    return RowBuckets(ENTRY_SCHEMA, "identity", max(partitions, -(-rows // ROWS_PER_TASK)))


def compare_entries(entries: DataFrame, buckets: RowBuckets) -> pa.Table:
    """Compare the rows with the same identity, which are in `buckets`; return SUMMARY_SCHEMA.

    `left` counts the versions that only the cut has, and `more` those that only the database has.
    """
    summary = Summary(max(DIFFERING_MAX // buckets.count, 1))
    found: pa.Table = map_batches(buckets.shuffled(entries), summary.of_buckets, SUMMARY_DDL).toArrow()
    return found


class Summary(Struct, frozen=True):
    """Compares the rows of a Spark task: reduces them to those that differ, at most `rows_max`, and totals."""

    rows_max: int

    def of_buckets(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Do the same as `of` for rows in buckets."""
        return self.of(read_buckets(batches))

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that differ and the rows about tables, then the totals; see SUMMARY_SCHEMA."""
        entries = pa.Table.from_batches(batches, ENTRY_SCHEMA)
        is_row = to_numpy(entries["group"]) > NO_GROUP
        facts = entries.filter(to_mask(~is_row)).select(["node", "group", "partition", "identity", "problem"])
        yield from _as_summary(facts).to_batches()
        rows = compared_rows(entries.filter(to_mask(is_row)))
        del entries
        for table, amount in equal_by_table(rows).items():
            yield _total(table, TOTALS, amount)
        different = rows.filter(to_mask(to_numpy(rows["left"]) + to_numpy(rows["more"]) > 0))
        for table in equal_by_table(different.slice(self.rows_max)):
            yield _total(table, OVERFLOW, 0)
        yield from different.slice(0, self.rows_max).to_batches()


def compared_rows(entries: pa.Table) -> pa.Table:
    """Compare rows of ENTRY_SCHEMA; return SUMMARY_SCHEMA, with one row for each identity."""
    names = ("node", "group", "partition", "identity", "entry", "stored", "live", "place")
    values = {name: to_numpy(entries[name]).astype(np.int64) for name in names}
    order = np.lexsort((values["entry"], values["identity"], values["group"], values["node"]))
    values = {name: column[order] for name, column in values.items()}
    # The versions of each entry, then the entries of each row.
    of_entry = _starts(values, ("node", "group", "identity", "entry"))
    if not len(of_entry):
        return SUMMARY_SCHEMA.empty_table()
    counts = {name: np.add.reduceat(values[name], of_entry) for name in ("stored", "live")}
    left = np.maximum(counts["stored"] - counts["live"], 0)
    more = np.maximum(counts["live"] - counts["stored"], 0)
    heads = {name: values[name][of_entry] for name in ("node", "group", "partition", "identity")}
    of_row = _starts(heads, ("node", "group", "identity"))
    columns = {name: column[of_row] for name, column in heads.items()}
    equal = np.minimum(counts["stored"], counts["live"])
    for name, amounts in (("equal", equal), ("left", left), ("more", more)):
        columns[name] = np.add.reduceat(amounts, of_row)
    found = pa.table({name: to_arrow(column) for name, column in columns.items()})
    return _as_summary(_with_places(found, values, of_entry, more, of_row))


def _with_places(rows: pa.Table, values: Mapping[str, Ints], of_entry: Ints, more: Ints, of_row: Ints) -> pa.Table:
    """Add up to `more` places of each entry that the database has more often; `values` are in order."""
    if not more.any():
        return rows
    sizes = np.diff(np.append(of_entry, len(values["place"])))
    has_place = (np.repeat(more, sizes) > 0) & (values["place"] != NO_PLACE)
    counted = np.cumsum(has_place)
    rank = counted - np.repeat(counted[of_entry] - has_place[of_entry], sizes) - 1
    chosen = np.flatnonzero(has_place & (rank < np.minimum(np.repeat(more, sizes), PLACES_MAX)))
    # Where each row's places end among those that are chosen.
    ends = np.append(of_entry[of_row[1:]], len(values["place"]))
    offsets = np.append(0, np.searchsorted(chosen, ends)).astype(np.int32)
    for name, column in (("places", "place"), ("entries", "entry")):
        lists = pa.ListArray.from_arrays(to_arrow(offsets), to_arrow(values[column][chosen]))
        rows = rows.append_column(name, lists)
    return rows


def _starts(columns: Mapping[str, Ints], names: Sequence[str]) -> Ints:
    """Return where each run of rows begins that are equal in these columns."""
    count = len(columns[names[0]])
    begins = np.zeros(count, np.bool_)
    begins[:1] = True
    for name in names:
        begins[1:] |= columns[name][1:] != columns[name][:-1]
    return np.flatnonzero(begins)


def _as_summary(rows: pa.Table) -> pa.Table:
    """Return the rows in SUMMARY_SCHEMA; amounts that they lack are 0, and places and problems None."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        if field.name in ("places", "entries", "problem")
        else to_arrow(np.zeros(len(rows), np.int64))
        for field in SUMMARY_SCHEMA
    ]
    return pa.Table.from_arrays(columns, schema=SUMMARY_SCHEMA)


def equal_by_table(rows: pa.Table) -> dict[tuple[int, int], int]:
    """Sum the equal rows by node and group."""
    summed = rows.group_by(["node", "group"]).aggregate([("equal", "sum")]).to_pylist()
    return {(row["node"], row["group"]): row["equal_sum"] for row in summed}


def _total(table: tuple[int, int], kind: int, amount: int) -> pa.RecordBatch:
    zeros = dict.fromkeys(SUMMARY_SCHEMA.names, 0) | dict.fromkeys(("places", "entries", "problem"))
    values = {"node": table[0], "group": kind, "partition": table[1], "equal": amount}
    return pa.RecordBatch.from_pylist([zeros | values], SUMMARY_SCHEMA)


def live_entries(
    session: SparkSession,
    shards: Sequence[CutShard],
    units: Sequence[LiveUnit],
    lanes: Mapping[int, int],
    buckets: RowBuckets,
) -> DataFrame:
    """Return the rows of the running databases in `buckets`; `lanes` is how many tasks may read from each shard."""
    dealt = [
        [unit for unit in units if unit.shard == shard.number][lane :: lanes[shard.number]]
        for shard in shards
        for lane in range(lanes[shard.number])
    ]
    listed = broadcast(session, dealt)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for lane in batch.column(0).to_pylist():
                yield from buckets.fill(row for unit in listed.value[lane] for row in read_unit(unit))

    return map_batches(session.range(0, len(dealt), 1, max(len(dealt), 1)), read, BUCKETS_DDL)
