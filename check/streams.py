"""Hashing segments: what a task of the stream hash job does, in an executor.

A primary's and its standby's WAL decode to the same changes and events. Their hashes are compared from the
later of the copies' base positions on, so a change that a later one hides is not overlooked. They are hashed as they
read at the cut: copies may have stored the same change under different definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from check.copies import Copies
from check.findings import Findings
from check.hashing import Sums, combine_all, combine_hashes
from check.report import Conflict
from columns.bytes_column import BytesColumn, column_of, from_list, xxhash64
from fleet.lsn import Lsn
from fleet.progress import Progress
from snapshots.fold.schema_at_cut import SchemaMapping, to_schema_at_cut
from snapshots.fold.sources import CHANGE_OPS, Source, read_tables, segment_sources
from snapshots.operations.spark_jobs import run_tasks
from snapshots.records.chain import Chain
from storage.errors import ErrorReport, SnapshotError, report_of
from storage.location import StoreLocation
from wal.cut.markers import marker_from_bytes
from wal.segments.archive import Segment
from wal.segments.damage import ObjectDamagedError
from wal.segments.segment_schema import MARKER, PARTIAL, ROLLBACK_PREPARED, SEGMENT_SCHEMA, TRUNCATE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class StreamTask:
    """A segment to hash: its changes and events from `since` up to, not including, `position`.

    But for those of the transactions at `excluded`: of one that is rolled back by the time it is decoded
    PostgreSQL may leave out any part. `present` counts changes of a group from where all copies have them.
    """

    source: Source
    segment: Segment
    since: Lsn
    position: Lsn
    excluded: frozenset[Lsn]
    present: SchemaMapping | None
    store: StoreLocation


@dataclass(frozen=True, slots=True)
class StreamReport:
    """Combined hashes by (node number, group); group 0 are the events. `markers`: content and position."""

    sums: Sums | None
    changes: int = 0
    markers: tuple[tuple[bytes, Lsn], ...] = ()
    problem: ErrorReport | None = None


def hash_stream(task: StreamTask) -> StreamReport:
    """Read the segment whole and hash it."""
    parts: list[Sums] = []
    markers: list[tuple[bytes, Lsn]] = []  # two per cut
    counts = np.zeros(4, np.int64)
    try:
        for table in read_tables(task.store.open(), task.source, SEGMENT_SCHEMA):
            op = np.asarray(table["op"].to_numpy())
            counts += _counts(op)
            found = table.filter(pa.array(op == MARKER))
            markers += zip(found["row"].to_pylist(), map(Lsn, found["lsn"].to_pylist()), strict=True)
            parts += [_hash_table(task, one) for one in to_schema_at_cut(table, task.present)]
        _check_counts(task, tuple(counts.tolist()))
    except SnapshotError as error:
        return StreamReport(None, problem=report_of(error))
    return StreamReport(combine_all(parts, 2), task.segment.changes, tuple(markers))


def _hash_table(task: StreamTask, table: pa.Table) -> Sums:
    op = np.asarray(table["op"].to_numpy())
    lsn = np.asarray(table["lsn"].to_numpy())
    lasts = (lsn >= task.since) & (lsn < task.position) & (op != ROLLBACK_PREPARED)
    if task.excluded:
        lasts &= ~np.isin(lsn, np.fromiter(task.excluded, np.int64))
    chosen = table.filter(pa.array(lasts))
    group = np.asarray(chosen["group"].to_numpy(), np.int64)
    keys = np.stack([np.full(len(chosen), task.source.number, np.int64), group], axis=1)
    return combine_hashes(keys, _hashes(chosen))


def _hashes(table: pa.Table) -> Any:
    """The hash of every change and event: all that it says, but for the transaction's number on its node."""
    count = len(table)
    numbers = [np.asarray(table[name].to_numpy(), np.int64) for name in ("lsn", "seq", "op", "group", "partition")]
    fixed = np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint8).reshape(-1)
    width = len(numbers) * 8
    hashes = xxhash64(BytesColumn(fixed, np.arange(count + 1, dtype=np.int64) * width))
    names = table["global_id"].cast(pa.binary()).fill_null(b"")
    for column in (names, table["key"], table["row"]):
        values = column_of(column) if count else from_list([])
        hashes = xxhash64(values, hashes)
    return hashes


def _counts(op: npt.NDArray[np.int8]) -> tuple[int, int, int, int]:
    """How many changes, events, changes with values left out, and TRUNCATEs there are."""
    changes = int(np.isin(op, CHANGE_OPS).sum())
    return changes, len(op) - changes, int((op == PARTIAL).sum()), int((op == TRUNCATE).sum())


def _check_counts(task: StreamTask, found: tuple[int, ...]) -> None:
    """The segment must hold what its commit says, also of those kinds of changes that decide how it is read."""
    source, said = task.source, task.segment
    expected = (said.changes, said.events, said.partials, said.truncates)
    if found != expected:
        names = "changes, events, with values left out, truncates"
        raise ObjectDamagedError(
            key=source.key,
            kind="rows",
            node=source.node,
            detail=f"it has {found} rows ({names}) instead of {expected}",
        )


@dataclass(frozen=True, slots=True)
class StreamHashes:
    """Combined hashes of every node's stream by (node number, group), and the markers found in it, by node."""

    sums: Sums
    markers: Mapping[str, Mapping[bytes, Lsn]]


def hash_streams(
    session: SparkSession, copies: Copies, store: StoreLocation, findings: Findings, progress: Progress
) -> StreamHashes:
    """Hash every copy's segments in a Spark job; what can't be read is noted as damage."""
    tasks = [
        StreamTask(one.source, one.segment, copies.since(node), one.position, one.excluded, one.present, store)
        for number, node in enumerate(copies.nodes)
        for one in segment_sources(copies.chain, number, node, copies.alike(node))
    ]
    progress.step("read WAL archive", total=len(tasks), unit="objects")
    reports = run_tasks(session, hash_stream, tasks, progress)
    parts: list[Sums] = []
    markers: dict[str, dict[bytes, Lsn]] = {node: {} for node in copies.nodes}
    for task, found in zip(tasks, reports, strict=True):
        if found.problem is not None:
            findings.damage(found.problem)
        elif found.sums is not None:
            parts.append(found.sums)
            markers[task.source.node].update(dict(found.markers))
            findings.count(objects=1, size_bytes=task.source.size, changes=found.changes)
    return StreamHashes(combine_all(parts, 2), markers)


def check_markers(chain: Chain, markers: Mapping[str, Mapping[bytes, Lsn]], findings: Findings) -> None:
    """Check that every whole copy's archive has both markers of every cut where the commit says."""
    for node, contents in markers.items():
        if node in findings.damaged:
            continue
        found: dict[tuple[str, str], Lsn] = {}
        for content, position in contents.items():
            with suppress(ValueError):
                marker = marker_from_bytes(content)
                found[marker.cut, marker.kind] = position
        for commit in chain.commits:
            cut = commit.cut.of(chain.shard_of(node))
            for kind, position in (("start", cut.start), ("finish", cut.finish)):
                if found.get((commit.cut.id, kind)) != position:
                    detail = f"the {kind} marker of cut {commit.cut.id} is missing"
                    findings.conflict(Conflict("marker", detail, node=node))
