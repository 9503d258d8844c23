"""Find NULL where the DDL at the cut declares a column NOT NULL.

The constraint holds for the rows of the state at the cut: a base row that was changed since it was copied may be older
than the constraint. So base rows are checked when it is known that they are part of the state. An archived change is
checked if the column was NOT NULL at an earlier cut, and its stamp has not changed since: then the constraint was there
when the change was made. Columns that a table inherits, and constraints that are NOT VALID, are not checked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec import Struct

from cutline.check.stored_rows import NO_FIELDS, MarkedFields, RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.columns.arrow_numbers import to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, from_arrow
from cutline.columns.lines import find_byte
from cutline.fleet.lsn import Lsn
from cutline.snapshots.ddl.described_ddl import Description
from cutline.snapshots.fold.sources import SegmentSource
from cutline.snapshots.records.chain import Chain
from cutline.wal.segments.segments import INSERT, PARTIAL, UPSERT, are_of

BACKSLASH, TAB, LINE_END, N = (np.uint8(ord(character)) for character in "\\\t\nN")
# A table has fewer columns than this.
COLUMNS_MAX = 1 << 12
# The columns that are NOT NULL, by the number of their table's group at the last commit: places in its lines.
Required: TypeAlias = Mapping[int, frozenset[int]]
# The position since which each of them has been NOT NULL: changes from there on have to have a value.
Since: TypeAlias = Mapping[int, Mapping[int, Lsn]]


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
    """Return the columns as numbers in ascending order, which `check_required` searches."""
    return np.array(
        sorted(number * COLUMNS_MAX + place for number, places in required.items() for place in places), np.int64
    )


def check_required(
    forms: TableForms, groups: npt.NDArray[Any], nulls: MarkedFields, required: Ints, chosen: Flags | None = None
) -> None:
    """Raise RowsInvalidError if a line has NULL in a column of `required` (from places_of).

    `nulls` are the fields that are NULL, and `groups` the numbers of the lines' tables at the last commit. With
    `chosen`, only the flagged lines are checked.
    """
    if not len(required):
        return
    line, place = nulls
    if chosen is not None:
        line, place = line[chosen[line]], place[chosen[line]]
    group = np.asarray(groups, np.int64)[line]
    column = group * COLUMNS_MAX + place
    wrong = np.flatnonzero(required[_indexes_in(required, column)] == column)
    if len(wrong):
        form = int(forms.find(group[wrong[:1]])[0])
        name = forms.column(form, int(place[wrong[0]]))
        raise RowsInvalidError(f"a row of {forms.table(form)} has NULL in column {name}, which is NOT NULL")


def _indexes_in(ordered: Ints, numbers: Ints) -> Ints:
    """Return the index in `ordered` of each number that is there. `ordered` has at least one number."""
    return np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)


class RequiredSince(Struct, frozen=True):
    """The columns that are NOT NULL, as numbers in ascending order, and the positions since which they have been."""

    columns: Ints
    since: Ints

    @classmethod
    def of(cls, since: Since) -> RequiredSince:
        """Return the columns of a shard's tables."""
        listed = sorted(
            (number * COLUMNS_MAX + place, at) for number, places in since.items() for place, at in places.items()
        )
        columns, positions = np.array(listed, np.int64).reshape(-1, 2).T
        return cls(columns, positions)


def follow_required(before: Chain | None, chain: Chain, shard: str, known: Since, required: Required) -> Since:
    """Return since when columns have been NOT NULL, as of the last commit of `chain`, which lists new DDL of the shard.

    `known` says so as of the commit before, up to which `before` is the chain. `required` are the columns that are NOT
    NULL according to the new DDL. A column that was not known begins at the cut.
    """
    at, now = chain.position(shard), chain.tables(shard)
    was = before.tables(shard) if before is not None else {}
    names = {group.number: group.name for group in chain.groups(shard)}

    def is_same(number: int) -> bool:
        one, other = was.get(names[number]), now.get(names[number])
        return one is not None and other is not None and (one.oid, one.columns) == (other.oid, other.columns)

    return {
        number: {place: known.get(number, {}).get(place, at) if is_same(number) else at for place in places}
        for number, places in required.items()
    }


def check_changes(forms: TableForms, table: pa.Table, segment: SegmentSource, required: RequiredSince) -> None:
    """Raise RowsInvalidError if a change (SEGMENT_SCHEMA, in the schema at the cut) has NULL in a column of `required`.

    Only changes that belong to the state are checked: a transaction that was rolled back may have changed the table.
    """
    if not len(required.columns):
        return
    for batch in table.to_batches():
        op, lsn, group = (to_numpy(batch.column(name)) for name in ("op", "lsn", "group"))
        # In the other kinds of changes, the row is a key, an old row or nothing.
        chosen = are_of(op, (INSERT, UPSERT, PARTIAL)) & (lsn < segment.position)
        if segment.excluded:
            chosen &= ~np.isin(lsn, np.fromiter(segment.excluded, np.int64))
        if not chosen.any():
            continue
        line, place = find_nulls(from_arrow(batch.column("row")))
        line, place = line[chosen[line]], place[chosen[line]]
        column = group[line].astype(np.int64) * COLUMNS_MAX + place
        at = _indexes_in(required.columns, column)
        wrong = np.flatnonzero((required.columns[at] == column) & (lsn[line] >= required.since[at]))
        if len(wrong):
            form = int(forms.find(group[line[wrong[:1]]].astype(np.int64))[0])
            name, where = forms.column(form, int(place[wrong[0]])), Lsn(int(lsn[line[wrong[0]]]))
            raise RowsInvalidError(
                f"a change of {forms.table(form)} at {where} has NULL in column {name}, which was NOT NULL then"
            )


def find_nulls(rows: BytesColumn) -> MarkedFields:
    r"""Return the fields of COPY lines that are NULL, which COPY prints as \N.

    COPY prints a backslash in a value as two, so an N after a single backslash is part of nothing else.
    """
    begin, end = int(rows.offsets[0]), int(rows.offsets[-1])
    data = rows.data[begin:end]
    slashes = find_byte(data, int(BACKSLASH))
    at = slashes[data[np.minimum(slashes + 1, len(data) - 1)] == N]
    if not len(at):
        return NO_FIELDS
    starts = rows.offsets[:-1] - begin
    line = np.searchsorted(starts, at, side="right") - 1
    first, after = starts[line], np.minimum(at + 2, len(data) - 1)
    is_null = ((at == first) | (data[at - 1] == TAB)) & ((data[after] == TAB) | (data[after] == LINE_END))
    at, line, first = at[is_null], line[is_null], first[is_null]
    tabs = np.flatnonzero(data == TAB)
    return MarkedFields(line, np.searchsorted(tabs, at) - np.searchsorted(tabs, first))


def required_by_node(
    nodes: Collection[str], shard_of: Mapping[str, str], required: Mapping[str, Required]
) -> dict[int, Ints]:
    """Return `places_of` the columns of each node's tables, by the node's number."""
    of_shard = {shard: places_of(columns) for shard, columns in required.items()}
    return {number: of_shard[shard_of[node]] for number, node in enumerate(nodes) if shard_of[node] in of_shard}
