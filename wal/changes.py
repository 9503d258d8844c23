"""The row changes of one table in a batch of messages: keys, lines and what happened to them.

Columns in, columns out. A change of a key is two changes: the old key's row is gone, the new one's is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.groups import Group
from wal import pgoutput
from wal.bytes_column import BytesColumn, Ints, gather, partition_of
from wal.lines import Values, equal, key_lines, keys_of, lines_of
from wal.pgoutput import DecodingError, Messages, read_tuples
from wal.segment_schema import DELETE, INSERT, PARTIAL, UPSERT

NEW_TUPLE, OLD_KEY, OLD_ROW = ord("N"), ord("K"), ord("O")


@dataclass(frozen=True, slots=True)
class ChangeColumns:
    """Changes of one op; `numbers` are their messages, `second` is 1 for the second change of a message."""

    numbers: Ints
    second: Ints
    op: int
    keys: BytesColumn
    rows: BytesColumn

    def partitions(self, group: Group) -> npt.NDArray[np.int32]:
        """The partition of every change: by its key, or by its line where the group has no key."""
        return partition_of(self.rows if group.is_multiset else self.keys, group.partitions)


def changes_of_relation(messages: Messages, numbers: Ints, group: Group) -> Iterator[ChangeColumns]:
    """Every change that these messages make to `group`'s rows."""
    at = messages.starts[numbers] + 5
    kinds = messages.kinds[numbers]
    markers = messages.u8(at)
    for kind, marker in ((pgoutput.INSERTED, NEW_TUPLE), (pgoutput.UPDATED, NEW_TUPLE)):
        chosen = (kinds == kind) & (markers == marker)
        if chosen.any():
            columns, _ = read_tuples(messages, at[chosen] + 1, len(group.columns))
            if group.is_multiset and kind == pgoutput.UPDATED:
                raise DecodingError(f"an update of {group.name}, which has no key, came without its old row")
            yield from _written(messages, numbers[chosen], columns, group, 0)
    for marker in (OLD_KEY, OLD_ROW):
        chosen = (kinds == pgoutput.UPDATED) & (markers == marker)
        if chosen.any():
            yield from _updated(messages, numbers[chosen], at[chosen], group)
        chosen = (kinds == pgoutput.DELETED) & (markers == marker)
        if chosen.any():
            columns, _ = read_tuples(messages, at[chosen] + 1, len(group.columns))
            yield _gone(messages, numbers[chosen], columns, group)


def _updated(messages: Messages, numbers: Ints, at: Ints, group: Group) -> Iterator[ChangeColumns]:
    width = len(group.columns)
    old, place = read_tuples(messages, at + 1, width)
    if np.any(messages.u8(place) != NEW_TUPLE):
        raise DecodingError(f"an update of {group.name} has no new row")
    new, _ = read_tuples(messages, place + 1, width)
    if group.is_multiset:
        yield _gone(messages, numbers, old, group)
        yield from _written(messages, numbers, [n.filled(o) for n, o in zip(new, old, strict=True)], group, 1)
        return
    keys = {column.position for column in group.columns[: group.key_width]}
    new = [n.filled(o) if place in keys else n for place, (n, o) in enumerate(zip(new, old, strict=True))]
    gone = _gone(messages, numbers, old, group)
    now = key_lines(messages.source, messages.data_bytes, _key_columns(new, group), len(numbers))
    # A key is sent too where it is only TOASTed; what did not change is no removal.
    moved = np.flatnonzero(~equal(gone.keys, now))
    if len(moved):
        is_partial = np.any([column.kinds[moved] == ord("u") for column in new], axis=0)
        yield ChangeColumns(
            numbers[moved],
            np.zeros(len(moved), np.int64),
            DELETE,
            _taken(gone.keys, moved),
            _taken(now, moved, keep=is_partial),
        )
    yield from _written(messages, numbers, new, group, 1)


def _written(
    messages: Messages, numbers: Ints, columns: list[Values], group: Group, second: int
) -> Iterator[ChangeColumns]:
    """New rows: complete ones, and apart from them those with unchanged values."""
    width = len(columns)
    is_partial = np.zeros(len(numbers), np.bool_)
    for column in columns:
        is_partial |= column.kinds == ord("u")
    for chosen, op in ((~is_partial, INSERT if group.is_multiset else UPSERT), (is_partial, PARTIAL)):
        if not chosen.any():
            continue
        if op == PARTIAL and group.is_multiset:
            raise DecodingError(f"a new row of {group.name}, which has no key, lacks a value")
        rows = np.flatnonzero(chosen)
        stored = [columns[column.position].take(rows) for column in group.columns]
        lines = lines_of(messages.source, messages.data_bytes, stored, len(rows))
        keys = keys_of(lines, group.key_width, width)
        yield ChangeColumns(numbers[rows], np.full(len(rows), second, np.int64), op, keys, lines)


def _gone(messages: Messages, numbers: Ints, columns: list[Values], group: Group) -> ChangeColumns:
    count = len(numbers)
    nothing = BytesColumn(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))
    keys, rows = nothing, nothing
    if group.is_multiset:
        stored = [columns[column.position] for column in group.columns]
        rows = lines_of(messages.source, messages.data_bytes, stored, count)
    else:
        keys = key_lines(messages.source, messages.data_bytes, _key_columns(columns, group), count)
    return ChangeColumns(numbers, np.zeros(count, np.int64), DELETE, keys, rows)


def _key_columns(columns: list[Values], group: Group) -> list[Values]:
    return [columns[column.position] for column in group.columns[: group.key_width]]


def _taken(column: BytesColumn, rows: Ints, keep: Any = None) -> BytesColumn:
    lengths = column.lengths[rows]
    if keep is not None:
        lengths = np.where(keep, lengths, 0)
    return gather(column.data, column.offsets[:-1][rows], lengths)
