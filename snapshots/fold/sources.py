"""The objects that a fold reads. Their metadata is compared with the commit before any rows are read.

A file of a few kilobytes can declare millions of rows. Its footer contains the number of rows, the row groups and their
expanded sizes; the metadata of a segment identifies the segment.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate, groupby
from threading import Lock
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import Struct
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.record import from_json
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.dead_rows import read_dead_rows
from cutline.snapshots.fold.schema_at_cut import SchemaMapping, mapping_to_cut, to_schema_at_cut
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DeadRows, LostList, ObjectList, StoredObject, listed_objects
from cutline.storage.errors import ErrorReport, SnapshotError, report_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment, SegmentMetadata
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.segments import (
    METADATA_KEY,
    ROW_CHANGES,
    SEGMENT_SCHEMA,
    TRUNCATE,
    are_of,
    check_rows,
    expand_global_ids,
    in_schema,
    open_parquet,
    reading_parquet,
)

# The fields that a segment's metadata and its entry in a commit share.
DECLARED = ("node", "operation", "after", "through", "open", "changes", "events", "partials", "truncates")


def check_footer(footer: Any, schema: pa.Schema, rows: int) -> None:
    """Raise ValueError unless the object has the columns of `schema` and this number of rows."""
    if footer.schema.to_arrow_schema().names != schema.names:
        raise ValueError(f"it has columns {', '.join(footer.schema.names)[:200]} instead of {', '.join(schema.names)}")
    if footer.num_rows != rows:
        raise ValueError(f"it declares {footer.num_rows} rows instead of {rows}")
    if sum(footer.row_group(number).num_rows for number in range(footer.num_row_groups)) != rows:
        raise ValueError("its row groups declare a different number of rows than its footer")


def check_segment(footer: Any, segment: Segment) -> None:
    """Raise ValueError unless the object's metadata agrees with the commit's entry for the segment."""
    body = (footer.metadata or {}).get(METADATA_KEY, b"")
    try:
        declared: SegmentMetadata = from_json(body, SegmentMetadata)
    except msgspec.DecodeError as error:
        raise ValueError(f"its metadata is damaged: {error}") from error
    for name in DECLARED:
        given, expected = getattr(declared, name), getattr(segment, name)
        if given != expected:
            raise ValueError(f"{name} is {given} in its metadata, but {expected} in its commit")


def counting_groups(tables: Iterator[pa.Table], rows: Mapping[int, int]) -> Iterator[pa.Table]:
    """Yield the tables; at the end, raise ValueError unless their row counts by group number were `rows`."""
    counted: dict[int, int] = {}
    for table in tables:
        groups, counts = np.unique(to_numpy(table["group"]), return_counts=True)
        for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
            counted[group] = counted.get(group, 0) + count
        yield table
    if counted != {group: count for group, count in rows.items() if count}:
        raise ValueError(f"it contains rows {counted} instead of {dict(rows)}")


# A row group above this size contains a large row, and a process expands only one such row group at a time.
LARGE_BYTES = 64 << 20
_expanding = Lock()
# The group of rows that report a task's errors: an exception raised in an executor would lose its class.
PROBLEM = -1


class Source(Struct, frozen=True):
    """An object of one node's copy, with size and digest from its commit. `number` is the node's number in the job.

    `rows` (of a base object, by group number, without those that are `dead`) and `segment` describe its content
    according to the commit. If a description is None, the content is not compared with it.
    """

    key: str
    node: str
    number: int
    size: int
    digest: str
    rows: Mapping[int, int] | None = None
    segment: Segment | None = None
    dead: DeadRows | None = None


class OpenedObject(Struct, frozen=True):
    """An object whose bytes and footer agree with its commit; `dead` are the numbers of its dead rows, ascending."""

    file: pq.ParquetFile
    dead: Ints | None = None

    @property
    def metadata(self) -> Any:
        """The footer."""
        return self.file.metadata

    @property
    def num_row_groups(self) -> int:
        """The number of row groups."""
        return int(self.file.num_row_groups)

    def living(self, number: int) -> tuple[int, Flags]:
        """Return the number of the first row of a row group, and flags marking those of its rows that are not dead."""
        first = sum(self.metadata.row_group(earlier).num_rows for earlier in range(number))
        count = self.metadata.row_group(number).num_rows
        flags = np.ones(count, np.bool_)
        if self.dead is not None:
            low, high = np.searchsorted(self.dead, [first, first + count])
            flags[self.dead[low:high] - first] = False
        return first, flags


class BaseSource(Struct, frozen=True):
    """An object of a base copy; `rows` counts its rows by the group numbers under which they are stored.

    `truncated` holds the groups that were truncated after the copy; `multisets` holds the shard's groups without a key.
    `mapping` is None if the rows need no conversion.
    """

    source: Source
    rows: Mapping[int, int]
    truncated: frozenset[int] = frozenset()
    multisets: frozenset[int] = frozenset()
    mapping: SchemaMapping | None = None

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups that have rows in the object."""
        if self.mapping is None:
            return frozenset(self.rows)
        numbers = (self.mapping.number_of(number) for number in self.rows)
        return frozenset(number for number in numbers if number is not None)


class SegmentSource(Struct, frozen=True):
    """A segment, and the rules for selecting the changes that belong to the state.

    The changes before `position` belong to the state, except those made by the transactions at `excluded`. For a group
    in `truncated`, only changes after that (lsn, seq) count. `groups` holds the groups to fold; None means all. Both
    fields use the groups' numbers at the cut.
    """

    source: Source
    segment: Segment
    position: Lsn
    excluded: frozenset[Lsn]
    truncated: Mapping[int, tuple[int, int]]
    mapping: SchemaMapping | None = None
    groups: frozenset[int] | None = None

    @property
    def may_count(self) -> bool:
        """Whether changes in the segment may belong to the state."""
        if self.mapping is None:
            return self.segment.may_count(ORIGIN, self.position, ())
        earlier = self.mapping.pending - self.excluded
        return self.segment.may_count(self.mapping.counted_from, self.position, earlier)


# Small segments of a node are read together if they follow each other: numpy and Arrow take as long for the rows of one
# of them as for those of a hundred. The limits are those of such a run, as commits describe it; no more than
# RUN_BYTES_MAX are in memory, as its files declare.
RUN_SEGMENTS_MAX, RUN_ROWS_MAX, RUN_STORED_BYTES_MAX, RUN_BYTES_MAX = 64, 1 << 14, 1 << 20, 16 << 20
Item = TypeVar("Item")


def runs_of(
    items: Sequence[Item], segment_of: Callable[[Item], Segment], shared_by: Callable[[Item], object], runs_min: int
) -> Iterator[tuple[Item, ...]]:
    """Divide items, each about a segment, into runs of small segments without changing their order.

    The items of a run have the same value of `shared_by`. A segment that is not small, or that ends inside a
    transaction, is a run by itself. If there are enough items, there are at least `runs_min` runs.
    """
    run: list[Item] = []
    rows = size = 0
    most = min(RUN_SEGMENTS_MAX, max(len(items) // runs_min, 1))
    for item in items:
        segment = segment_of(item)
        rows, size = rows + segment.changes + segment.events, size + segment.size
        is_large = rows > RUN_ROWS_MAX or size > RUN_STORED_BYTES_MAX or len(run) == most
        if run and (is_large or segment_of(run[-1]).open or segment.open or shared_by(item) != shared_by(run[0])):
            yield tuple(run)
            run, rows, size = [], segment.changes + segment.events, segment.size
        run.append(item)
    if run:
        yield tuple(run)


def are_small(files: Iterable[OpenedObject]) -> bool:
    """Whether the files of a run declare so little that all of it may be in memory."""
    groups = (file.metadata.row_group(number) for file in files for number in range(file.num_row_groups))
    size: int = sum(group.total_byte_size for group in groups)
    return size <= RUN_BYTES_MAX


def read_tables(store: ObjectStore, source: Source, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read the rows in an object, a row group at a time, after verifying it against its commit.

    Raises ObjectDamagedError, also during the iteration.
    """
    return read_opened(open_object(store, source), source, schema)


def read_opened(file: OpenedObject, source: Source, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read the rows of an object from `open_object`, as `read_tables` does."""
    tables = (read_row_group(file, number, source, schema) for number in range(file.num_row_groups))
    if source.segment is not None:
        return _checked(tables, source)
    return tables if source.rows is None else _counted(tables, source, source.rows)


def _checked(tables: Iterator[pa.Table], source: Source) -> Iterator[pa.Table]:
    for table in tables:
        try:
            check_rows(table)
        except ValueError as error:
            raise _rows_differ(source, error) from error
        yield table


def _counted(tables: Iterator[pa.Table], source: Source, rows: Mapping[int, int]) -> Iterator[pa.Table]:
    try:
        yield from counting_groups(tables, rows)
    except ValueError as error:
        raise _rows_differ(source, error) from error


def _rows_differ(source: Source, error: ValueError) -> ObjectDamagedError:
    return ObjectDamagedError(key=source.key, kind="rows", node=source.node, detail=str(error))


def open_object(store: ObjectStore, source: Source) -> OpenedObject:
    """Open the object after verifying it and its footer against its commit; raise ObjectDamagedError."""
    opened = open_body(read_listed(store, source.node, source.key, (source.size, source.digest)), source)
    if source.dead is None:
        return opened
    return replace(opened, dead=read_dead_rows(store, source.node, source.dead, opened.metadata.num_rows))


def verify_object(store: ObjectStore, source: Source) -> None:
    """Compare the bytes of the object, and of the object with its dead rows, with the commit.

    Raises ObjectDamagedError.
    """
    for one in (source, source.dead):
        if one is not None:
            read_listed(store, source.node, one.key, (one.size, one.digest))


def open_body(body: bytes, source: Source) -> OpenedObject:
    """Open an object, given its verified content, after verifying its footer; raise ObjectDamagedError."""
    with reading_parquet(source.key, source.node):
        file = open_parquet(pa.BufferReader(body))
    try:
        if source.rows is not None:
            dead = source.dead.rows if source.dead else 0
            check_footer(file.metadata, BASE_SCHEMA, sum(source.rows.values()) + dead)
        if source.segment is not None:
            check_footer(file.metadata, SEGMENT_SCHEMA, source.segment.changes + source.segment.events)
            check_segment(file.metadata, source.segment)
    except ValueError as error:
        raise _rows_differ(source, error) from error
    return OpenedObject(file)


def declared_metadata(file: OpenedObject) -> SegmentMetadata:
    """Return the metadata in a segment from `open_object`."""
    declared: SegmentMetadata = from_json(file.metadata.metadata[METADATA_KEY], SegmentMetadata)
    return declared


def read_row_group(file: OpenedObject, number: int, source: Source, schema: pa.Schema) -> pa.Table:
    """Read the rows of one row group in an object from `open_object` that are not dead; raise ObjectDamagedError."""
    table = read_all_rows(file, number, source, schema)
    return table if file.dead is None else table.filter(to_mask(file.living(number)[1]))


def read_all_rows(file: OpenedObject, number: int, source: Source, schema: pa.Schema) -> pa.Table:
    """Read all rows of one row group in an object from `open_object`, also dead rows; raise ObjectDamagedError.

    Only a merge, which decides whether to carry the object, may use it.
    """
    # Expanding a row takes more than twice its size, and a driver's threads read at the same time.
    is_large = file.metadata.row_group(number).total_byte_size > LARGE_BYTES
    with reading_parquet(source.key, source.node), _expanding if is_large else nullcontext():
        return in_schema(expand_global_ids(file.file.read_row_group(number, use_threads=False)), schema)


def read_at_cut(store: ObjectStore, source: BaseSource | SegmentSource, schema: pa.Schema) -> Iterator[pa.Table]:
    """Read the object's rows, converted to the schema at the cut; raise the errors of `read_tables`."""
    tables = read_tables(store, source.source, schema)
    return (converted for table in tables for converted in converted_to_cut(table, source))


def converted_to_cut(table: pa.Table, source: BaseSource | SegmentSource) -> Iterator[pa.Table]:
    """Convert rows from an object to the schema at the cut; raise ObjectDamagedError if they don't match the commit."""
    try:
        yield from to_schema_at_cut(table, source.mapping)
    except ValueError as error:
        raise _rows_differ(source.source, error) from error


def problem_row(source: Source, error: SnapshotError, schema: pa.Schema) -> pa.RecordBatch:
    """Report an error as a row in the PROBLEM group: `key` is the object's, and `row` is the report."""
    report = {"node": source.number, "group": PROBLEM, "key": source.key.encode(), "row": json.dumps(report_of(error))}
    # The row is not a stand-in, so it has no place (snapshots.fold.long_lines).
    values = dict.fromkeys(schema.names, 0) | {"place": -1} | report
    return pa.RecordBatch.from_pylist([{name: values[name] for name in schema.names}], schema=schema)


def problem_of(row: bytes) -> ErrorReport | None:
    """Parse the report in a PROBLEM row; None if the row is a line (ending with a newline) or a stand-in."""
    return json.loads(row) if row.startswith(b"{") and not row.endswith(b"\n") else None


def filter_effective(table: pa.Table, source: SegmentSource) -> pa.Table:
    """Return those of a segment's changes that belong to the state, without TRUNCATEs."""
    op = numbers_of(table, "op")
    lsn = numbers_of(table, "lsn")
    filter_effective = are_of(op, ROW_CHANGES) & (lsn < source.position)
    if source.excluded:
        filter_effective &= ~np.isin(lsn, np.fromiter(source.excluded, np.int64))
    if source.groups is not None:
        filter_effective &= np.isin(numbers_of(table, "group"), list(source.groups))
    if source.truncated:
        group, seq = numbers_of(table, "group"), numbers_of(table, "seq")
        for number, (at_lsn, at_seq) in source.truncated.items():
            before = (lsn < at_lsn) | ((lsn == at_lsn) & (seq < at_seq))
            filter_effective &= ~((group == number) & before)
    return table if filter_effective.all() else table.filter(to_mask(filter_effective))


def numbers_of(table: pa.Table, column: str) -> npt.NDArray[Any]:
    """Return a column of numbers."""
    return to_numpy(table[column])


def as_problems(rows: pa.Table, are_problems: Flags) -> pa.Table:
    """Put some rows in the PROBLEM group, and their group in `partition`."""
    if not are_problems.any():
        return rows
    mask, names = to_mask(are_problems), rows.column_names
    problem = pa.scalar(PROBLEM, pa.int32())
    partition, group = (
        pc.if_else(mask, rows["group"], rows["partition"]),
        pc.if_else(mask, problem, rows["group"]),
    )
    return rows.set_column(names.index("partition"), "partition", partition).set_column(
        names.index("group"), "group", group
    )


# The size of the lists expanded at the same time: 16 lists of 10,000 objects with rows from one table, which then take
# 100 MB.
EXPANDED_BYTES_MAX = 48 << 20


class BaseForm(Struct, frozen=True):
    """The common properties of a node's base sources (see BaseSource). `mapping` is None if no row needs conversion."""

    node: str
    number: int
    truncated: frozenset[int]
    multisets: frozenset[int]
    mapping: SchemaMapping | None
    chosen: frozenset[int] | None = None

    def source(self, one: StoredObject) -> BaseSource:
        """Return the source for an object."""
        source = Source(one.key, self.node, self.number, one.size, one.digest, one.rows, dead=one.dead)
        mapping = self.mapping.restrict_to(one.rows) if self.mapping else None
        return BaseSource(source, one.rows, self.truncated, self.multisets, mapping)

    def groups_of(self, rows: Iterable[int]) -> frozenset[int]:
        """Convert numbers under which rows are stored to the groups' numbers at the cut."""
        if self.mapping is None:
            return frozenset(rows)
        numbers = map(self.mapping.number_of, rows)
        return frozenset(number for number in numbers if number is not None)

    def takes(self, rows: Iterable[int]) -> bool:
        """Whether rows stored under any of these numbers are wanted."""
        return self.chosen is None or not self.chosen.isdisjoint(self.groups_of(rows))

    def sources(self, objects: Iterable[StoredObject]) -> tuple[BaseSource, ...]:
        """Return the sources for the objects with wanted rows."""
        return tuple(self.source(stored_object) for stored_object in objects if self.takes(stored_object.rows))


class ListedBases(Struct, frozen=True):
    """The `count` sources in an object list that contain wanted rows."""

    form: BaseForm
    listed: ObjectList
    count: int

    @classmethod
    def of(cls, form: BaseForm, listed: ObjectList) -> ListedBases:
        """Create the sources for a list."""
        if isinstance(listed, LostList) or not form.takes(listed.rows):
            return cls(form, listed, 0)
        if all(form.takes([number]) for number in listed.rows):
            # All objects in the list have wanted rows, and the entry counts them.
            return cls(replace(form, chosen=None), listed, listed.objects)
        return cls(form, listed, sum(form.takes(listed_object.rows) for listed_object in listed_objects(listed)))

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups that have rows in the sources."""
        return self.form.groups_of(self.listed.rows)

    def read(self) -> tuple[BaseSource, ...]:
        """Return the sources."""
        return self.form.sources(listed_objects(self.listed))

    @property
    def list_bytes(self) -> int:
        """The size of the list that `read` expands."""
        return self.listed.size

    @property
    def size(self) -> int:
        """The total size of the objects in the list, in bytes."""
        return self.listed.bytes

    def __len__(self) -> int:
        return self.count


class HeldBases(Struct, frozen=True):
    """Sources that are held in memory. There are only a few, because commits list them directly."""

    held: tuple[BaseSource, ...]

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups that have rows in the sources."""
        return frozenset[int]().union(*(source.groups for source in self.held))

    def read(self) -> tuple[BaseSource, ...]:
        """Return the sources."""
        return self.held

    @property
    def list_bytes(self) -> int:
        """The size of the list that `read` expands: 0, as there is no list."""
        return 0

    @property
    def size(self) -> int:
        """The total size of the objects, in bytes."""
        return sum(source.source.size for source in self.held)

    def __len__(self) -> int:
        return len(self.held)


BasePart: TypeAlias = HeldBases | ListedBases


class NodeBases(Struct, frozen=True):
    """The base sources of a node, divided into parts; `number` is the node's number in the job."""

    number: int
    parts: tuple[BasePart, ...]

    @property
    def groups(self) -> frozenset[int]:
        """The numbers at the cut of the groups that have rows in the sources."""
        return frozenset[int]().union(*(part.groups for part in self.parts))

    def __iter__(self) -> Iterator[BaseSource]:
        for part in self.parts:
            yield from part.read()


# The dictionary is for cached properties.
class BaseSources(Struct, frozen=True, dict=True):
    """The base sources of all nodes in a job, numbered from 0."""

    nodes: tuple[NodeBases, ...] = ()

    @classmethod
    def of(cls, sources: Iterable[BaseSource]) -> BaseSources:
        """Hold `sources` in memory; a node's sources must be adjacent."""
        by_node = groupby(sources, lambda one: one.source.number)
        return cls(tuple(NodeBases(number, (HeldBases(tuple(some)),)) for number, some in by_node))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[BaseSource]:
        for part in self._parts:
            yield from part.read()

    def interleaved(self) -> Iterator[BaseSource]:
        """Yield the sources, alternating between as many nodes (at least 1) as EXPANDED_BYTES_MAX allows for lists."""
        waiting = deque((max(part.list_bytes for part in node.parts), iter(node)) for node in self.nodes if node.parts)
        begun, expanded = deque[tuple[int, Iterator[BaseSource]]](), 0
        while begun or waiting:
            while waiting and (not begun or expanded + waiting[0][0] <= EXPANDED_BYTES_MAX):
                begun.append(waiting.popleft())
                expanded += begun[-1][0]
            size, sources = begun.popleft()
            if (found := next(sources, None)) is not None:
                begun.append((size, sources))
                yield found
            else:
                expanded -= size

    def __getitem__(self, number: int) -> BaseSource:
        """Return the source with this number. To read several sources, use a BaseCursor."""
        first, part = self.part_with(number)
        return part[number - first]

    def part_with(self, number: int) -> tuple[int, tuple[BaseSource, ...]]:
        """Find the part that contains source `number`; return its first source's number, and the part itself."""
        at = bisect_right(self._ends, number)
        return self._ends[at] - len(self._parts[at]), self._parts[at].read()

    def groups_of(self, number: int) -> frozenset[int]:
        """Return the numbers at the cut of the groups with rows in a node's base sources."""
        return frozenset[int]().union(*(node.groups for node in self.nodes if node.number == number))

    def without(self, numbers: Collection[int]) -> BaseSources:
        """Return the sources of all nodes except `numbers`."""
        return BaseSources(tuple(node for node in self.nodes if node.number not in numbers))

    def numbers_with(self, groups: Mapping[int, frozenset[int]]) -> Ints:
        """Return the numbers of the sources with rows of `groups` (by node number)."""
        numbers, first = [np.zeros(0, np.int64)], 0
        for node in self.nodes:
            wanted = groups.get(node.number, frozenset())
            for part in node.parts:
                if not wanted.isdisjoint(part.groups):
                    # If all groups in a part are wanted, there is no need to read its list.
                    is_whole = wanted.issuperset(part.groups)
                    has_rows = is_whole or [not wanted.isdisjoint(source.groups) for source in part.read()]
                    numbers.append(first + np.flatnonzero(np.broadcast_to(has_rows, len(part))))
                first += len(part)
        return np.concatenate(numbers)

    def with_rows_of(self, groups: Mapping[int, frozenset[int]]) -> Iterator[BaseSource]:
        """Yield the sources with rows of `groups` (by node number); expand one list at a time."""
        for node in self.nodes:
            wanted = groups.get(node.number, frozenset())
            for part in node.parts:
                if not wanted.isdisjoint(part.groups):
                    yield from (source for source in part.read() if not wanted.isdisjoint(source.groups))

    @cached_property
    def _parts(self) -> tuple[BasePart, ...]:
        return tuple(part for node in self.nodes for part in node.parts if len(part))

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(map(len, self._parts)))


class BaseCursor:
    """Finds sources by number. Ascending numbers are fastest, because the part read last is kept."""

    def __init__(self, bases: BaseSources) -> None:
        self._bases = bases
        self._first, self._part = 0, tuple[BaseSource, ...]()

    def source(self, number: int) -> BaseSource:
        """Return the source with this number; raise IndexError."""
        if not self._first <= number < self._first + len(self._part):
            self._first, self._part = self._bases.part_with(number)
        return self._part[number - self._first]


class Sources(Struct, frozen=True):
    """All objects that are read to fold some nodes' copies.

    A node's number is its index in `nodes`. `column_counts` is keyed by node number and group.
    """

    nodes: tuple[str, ...]
    bases: BaseSources
    segments: tuple[SegmentSource, ...]
    multisets: frozenset[int]
    column_counts: Mapping[tuple[int, int], int]

    @property
    def changes(self) -> int:
        """The number of changes in the segments, including those that do not belong to the state."""
        return sum(segment.segment.changes for segment in self.segments)

    @property
    def has_partials(self) -> bool:
        """Whether a segment contains partial images."""
        return any(segment.segment.partials for segment in self.segments)

    def without(self, nodes: Collection[str]) -> Sources:
        """Return the sources except those of `nodes`; the nodes' numbers stay the same."""
        segments = tuple(segment for segment in self.segments if segment.source.node not in nodes)
        numbers = {number for number, node in enumerate(self.nodes) if node in nodes}
        return replace(self, bases=self.bases.without(numbers), segments=segments)


def sources_of(
    chain: Chain,
    nodes: tuple[str, ...],
    store: ObjectStore,
    skip: Collection[str] = (),
    chosen: Mapping[str, frozenset[int]] = MappingProxyType({}),
) -> Sources:
    """Find the sources from which to fold the state of `nodes` at the chain's last commit.

    Nodes in `skip` keep their numbers but have no sources. `chosen` holds, by node, the wanted groups as numbers at the
    cut; all groups on other nodes are wanted. Reads only the segments that contain a TRUNCATE.
    """
    bases: list[NodeBases] = []
    segments: list[SegmentSource] = []
    multisets = frozenset(number for node in nodes for number in multiset_numbers_of(chain, node))
    for number, node in enumerate(nodes):
        groups = chosen.get(node)
        if node in skip or (groups is not None and not groups):
            continue
        needed = effective_sources(store, segment_sources(chain, number, node))
        segments += [replace(source, groups=groups) for source in needed]
        bases.append(node_bases(chain, number, node, truncated_groups(needed), groups))
    counts = {
        (number, group.number): len(group.columns) for number, node in enumerate(nodes) for group in chain.groups(node)
    }
    return Sources(nodes, BaseSources(tuple(bases)), tuple(segments), multisets, counts)


def effective_sources(store: ObjectStore, sources: Iterable[SegmentSource]) -> list[SegmentSource]:
    """Return the sources with changes that may belong to the state, with the last TRUNCATEs among all of them.

    Reads only the segments that contain a TRUNCATE; raises ObjectDamagedError.
    """
    needed = [source for source in sources if source.may_count]
    truncated = truncations(store, needed)
    return [replace(source, truncated=truncated) for source in needed]


def truncated_groups(sources: Iterable[SegmentSource]) -> frozenset[int]:
    """Return the groups that were truncated according to the sources, as numbers at the cut."""
    return frozenset(number for source in sources for number in source.truncated)


def segment_sources(chain: Chain, number: int, node: str, among: Collection[str] = ()) -> list[SegmentSource]:
    """Return all segments in the node's archive, ignoring TRUNCATEs; for `among` see `mapping_to_cut`."""
    position, excluded = chain.position(node), chain.excluded(node)
    mapping = mapping_to_cut(chain, node, among)
    return [
        SegmentSource(
            Source(segment.key, node, number, segment.size, segment.digest, segment=segment),
            segment,
            position,
            excluded,
            {},
            mapping,
        )
        for segment in chain.segments(node)
    ]


def multiset_numbers_of(chain: Chain, node: str) -> frozenset[int]:
    """Return the numbers of all definitions of the node's groups without a key."""
    return frozenset(number for number, group in chain.definitions(node).items() if group.is_multiset)


def node_bases(
    chain: Chain,
    number: int,
    node: str,
    truncated: frozenset[int] = frozenset(),
    chosen: frozenset[int] | None = None,
    after: int | None = None,
) -> NodeBases:
    """Return the objects of the node's base copies, including objects whose rows no longer count.

    With `chosen`, returns only objects with rows of these groups (numbers at the cut); with `after`, only those of
    later increments.
    """
    mapping, entries = mapping_to_cut(chain, node), chain.base_entries(node, after)
    # Most chains have no ended definitions, so their base rows need no conversion.
    is_unchanged = len(mapping.unchanged) == len(chain.definitions(node))
    multisets = multiset_numbers_of(chain, node)
    form = BaseForm(node, number, truncated, multisets, None if is_unchanged else mapping, chosen)
    own = HeldBases(form.sources(entry for entry in entries if isinstance(entry, StoredObject)))
    parts: list[BasePart] = [own, *(ListedBases.of(form, entry) for entry in entries if isinstance(entry, ObjectList))]
    return NodeBases(number, tuple(part for part in parts if len(part)))


def truncations(store: ObjectStore, segments: list[SegmentSource]) -> dict[int, tuple[int, int]]:
    """Find the last TRUNCATE of every truncated group, as (lsn, seq)."""
    last: dict[int, tuple[int, int]] = {}
    for segment in segments:
        if not segment.segment.truncates:
            continue
        for table in read_at_cut(store, segment, SEGMENT_SCHEMA):
            truncates = table.filter(to_mask(numbers_of(table, "op") == TRUNCATE)).select(["lsn", "seq", "group"])
            for row in truncates.to_pylist():  # bounded by the number of TRUNCATE commands
                if row["lsn"] < segment.position and row["lsn"] not in segment.excluded:
                    last[row["group"]] = max(last.get(row["group"], (0, 0)), (row["lsn"], row["seq"]))
    return last
