"""The last changes of all keys, from the tasks that hash the segments: so each segment is read once.

A task reports, of every key that its segment changes, the last change that belongs to the state, with a hash instead of
the row. The driver compares keys and positions, and has what a fold would give. Spark folds what is more than it should
hold, and what needs rows: groups without a key, and partial images.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from cutline.columns.arrow_numbers import to_arrow
from cutline.columns.arrow_streams import from_stream, to_stream
from cutline.snapshots.fold import limits
from cutline.snapshots.fold.by_segment import reported_shares
from cutline.snapshots.fold.changes import CHANGE_SCHEMA, ENTRY, ChangeForm, changes_in
from cutline.snapshots.fold.find_sources import Sources
from cutline.snapshots.fold.local import last_changes
from cutline.snapshots.fold.long_lines import NO_PLACE, PLACE_FIELD
from cutline.snapshots.fold.sources import SegmentSource, converted_to_cut
from cutline.wal.segments.segment_schema import SEGMENT_SCHEMA

REPORTED_SCHEMA = pa.schema(
    [*(CHANGE_SCHEMA.field(name) for name in ("group", "partition", "key", "lsn", "seq", "op")), (ENTRY, pa.int64())]
)


@dataclass(frozen=True, slots=True)
class LastTask:
    """A segment whose last changes are wanted, unless they take more than `bytes_max`."""

    segment: SegmentSource
    form: ChangeForm
    bytes_max: int


@dataclass(slots=True)
class LastChanges:
    """The last changes of a segment that is being read."""

    task: LastTask
    tables: list[pa.Table] = field(default_factory=lambda: [REPORTED_SCHEMA.empty_table()])
    size_bytes: int = 0
    is_complete: bool = True

    def add(self, table: pa.Table) -> None:
        """Add rows as they are stored (SEGMENT_SCHEMA); raise ObjectDamagedError if they don't fit the commit.

        Once there will be no report, does nothing.
        """
        if not self.is_complete:
            return
        places = to_arrow(np.full(len(table), NO_PLACE, np.int64))
        with_places = pa.Table.from_arrays([*table.columns, places], schema=SEGMENT_SCHEMA.append(PLACE_FIELD))
        for converted in converted_to_cut(with_places, self.task.segment):
            for batch in changes_in(converted, self.task.segment, self.task.form):
                found = pa.Table.from_batches([batch]).select(REPORTED_SCHEMA.names)
                self.size_bytes += found.nbytes
                if found[ENTRY].null_count or self.size_bytes > self.task.bytes_max:
                    self.is_complete, self.tables = False, []
                    return
                self.tables.append(found)

    def report(self) -> bytes | None:
        """The changes (REPORTED_SCHEMA, an Arrow stream); None if some need their rows, or they are too many."""
        return to_stream(pa.concat_tables(self.tables)) if self.is_complete else None


def last_tasks(sources: Sources) -> dict[str, LastTask]:
    """By object, what to find in each segment; nothing if Spark has to fold them."""
    if not sources.segments or sources.has_partials or sources.changes > limits.CHOSEN_CHANGES_MAX:
        return {}
    if (shares := reported_shares(sources.segments)) is None:
        return {}
    form = ChangeForm.of(sources, hashed=True)
    return {one.source.key: LastTask(one, form, share) for one, share in zip(sources.segments, shares, strict=True)}


def last_by_node(sources: Sources, reports: MutableMapping[str, bytes | None]) -> Iterator[pa.Table | None]:
    """For every node the last changes of its keys (node, and REPORTED_SCHEMA); None if Spark has to fold them.

    One node's are in memory at a time: its reports are removed from `reports`.
    """
    keys: dict[int, list[str]] = {}
    for one in sources.segments:
        keys.setdefault(one.source.number, []).append(one.source.key)
    for number in sorted(keys):
        streams = [reports.pop(key, None) for key in keys[number]]
        whole = [stream for stream in streams if stream is not None]
        if len(whole) < len(streams):
            yield None
            continue
        found = pa.concat_tables(map(from_stream, whole))
        del streams, whole
        last = last_changes(found.append_column("node", to_arrow(np.full(len(found), number, np.int32))))
        del found
        yield last
