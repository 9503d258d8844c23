"""Find NULL where the DDL at the cut declares a column NOT NULL.

The constraint holds for the rows of the state at the cut, and for no others: a row that was changed since it was copied
may be older than the constraint, and so may an archived change. So base rows are checked when it is known that they are
part of the state. Columns that a table inherits, and constraints that are NOT VALID, are not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import BytesColumn, Flags, Ints
from cutline.columns.lines import find_byte
from cutline.snapshots.ddl.described_ddl import Description
from cutline.snapshots.records.chain import Chain

BACKSLASH, TAB, LINE_END, N = (np.uint8(ord(character)) for character in "\\\t\nN")
# A table has fewer columns than this.
COLUMNS_MAX = 1 << 12
# The columns that are NOT NULL, by the number of their table's group at the last commit: places in its lines.
Required: TypeAlias = Mapping[int, frozenset[int]]


def required_columns(chain: Chain, shard: str, described: Description) -> dict[int, frozenset[int]]:
    """Return the columns of a shard's tables that are NOT NULL, as those of every key are."""
    found: dict[int, frozenset[int]] = {}
    for group in chain.groups(shard):
        table = described.tables.get((group.schema, group.table))
        names = {column.name for column in table.columns if column.is_not_null} if table else set()
        places = frozenset(
            place for place, column in enumerate(group.columns) if place < group.key_width or column.name in names
        )
        if places:
            found[group.number] = places
    return found


def places_of(required: Required) -> Ints:
    """Return the columns as numbers that `check_required` looks up."""
    return np.array(
        sorted(number * COLUMNS_MAX + place for number, places in required.items() for place in places), np.int64
    )


def check_required(
    forms: TableForms, groups: npt.NDArray[Any], rows: BytesColumn, required: Ints, chosen: Flags | None = None
) -> None:
    """Raise RowsInvalidError if a line has NULL in a column of `required` (from places_of).

    The lines are those of COPY, and `groups` are the numbers of their tables at the last commit. With `chosen`, only
    the flagged lines are checked.
    """
    if not len(required) or not len(rows):
        return
    line, place = find_nulls(rows)
    if chosen is not None:
        line, place = line[chosen[line]], place[chosen[line]]
    group = np.asarray(groups, np.int64)[line]
    wrong = np.flatnonzero(np.isin(group * COLUMNS_MAX + place, required))
    if len(wrong):
        form = int(forms.find(group[wrong[:1]])[0])
        column = forms.column(form, int(place[wrong[0]]))
        raise RowsInvalidError(f"a row of {forms.table(form)} has NULL in column {column}, which is NOT NULL")


def find_nulls(rows: BytesColumn) -> tuple[Ints, Ints]:
    r"""Return the line and the place of every field that is NULL, which COPY prints as \N.

    COPY prints a backslash in a value as two, so an N after a single backslash is part of nothing else.
    """
    begin, end = int(rows.offsets[0]), int(rows.offsets[-1])
    data = rows.data[begin:end]
    slashes = find_byte(data, int(BACKSLASH))
    at = slashes[data[np.minimum(slashes + 1, len(data) - 1)] == N]
    if not len(at):
        return at, at
    starts = rows.offsets[:-1] - begin
    line = np.searchsorted(starts, at, side="right") - 1
    first, after = starts[line], np.minimum(at + 2, len(data) - 1)
    is_null = ((at == first) | (data[at - 1] == TAB)) & ((data[after] == TAB) | (data[after] == LINE_END))
    at, line, first = at[is_null], line[is_null], first[is_null]
    tabs = np.flatnonzero(data == TAB)
    return line, np.searchsorted(tabs, at) - np.searchsorted(tabs, first)


def required_by_node(
    nodes: Collection[str], shard_of: Mapping[str, str], required: Mapping[str, Required]
) -> dict[int, Ints]:
    """Return `places_of` the columns of each node's tables, by the node's number."""
    of_shard = {shard: places_of(columns) for shard, columns in required.items()}
    return {number: of_shard[shard_of[node]] for number, node in enumerate(nodes) if shard_of[node] in of_shard}
