"""The lines of some rows in a chain's state, to be shown, and to be written into a repair script.

The state is folded as for a restore, so values that an UPDATE left out are filled in, and a row that is not in the
result is not at the cut. If something that the state depends on can't be read, nothing is known about any row: another
object may have an earlier image of it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct

from cutline.check.live.pages import SHOWN_BYTES, shown
from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import Ints, column_of, xxhash64
from cutline.fleet.progress import Progress
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold.changed_keys import find_valid_rows, read_bases
from cutline.snapshots.fold.fold import Fold, fold, long_image_reader, map_images
from cutline.snapshots.fold.long_lines import order_by_place
from cutline.snapshots.fold.sources import PROBLEM, BaseSource, Sources, problem_of, read_at_cut, sources_of
from cutline.snapshots.records.chain import Chain
from cutline.spark.sent_values import broadcast
from cutline.spark.spark_jobs import cores_of, job_progress
from cutline.storage.errors import NOT_OF_THE_OBJECT, ErrorReport, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# The driver holds HELD_BYTES_MAX of all lines, but at most LINE_BYTES_MAX of each, and at least the part that is shown.
LINE_BYTES_MIN, LINE_BYTES_MAX, HELD_BYTES_MAX = SHOWN_BYTES + 1, 64 << 10, 128 << 20
# Up to this many rows, long lines of other rows are not read.
FILTERED_ROWS_MAX = 2000
INCOMPLETE = "earlier images of the row are missing from the snapshot"
# The rows that are wanted, by group and identity. Rows in the PROBLEM group say in `problem` what could not be read.
LINES_SCHEMA = pa.schema(
    [
        ("group", pa.int32()), ("identity", pa.int64()), ("key", pa.binary()), ("row", pa.binary()),
        ("is_cut", pa.bool_()), ("problem", pa.binary()),
    ]
)  # fmt: skip
LINES_DDL = "`group` int, identity bigint, key binary, row binary, is_cut boolean, problem binary"
IMAGE_COLUMNS = ("group", "partition", "key", "row")


class RowAtCut(NamedTuple):
    """Identifies a row of a chain's state; `partition` is that of its identity."""

    node: str
    group: int
    partition: int
    identity: int


class LineAtCut(Struct, frozen=True):
    """The key and the line of a row in a chain's state. `is_cut`: only the beginning of the line is known.

    If nothing is known of the row, not even whether it is there, `unknown` is the reason.
    """

    key: bytes
    line: bytes
    is_cut: bool
    unknown: str = ""

    @property
    def text(self) -> str:
        """The line for people to read."""
        return shown(self.line)


class WantedLines(Struct, frozen=True):
    """The rows that a task looks for, as arrays that belong together, and how much of a line it returns."""

    groups: Ints
    identities: Ints
    multisets: frozenset[int]
    line_bytes: int

    def pick(self, rows: pa.Table) -> pa.Table:
        """Return the wanted rows (of IMAGE_COLUMNS) as LINES_SCHEMA, each once; and rows about problems."""
        group = to_numpy(rows["group"])
        is_chosen = np.isin(group, np.append(self.groups, PROBLEM))
        rows, group = rows.filter(to_mask(is_chosen)), group[is_chosen]
        lines = column_of(rows["row"])
        keys = xxhash64(column_of(rows["key"]))
        is_multiset = np.isin(group, list(self.multisets))
        hashes = np.where(is_multiset, xxhash64(lines), keys) if is_multiset.any() else keys
        identity = hashes.view(np.int64)
        found = [_problems_of(rows.filter(to_mask(group == PROBLEM)))]
        for number in np.unique(self.groups).tolist():
            of_group = np.flatnonzero((group == number) & np.isin(identity, self.identities[self.groups == number]))
            # A line without a key may occur a billion times.
            _, first = np.unique(identity[of_group], return_index=True)
            chosen = of_group[first]
            if len(chosen):
                found.append(self._as_lines(number, identity[chosen], rows.take(pa.array(chosen))))
        return pa.concat_tables(found)

    def _as_lines(self, number: int, identity: Ints, rows: pa.Table) -> pa.Table:
        count = len(rows)
        is_cut = pc.greater(pc.binary_length(rows["row"]), self.line_bytes)
        columns = [
            to_arrow(np.full(count, number, np.int32)),
            to_arrow(identity),
            rows["key"].cast(pa.binary()),
            pc.binary_slice(rows["row"].cast(pa.binary()), 0, self.line_bytes),
            is_cut,
            pa.nulls(count, pa.binary()),
        ]
        return pa.table(columns, schema=LINES_SCHEMA)


def _problems_of(rows: pa.Table) -> pa.Table:
    """Return rows in the PROBLEM group as LINES_SCHEMA; they are few: an object each, or rows that lack an image."""
    found = [
        {"group": PROBLEM, "identity": 0, "key": b"", "row": b"", "is_cut": False, "problem": _encoded(problem)}
        for problem in map(problem_of, rows["row"].to_pylist())
        if problem is not None
    ]
    incomplete = rows.filter(pa.array([problem_of(row) is None for row in rows["row"].to_pylist()], pa.bool_()))
    identities = xxhash64(column_of(incomplete["key"])).view(np.int64).tolist()
    # The row's own group is in `partition`.
    found += [
        {"group": group, "identity": identity, "key": key, "row": None, "is_cut": False, "problem": None}
        for group, identity, key in zip(
            incomplete["partition"].to_pylist(), identities, incomplete["key"].to_pylist(), strict=True
        )
    ]
    return pa.Table.from_pylist(found, LINES_SCHEMA)


def _encoded(problem: ErrorReport) -> bytes:
    return json.dumps(problem).encode()


def read_stored(
    session: SparkSession, chain: Chain, store: StoreLocation, wanted: Collection[RowAtCut], progress: Progress
) -> dict[RowAtCut, LineAtCut]:
    """Read these rows at the chain's last cut, a bounded number; rows that are not there are missing from the result.

    Raises the errors of the store. If an object is damaged, all rows of its node are unknown.
    """
    lines: dict[RowAtCut, LineAtCut] = {}
    line_bytes = min(max(HELD_BYTES_MAX // max(len(wanted), 1), LINE_BYTES_MIN), LINE_BYTES_MAX)
    for node in sorted({row.node for row in wanted}):
        rows = [row for row in wanted if row.node == node]
        try:
            sources = sources_of(chain, (node,), store.open(), chosen={node: frozenset(row.group for row in rows)})
        except ObjectDamagedError as error:
            lines |= states_of(rows, LINES_SCHEMA.empty_table(), [report_of(error)])
            continue
        looked_for = WantedLines(
            np.array([row.group for row in rows], np.int64),
            np.array([row.identity for row in rows], np.int64),
            sources.multisets,
            line_bytes,
        )
        with job_progress(session, progress):
            found, problems = _read_lines(session, sources, looked_for, store)
        lines |= states_of(rows, found, problems)
    return lines


def states_of(rows: Iterable[RowAtCut], found: pa.Table, problems: Iterable[ErrorReport]) -> dict[RowAtCut, LineAtCut]:
    """Return the known states of the rows of a node: `found` is LINES_SCHEMA, `problems` are the fold's.

    Raises the error of a problem that is not about an object, such as a store that does not answer.
    """
    in_rows = [json.loads(row) for row in found["problem"].to_pylist() if row is not None]
    reports: list[ErrorReport] = [*problems, *in_rows]
    for report in reports:
        if report["exit_code"] in NOT_OF_THE_OBJECT:
            raise error_of(report)
    if reports:
        return {row: LineAtCut(b"", b"", is_cut=False, unknown=reports[0]["message"]) for row in rows}
    by_identity = {(line["group"], line["identity"]): line for line in found.to_pylist()}
    states: dict[RowAtCut, LineAtCut] = {}
    for row in rows:
        if (line := by_identity.get((row.group, row.identity))) is not None:
            unknown = INCOMPLETE if line["row"] is None else ""
            states[row] = LineAtCut(line["key"], line["row"] or b"", line["is_cut"], unknown)
    return states


def _read_lines(
    session: SparkSession, sources: Sources, wanted: WantedLines, store: StoreLocation
) -> tuple[pa.Table, list[ErrorReport]]:
    """Fold the sources, and return the wanted lines as LINES_SCHEMA, and the fold's problems."""
    folded = fold(session, sources, store)
    try:
        if folded.problems:
            return LINES_SCHEMA.empty_table(), list(folded.problems)
        sent = broadcast(session, (folded.changed, wanted))
        groups = frozenset(wanted.groups.tolist())

        def read(_: int, base: BaseSource) -> Iterator[pa.RecordBatch]:
            changed, wanted = sent.value
            try:
                for table in read_at_cut(store.open(), base, BASE_SCHEMA):
                    for batch in table.to_batches():
                        is_valid = find_valid_rows(batch, base, changed.get(base.source.number, {}))
                        valid = pa.Table.from_batches([batch]).filter(to_mask(is_valid))
                        yield from wanted.pick(valid.select(list(IMAGE_COLUMNS))).to_batches()
            except SnapshotError as error:
                row = {"group": PROBLEM, "identity": 0, "key": b"", "row": b"", "is_cut": False}
                problem = row | {"problem": _encoded(report_of(error))}
                yield pa.RecordBatch.from_pylist([problem], LINES_SCHEMA)

        def pick(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield from sent.value[1].pick(pa.Table.from_batches([batch])).to_batches()

        frames = [read_bases(session, sources.bases, {0: groups}, read, LINES_DDL)]
        _filter_long(session, folded, wanted)
        reader = long_image_reader(sources, store)
        frames += map_images(session, folded, reader, pick, IMAGE_COLUMNS, (LINES_SCHEMA, LINES_DDL))
        found: list[pa.Table] = [_once(frame).toArrow().cast(LINES_SCHEMA) for frame in frames]
        return pa.concat_tables(found), []
    finally:
        folded.release()


def _once(frame: DataFrame) -> Any:
    return frame.dropDuplicates(["group", "identity", "problem"])


def _filter_long(session: SparkSession, folded: Fold, wanted: WantedLines) -> None:
    """Leave out long images of other rows, as far as their keys are known without reading them."""
    from pyspark.sql import functions as F  # noqa: N812  # the name everyone knows

    if folded.long_images is None:
        return
    if len(wanted.identities) <= FILTERED_ROWS_MAX:
        has_no_key = F.col("group").isin([*wanted.multisets, PROBLEM])
        is_wanted = has_no_key | F.xxhash64("key").isin(wanted.identities.tolist())
        folded.long_images = folded.long_images.where(is_wanted)
    cores = cores_of(session).now
    folded.long_images = order_by_place(folded.long_images, lambda rows, by: rows.repartition(cores, by))
