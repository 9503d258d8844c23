"""Stored objects as a job reads them: found, whole, and cut down to what belongs to a state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from snapshots.damage import ObjectDamagedError
from snapshots.manifest import Chain
from storage.digest import digest
from storage.store import ObjectMissingError, ObjectStore
from wal.archive import Segment
from wal.arrow_numbers import to_mask, to_numpy
from wal.segment_schema import SEGMENT_SCHEMA, TRUNCATE

CHANGE_OPS = tuple(ord(letter) for letter in "IUuDT")
# The group of a row that is no row, but says what a task met: an error raised there would lose its class.
PROBLEM = -1


@dataclass(frozen=True, slots=True)
class Source:
    """An object of one node's copy, with what its commit says of it. `number` stands for the node in a job."""

    key: str
    node: str
    number: int
    size: int
    digest: str


@dataclass(frozen=True, slots=True)
class BaseSource:
    """An object of a base copy; `dropped` are the groups that were truncated since.

    `multisets` are the groups of its shard whose rows have no key.
    """

    source: Source
    rows: Mapping[int, int]
    dropped: frozenset[int] = frozenset()
    multisets: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment, and which of its changes belong to the state.

    Those before `position`, but for the transactions at `excluded`, and of a group in `truncated` only those
    after that (lsn, seq).
    """

    source: Source
    segment: Segment
    position: int
    excluded: frozenset[int]
    truncated: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything that the copies of some nodes at a state are folded from; `nodes` by their number.

    `column_counts` of every group, by node number and group.
    """

    nodes: tuple[str, ...]
    bases: tuple[BaseSource, ...]
    segments: tuple[SegmentSource, ...]
    multisets: frozenset[int]
    column_counts: Mapping[tuple[int, int], int]

    @property
    def has_partials(self) -> bool:
        """Whether a change may have left a value out."""
        return any(one.segment.partials for one in self.segments)


def read_table(store: ObjectStore, source: Source, schema: pa.Schema) -> pa.Table:
    """Read a whole object and prove it is the one that was committed; raise ObjectDamagedError."""

    def damaged(kind: str, detail: str) -> ObjectDamagedError:
        return ObjectDamagedError(key=source.key, kind=kind, node=source.node, detail=detail)

    try:
        body = store.read(source.key)
    except ObjectMissingError:
        raise damaged("missing", "it is not in the store") from None
    if len(body) != source.size:
        raise damaged("size", f"it has {len(body)} bytes instead of {source.size}")
    if digest(body) != source.digest:
        raise damaged("digest", "its bytes are not those that were committed")
    try:
        return pq.ParquetFile(pa.BufferReader(body)).read(use_threads=False).cast(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged("unreadable", f"it can't be read as Parquet: {error}") from error


def effective(table: pa.Table, source: SegmentSource) -> pa.Table:
    """The changes of a segment that belong to the state, TRUNCATEs apart."""
    op = _numbers(table, "op")
    lsn = _numbers(table, "lsn")
    wanted = np.isin(op, [code for code in CHANGE_OPS if code != TRUNCATE]) & (lsn < source.position)
    if source.excluded:
        wanted &= ~np.isin(lsn, np.fromiter(source.excluded, np.int64))
    if source.truncated:
        group, seq = _numbers(table, "group"), _numbers(table, "seq")
        for number, (at_lsn, at_seq) in source.truncated.items():
            before = (lsn < at_lsn) | ((lsn == at_lsn) & (seq < at_seq))
            wanted &= ~((group == number) & before)
    return table if wanted.all() else table.filter(to_mask(wanted))


def _numbers(table: pa.Table, column: str) -> npt.NDArray[Any]:
    return to_numpy(table[column])


def sources_of(chain: Chain, nodes: tuple[str, ...], store: ObjectStore, skip: Collection[str] = ()) -> Sources:
    """What the state of `nodes` at the chain's last commit is folded from; `skip` keeps its number, but is not read.

    Reads only the segments that hold a TRUNCATE.
    """
    bases: list[BaseSource] = []
    segments: list[SegmentSource] = []
    multisets = frozenset(number for node in nodes for number in multiset_numbers(chain, node))
    for number, node in enumerate(nodes):
        if node in skip:
            continue
        position, excluded = chain.position(node), chain.excluded(node)
        kept = [s for s in chain.segments(node) if s.changes and s.range.after < position]
        plain = [SegmentSource(Source(s.key, node, number, s.size, s.digest), s, position, excluded, {}) for s in kept]
        truncated = truncations(store, plain)
        segments += [SegmentSource(one.source, one.segment, position, excluded, truncated) for one in plain]
        bases += base_sources(chain, number, node, frozenset(truncated))
    counts = {
        (number, group.number): len(group.columns) for number, node in enumerate(nodes) for group in chain.groups(node)
    }
    return Sources(nodes, tuple(bases), tuple(segments), multisets, counts)


def multiset_numbers(chain: Chain, node: str) -> frozenset[int]:
    """The numbers of the node's groups whose rows have no key."""
    return frozenset(group.number for group in chain.groups(node) if group.is_multiset)


def base_sources(chain: Chain, number: int, node: str, dropped: frozenset[int] = frozenset()) -> list[BaseSource]:
    """The objects of the node's base copy."""
    multisets = multiset_numbers(chain, node)
    return [
        BaseSource(Source(o.key, node, number, o.size, o.digest), o.rows, dropped, multisets)
        for o in chain.part.objects
        if o.kind == "base" and o.node == node
    ]


def truncations(store: ObjectStore, segments: list[SegmentSource]) -> dict[int, tuple[int, int]]:
    """The last TRUNCATE of every group that has one, as (lsn, seq)."""
    last: dict[int, tuple[int, int]] = {}
    for one in segments:
        if not one.segment.truncates:
            continue
        table = read_table(store, one.source, SEGMENT_SCHEMA)
        found = table.filter(to_mask(_numbers(table, "op") == TRUNCATE)).select(["lsn", "seq", "group"])
        for row in found.to_pylist():  # bounded by the TRUNCATE commands
            if row["lsn"] < one.position and row["lsn"] not in one.excluded:
                last[row["group"]] = max(last.get(row["group"], (0, 0)), (row["lsn"], row["seq"]))
    return last
