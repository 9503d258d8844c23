"""The row changes to one table in a batch of messages: ops, keys and lines, whole columns at a time.

An UPDATE of the key becomes two changes: a DELETE of the old key, and an upsert of the row under the new key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from cutline.columns.bytes_column import BytesColumn, Ints, gather, partition_of
from cutline.columns.lines import Values, key_lines, keys_of, lines_of
from cutline.nodes.groups import Group
from cutline.wal.decoding import pgoutput
from cutline.wal.decoding.pgoutput import Messages, read_tuples, refuse
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, UPSERT

NEW_TUPLE, OLD_KEY, OLD_ROW = ord("N"), ord("K"), ord("O")
# The kind of tuple that identifies the old row of an UPDATE or DELETE, keyed by replica identity; OLD_KEY by default.
OLD_TUPLES = {"full": OLD_ROW}
# Rows are read in blocks of about this many values: each value temporarily takes about 100 bytes.
VALUES_PER_BLOCK = 1 << 18


class ChangeColumns(Struct, frozen=True):
    """Changes with the same op.

    `numbers` are the numbers of their messages; `second` is 1 for a message's second change.
    """

    numbers: Ints
    second: Ints
    op: int
    keys: BytesColumn
    rows: BytesColumn

    def partitions(self, group: Group) -> npt.NDArray[np.int32]:
        """Return the partition of every change: by its key, or by its line if the group has no key."""
        return partition_of(self.rows if group.is_multiset else self.keys, group.partitions)


def changes_of_relation(messages: Messages, numbers: Ints, group: Group) -> Iterator[ChangeColumns]:
    """Yield every change that these messages make to rows of `group`. Raises DecodingError."""
    rows = max(VALUES_PER_BLOCK // max(len(group.columns), 1), 1)
    for first in range(0, len(numbers), rows):
        yield from _changes_of(messages, numbers[first : first + rows], group)


def _changes_of(messages: Messages, numbers: Ints, group: Group) -> Iterator[ChangeColumns]:
    width = len(group.columns)
    kinds = messages.kinds[numbers]
    letters = messages.u8(messages.starts[numbers] + 5)
    is_new, is_old = letters == NEW_TUPLE, letters == OLD_TUPLES.get(group.identity, OLD_KEY)
    if group.identity == "append_only":
        refuse(
            numbers,
            kinds != pgoutput.INSERTED,
            f"a change to {group.name} is not an INSERT, but the table has no replica identity",
        )
    if group.is_multiset:
        is_new &= kinds == pgoutput.INSERTED
    is_valid = (is_new & (kinds != pgoutput.DELETED)) | (is_old & (kinds != pgoutput.INSERTED))
    refuse(numbers, ~is_valid, f"a change to {group.name} lacks the row or key that its replica identity requires")
    if (some := numbers[is_new]).size:
        columns, _ = read_tuples(messages, some, messages.starts[some] + 6, width, is_last=True)
        yield from _inserted_rows(messages, some, columns, group, 0)
    if (some := numbers[is_old & (kinds == pgoutput.UPDATED)]).size:
        yield from _updated_rows(messages, some, group)
    if (some := numbers[is_old & (kinds == pgoutput.DELETED)]).size:
        columns, _ = read_tuples(messages, some, messages.starts[some] + 6, width, is_last=True)
        yield _deleted_rows(messages, some, columns, group)


def _updated_rows(messages: Messages, numbers: Ints, group: Group) -> Iterator[ChangeColumns]:
    width = len(group.columns)
    old, offset = read_tuples(messages, numbers, messages.starts[numbers] + 6, width, is_last=False)
    refuse(numbers, messages.u8(offset) != NEW_TUPLE, f"an UPDATE of {group.name} lacks the new row")
    new, _ = read_tuples(messages, numbers, offset + 1, width, is_last=True)
    if group.is_multiset:
        yield _deleted_rows(messages, numbers, old, group)
        yield from _inserted_rows(
            messages, numbers, [n.fill_unchanged(o) for n, o in zip(new, old, strict=True)], group, 1
        )
        return
    keys = {column.position for column in group.columns[: group.key_width]}
    new = [n.fill_unchanged(o) if number in keys else n for number, (n, o) in enumerate(zip(new, old, strict=True))]
    _check_no_unchanged(numbers, _key_columns(new, group), group)
    deleted = _deleted_rows(messages, numbers, old, group)
    new_keys = lines_of(messages.source, messages.data_bytes, _key_columns(new, group), len(numbers))
    # The old key is also sent if it is merely TOASTed. It becomes a DELETE only if the key has changed.
    moved = np.flatnonzero(~deleted.keys.equals(gather(new_keys.data, new_keys.offsets[:-1], new_keys.lengths - 1)))
    if len(moved):
        is_partial = np.any([column.kinds[moved] == ord("u") for column in new], axis=0)
        yield ChangeColumns(
            numbers[moved],
            np.zeros(len(moved), np.int64),
            DELETE,
            _take(deleted.keys, moved),
            _take(new_keys, moved, keep=is_partial),
        )
    yield from _inserted_rows(messages, numbers, new, group, 1)


def _inserted_rows(
    messages: Messages, numbers: Ints, columns: list[Values], group: Group, second: int
) -> Iterator[ChangeColumns]:
    """Yield the new rows: first the complete rows, then those with unchanged values."""
    width = len(columns)
    _check_no_unchanged(numbers, columns if group.is_multiset else _key_columns(columns, group), group)
    is_partial = np.zeros(len(numbers), np.bool_)
    for column in columns:
        is_partial |= column.kinds == ord("u")
    for chosen, op in ((~is_partial, INSERT if group.is_multiset else UPSERT), (is_partial, PARTIAL)):
        if not chosen.any():
            continue
        rows = np.flatnonzero(chosen)
        stored = [columns[column.position].take(rows) for column in group.columns]
        lines = lines_of(messages.source, messages.data_bytes, stored, len(rows))
        keys = keys_of(lines, group.key_width, width)
        yield ChangeColumns(numbers[rows], np.full(len(rows), second, np.int64), op, keys, lines)


def _deleted_rows(messages: Messages, numbers: Ints, columns: list[Values], group: Group) -> ChangeColumns:
    count = len(numbers)
    empty = BytesColumn(np.empty(0, np.uint8), np.zeros(count + 1, np.int64))
    keys, rows = empty, empty
    _check_no_unchanged(numbers, columns if group.is_multiset else _key_columns(columns, group), group)
    if group.is_multiset:
        stored = [columns[column.position] for column in group.columns]
        rows = lines_of(messages.source, messages.data_bytes, stored, count)
    else:
        keys = key_lines(messages.source, messages.data_bytes, _key_columns(columns, group), count)
    return ChangeColumns(numbers, np.zeros(count, np.int64), DELETE, keys, rows)


def _check_no_unchanged(numbers: Ints, columns: list[Values], group: Group) -> None:
    """Raise DecodingError if a value that identifies a row was left out as unchanged."""
    for column in columns:
        refuse(numbers, column.kinds == ord("u"), f"a row of {group.name} lacks a value that identifies it")


def _key_columns(columns: list[Values], group: Group) -> list[Values]:
    return [columns[column.position] for column in group.columns[: group.key_width]]


def _take(column: BytesColumn, rows: Ints, keep: Any = None) -> BytesColumn:
    lengths = column.lengths[rows]
    if keep is not None:
        lengths = np.where(keep, lengths, 0)
    return gather(column.data, column.offsets[:-1][rows], lengths)
