"""Stored rows as they read at a cut, where tables changed their definitions before it.

Every definition that a table had in a chain has a group number of its own, and stored rows keep the number under which
they were written. At a cut each number is one of three: it is the table's definition now, and its rows are as they were
stored; its definition was carried on into a later one, and its rows are converted; or it is no more, and its rows are
passed over. So are those of a number that no commit lists: an attempt that failed has stored them.

Right after an object is read and proved whole `to_schema_at_cut` does this, and all that follows knows the numbers of
the cut only. Where no table changed its definition objects are read as they were stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from columns.arrow_numbers import to_arrow, to_mask, to_numpy
from columns.bytes_column import Flags, Ints, from_arrow, partition_of, runs
from fleet.lsn import Lsn
from fleet.tables.groups import Group
from snapshots.fold.conversions import Conversion, conversion, convert_lines
from snapshots.records.chain import Chain
from wal.segments.segment_schema import DELETE, INSERT, NO_GROUP, PARTIAL, UPSERT

# A block of lines that is converted at once: what it is made from, what is added to it, and its fields.
BLOCK_BYTES, BLOCK_FIELDS = 16 << 20, 1 << 20
_GONE = -2


@dataclass(frozen=True, slots=True)
class SchemaMapping:
    """What becomes of the rows of every number that objects have; rows of no other number count.

    Those of `kept` stay as they are, those with a conversion are converted. Of a number in `since` only changes at or
    after the position count: what was before is in the base copy that was taken there.
    """

    kept: frozenset[int]
    conversions: Mapping[int, Conversion] = field(default_factory=dict)
    since: Mapping[int, Lsn] = field(default_factory=dict)

    def number_of(self, stored: int) -> int | None:
        """The number that rows of `stored` have now; None where they are passed over."""
        if stored in self.kept:
            return stored
        found = self.conversions.get(stored)
        return found.number if found else None

    def of(self, numbers: Iterable[int]) -> SchemaMapping:
        """The same for rows of these numbers alone."""
        wanted = frozenset(numbers)
        return SchemaMapping(
            self.kept & wanted,
            {number: self.conversions[number] for number in wanted if number in self.conversions},
            {number: self.since[number] for number in wanted if number in self.since},
        )


def mapping_to_cut(chain: Chain, node: str, among: Iterable[str] = ()) -> SchemaMapping:
    """What becomes of the node's rows at the chain's last commit.

    With other nodes in `among`, only changes that are after the base copies of them all count.
    """
    began = dict(chain.began(node))
    for theirs in map(chain.began, among):
        began = {number: max(position, theirs[number]) for number, position in began.items()}
    return schema_mapping(chain.groups(node), chain.definitions(node), chain.successions(node), began)


def schema_mapping(
    groups: Iterable[Group],
    definitions: Mapping[int, Group],
    successions: Mapping[int, int],
    began: Mapping[int, Lsn],
) -> SchemaMapping:
    """What becomes of the numbers of all `definitions` where the tables are `groups` now.

    `successions` name the number that each number carried on, `began` the position of the base copy that it began with.
    """
    kept: set[int] = set()
    conversions: dict[int, Conversion] = {}
    since: dict[int, Lsn] = {}
    left = dict(successions)
    for group in groups:
        path = [group]
        while (before := left.pop(path[-1].number, None)) is not None:
            path.append(definitions[before])
        kept.add(group.number)
        found: Conversion | None = None
        for after, older in pairwise(path):
            step = conversion(older, after)
            found = found.after(step) if found else step
            conversions[older.number] = found
        if path[-1].number in began:
            since |= dict.fromkeys((one.number for one in path), began[path[-1].number])
    return SchemaMapping(frozenset(kept), conversions, since)


def to_schema_at_cut(table: pa.Table, present: SchemaMapping | None) -> Iterator[pa.Table]:
    """What counts of a table of BASE_SCHEMA or SEGMENT_SCHEMA, as it reads now; without `present` the table as it is.

    In several tables: what keeps its lines in one, and converted lines in blocks of bounded size. Events stay.
    """
    if present is None or len(table) == 0:
        yield table
        return
    group = to_numpy(table["group"])
    known = _Lookup.of(present, int(group.max()) + 1)
    now = known.now[group]
    counts = now != _GONE
    has_changes = "lsn" in table.column_names
    if has_changes and present.since:
        counts &= to_numpy(table["lsn"]) >= known.since[group]
    if not present.conversions:
        yield _choose_rows(table, counts)
        return
    converted = counts & known.converts[group]
    if has_changes:
        op = to_numpy(table["op"])
        # What is gone is a line only where the group has no key.
        converted &= np.isin(op, (INSERT, UPSERT, PARTIAL)) | ((op == DELETE) & known.is_multiset[group])
    rest = counts & ~converted
    if rest.any():
        numbers = to_arrow(now[rest].astype(np.int32))
        yield _replace_columns(_choose_rows(table, rest), {"group": numbers})
    rows = np.flatnonzero(converted)
    rows = rows[np.argsort(group[rows], kind="stable")]
    for one in runs(group[rows]):
        found = present.conversions[int(group[rows[one.start]])]
        is_whole = one.stop - one.start == len(table)
        chosen = table if is_whole else table.take(pa.array(rows[one]))
        for block in _blocks(chosen, found):
            yield _convert(block, found)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What becomes of every number below some bound, as arrays."""

    now: Ints
    since: Ints
    converts: Flags
    is_multiset: Flags

    @classmethod
    def of(cls, present: SchemaMapping, bound: int) -> _Lookup:
        found = cls(
            np.full(bound, _GONE, np.int64),
            np.zeros(bound, np.int64),
            np.zeros(bound, np.bool_),
            np.zeros(bound, np.bool_),
        )
        found.now[NO_GROUP] = NO_GROUP
        for number in present.kept:
            if number < bound:
                found.now[number] = number
        for number, one in present.conversions.items():
            if number < bound:
                found.now[number] = one.number
                found.converts[number], found.is_multiset[number] = not one.keeps_lines, one.is_multiset
        for number, position in present.since.items():
            if number < bound:
                found.since[number] = position
        return found


def _blocks(table: pa.Table, conversion: Conversion) -> Iterator[pa.Table]:
    """The table in pieces of whole rows, none of which takes much more to convert than the bounds say."""
    pieces = conversion.pieces
    added = sum(len(piece) for piece in pieces if isinstance(piece, bytes))
    rows_max = min(BLOCK_BYTES // max(added, 1), BLOCK_FIELDS // max(conversion.width, len(pieces)))
    for batch in table.to_batches():
        offsets = from_arrow(batch.column("row")).offsets
        first = 0
        while first < len(batch):
            last = int(np.searchsorted(offsets, offsets[first] + BLOCK_BYTES, side="right")) - 1
            last = max(min(last, first + rows_max, len(batch)), first + 1)
            yield pa.Table.from_batches([batch.slice(first, last - first)])
            first = last


def _convert(block: pa.Table, conversion: Conversion) -> pa.Table:
    lines = convert_lines(from_arrow(block["row"].chunk(0)), conversion)
    columns = {"group": to_arrow(np.full(len(block), conversion.number, np.int32)), "row": lines.to_arrow()}
    if conversion.is_multiset:
        columns["partition"] = to_arrow(partition_of(lines, conversion.partitions))
    return _replace_columns(block, columns)


def _choose_rows(table: pa.Table, rows: Flags) -> pa.Table:
    return table if rows.all() else table.filter(to_mask(rows))


def _replace_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """The table with these columns in place of its own."""
    arrays = [columns.get(name, table[name]) for name in table.column_names]
    return pa.Table.from_arrays(arrays, schema=table.schema)
