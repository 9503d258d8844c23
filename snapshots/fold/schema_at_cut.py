"""Convert lines from one definition of a table to the layout of a later definition, by operations on whole columns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec import Struct, field
from msgspec.structs import replace

from cutline.columns.arrow_numbers import to_arrow, to_mask, to_numpy
from cutline.columns.bytes_column import BytesColumn, Flags, Ints, from_arrow, gather, partition_of, runs
from cutline.columns.lines import NULL_MARK, TAB, find_byte
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.groups import Group, copy_line
from cutline.snapshots.records.chain import Chain
from cutline.wal.segments.segments import DELETE, INSERT, NO_GROUP, PARTIAL, UPSERT, are_of


class Conversion(Struct, frozen=True):
    """The conversion of a line of `width` columns to the definition `number`.

    `fields` holds, for each column of that definition, the index of its field in the stored line. For a column that is
    newer than the row, it holds the text, which is the same in all such rows. The partition of a multiset's row (one of
    `partitions`) is computed from the converted line.
    """

    number: int
    width: int
    fields: tuple[int | bytes, ...]
    is_multiset: bool = False
    partitions: int = 1

    @property
    def keeps_lines(self) -> bool:
        """Whether lines need no conversion."""
        return self.fields == tuple(range(self.width))

    @property
    def pieces(self) -> list[tuple[int, int] | bytes]:
        """The pieces of a converted line: ranges of adjacent fields (first, last) and texts."""
        pieces: list[tuple[int, int] | bytes] = []
        text = b""
        for place, part in enumerate(self.fields):
            if isinstance(part, int) and not text and pieces and pieces[-1][1] == part - 1:
                pieces[-1] = (int(pieces[-1][0]), part)
                continue
            text += b"\t" if place else b""
            if isinstance(part, bytes):
                text += part
                continue
            pieces += [text] if text else []
            pieces.append((part, part))
            text = b""
        return [*pieces, text + b"\n"]

    def after(self, earlier: Conversion) -> Conversion:
        """Return the conversion that applies `earlier` first, then this conversion."""
        fields = tuple(part if isinstance(part, bytes) else earlier.fields[part] for part in self.fields)
        return Conversion(self.number, earlier.width, fields, self.is_multiset, self.partitions)


def conversion(before: Group, after: Group) -> Conversion:
    """Return the conversion from a definition to its successor.

    A row that is older than a column gets the value that PostgreSQL stored for such rows.
    """
    places = {column.number: place for place, column in enumerate(before.columns)}
    fields: list[int | bytes] = []
    for column in after.columns:
        missing = NULL_MARK if column.missing is None else copy_line(column.missing)
        fields.append(places.get(column.number, missing))
    return Conversion(after.number, len(before.columns), tuple(fields), after.is_multiset, after.partitions)


def convert_lines(lines: BytesColumn, conversion: Conversion) -> BytesColumn:
    """Convert the lines to their new layout; raise ValueError if they don't have the old layout."""
    count, pieces = len(lines), conversion.pieces
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    texts = b"".join(piece for piece in pieces if isinstance(piece, bytes))
    source = np.concatenate([lines.data[first:last], np.frombuffer(texts, np.uint8)])
    bounds = _bounds(lines, conversion)
    starts = np.empty((count, len(pieces)), np.int64)
    lengths = np.empty((count, len(pieces)), np.int64)
    text_at = last - first
    for number, piece in enumerate(pieces):
        if isinstance(piece, bytes):
            starts[:, number], lengths[:, number] = text_at, len(piece)
            text_at += len(piece)
            continue
        begin, end = piece
        starts[:, number] = bounds[:, begin]
        lengths[:, number] = bounds[:, end + 1] - 1 - bounds[:, begin]
    joined = gather(source, starts.reshape(-1), lengths.reshape(-1))
    return BytesColumn(joined.data, np.ascontiguousarray(joined.offsets[:: len(pieces)]))


def _bounds(lines: BytesColumn, conversion: Conversion) -> Ints:
    """Return the offset of each field in the lines' bytes; the last column is the offset of the next line."""
    offsets = lines.offsets - lines.offsets[0]
    bounds = np.empty((len(lines), conversion.width + 1), np.int64)
    bounds[:, 0], bounds[:, -1] = offsets[:-1], offsets[1:]
    if conversion.width > 1:
        data = lines.data[int(lines.offsets[0]) : int(lines.offsets[-1])]
        tabs = find_byte(data, TAB)
        if len(tabs) != len(lines) * (conversion.width - 1):
            raise ValueError(f"the table has {conversion.width} columns, but some of its rows have more or fewer")
        bounds[:, 1:-1] = tabs.reshape(len(lines), conversion.width - 1) + 1
    return bounds


# Limits on the block of lines converted at one time: bytes read, bytes added (the same limit), and number of fields.
BLOCK_BYTES, BLOCK_FIELDS = 16 << 20, 1 << 20
_SKIPPED = -2


class SchemaMapping(Struct, frozen=True):
    """The mapping of stored rows, by group number, to the schema at a cut.

    Rows with a number in `unchanged` keep their lines, rows with a number in `conversions` are converted, and all other
    rows are skipped. For a number in `since`, only changes at or after that position count, and those of its
    transactions at `pending_at_copies`: the base copy that was taken there contains the other earlier changes. If a
    copy begins with a merge or a shared base copy, changes of all tables count from `counted_from` on, and so do those
    of the transactions at `pending`.
    """

    unchanged: frozenset[int]
    conversions: Mapping[int, Conversion] = field(default_factory=dict)
    since: Mapping[int, Lsn] = field(default_factory=dict)
    counted_from: Lsn = ORIGIN
    pending: frozenset[Lsn] = frozenset()
    pending_at_copies: Mapping[int, frozenset[Lsn]] = field(default_factory=dict)

    def number_of(self, stored: int) -> int | None:
        """Return the number at the cut for rows stored under `stored`; None if they are skipped."""
        if stored in self.unchanged:
            return stored
        converted = self.conversions.get(stored)
        return converted.number if converted else None

    def restrict_to(self, numbers: Iterable[int]) -> SchemaMapping:
        """Return the same mapping, limited to rows with these numbers."""
        wanted = frozenset(numbers)
        return SchemaMapping(
            self.unchanged & wanted,
            {number: self.conversions[number] for number in wanted if number in self.conversions},
            {number: self.since[number] for number in wanted if number in self.since},
        )


def mapping_to_cut(chain: Chain, node: str, among: Iterable[str] = ()) -> SchemaMapping:
    """Map the node's stored rows to the schema at the chain's last commit.

    With other nodes in `among`, only changes after the base copies of all these nodes count; of tables that were copied
    again, without exceptions.
    """
    copies = {one: (chain.copy_positions(one), chain.bases[one]) for one in (node, *among)}
    # A copy that began again after the table was copied begins with the table, too.
    positions = {
        number: max(found.get(number, base) for found, base in copies.values())
        for number in {number for found, _ in copies.values() for number in found}
    }
    pending = chain.pending_at_copies(node) if positions and not among else {}
    mapping = schema_mapping(chain.groups(node), chain.definitions(node), chain.successions(node), positions, pending)
    counted_from, in_base = chain.counted_from(node)
    return replace(mapping, counted_from=counted_from, pending=in_base) if counted_from else mapping


def schema_mapping(
    groups: Iterable[Group],
    definitions: Mapping[int, Group],
    successions: Mapping[int, int],
    copy_positions: Mapping[int, Lsn],
    pending_at_copies: Mapping[int, frozenset[Lsn]] = MappingProxyType({}),
) -> SchemaMapping:
    """Map the numbers of all `definitions` to the numbers of `groups`, the tables at the cut.

    `successions` maps a number to its predecessor, and `copy_positions` maps a number to the position of the base copy
    with which it begins; `pending_at_copies` are the earlier transactions that count as well.
    """
    unchanged: set[int] = set()
    conversions: dict[int, Conversion] = {}
    since: dict[int, Lsn] = {}
    late: dict[int, frozenset[Lsn]] = {}
    pending = dict(successions)
    for group in groups:
        path = [group]
        while (before := pending.pop(path[-1].number, None)) is not None:
            path.append(definitions[before])
        unchanged.add(group.number)
        composed: Conversion | None = None
        for after, older in pairwise(path):
            step = conversion(older, after)
            composed = composed.after(step) if composed else step
            conversions[older.number] = composed
        if path[-1].number in copy_positions:
            since |= dict.fromkeys((group.number for group in path), copy_positions[path[-1].number])
        if path[-1].number in pending_at_copies:
            late |= dict.fromkeys((group.number for group in path), pending_at_copies[path[-1].number])
    return SchemaMapping(frozenset(unchanged), conversions, since, pending_at_copies=late)


def to_schema_at_cut(table: pa.Table, mapping: SchemaMapping | None) -> Iterator[pa.Table]:
    """Convert a table of BASE_SCHEMA or SEGMENT_SCHEMA to the schema at the cut, and drop the rows to skip.

    Yields a table of the rows that keep their lines, and the converted rows in tables of bounded size. Events are kept.
    If `mapping` is None, yields the table unchanged.
    """
    if mapping is None or len(table) == 0:
        yield table
        return
    group = to_numpy(table["group"])
    lookup = _Lookup.of(mapping, int(group.max()) + 1)
    now = lookup.now[group]
    counts = now != _SKIPPED
    has_changes = "lsn" in table.column_names
    if has_changes and mapping.since:
        lsn = to_numpy(table["lsn"])
        is_early = lsn < lookup.since[group]
        for number, pending in mapping.pending_at_copies.items():
            of_table = is_early & (group == number)
            is_early[of_table] = ~np.isin(lsn[of_table], np.fromiter(pending, np.int64))
        counts &= ~is_early
    if has_changes and mapping.counted_from:
        lsn = to_numpy(table["lsn"])
        counts &= _unless_at((lsn < mapping.counted_from) & (group != NO_GROUP), lsn, mapping.pending)
    if not mapping.conversions:
        yield _choose_rows(table, counts)
        return
    converted = counts & lookup.converts[group]
    if has_changes:
        op = to_numpy(table["op"])
        # A DELETE contains a line only if the group has no key.
        converted &= are_of(op, (INSERT, UPSERT, PARTIAL)) | ((op == DELETE) & lookup.is_multiset[group])
    rest = counts & ~converted
    if rest.any():
        numbers = to_arrow(now[rest].astype(np.int32))
        yield _replace_columns(_choose_rows(table, rest), {"group": numbers})
    rows = np.flatnonzero(converted)
    rows = rows[np.argsort(group[rows], kind="stable")]
    for run in runs(group[rows]):
        conversion = mapping.conversions[int(group[rows[run.start]])]
        is_whole = run.stop - run.start == len(table)
        chosen = table if is_whole else table.take(pa.array(rows[run]))
        for block in _blocks(chosen, conversion):
            yield _convert(block, conversion)


def _unless_at(early: Flags, lsn: Ints, pending: Collection[Lsn]) -> Flags:
    """Return the rows that are not `early`, and those of the transactions that are `pending`."""
    counts = ~early
    if pending:
        counts[early] = np.isin(lsn[early], np.fromiter(pending, np.int64))
    return counts


class _Lookup(Struct, frozen=True):
    """A SchemaMapping as arrays, indexed by the stored number."""

    now: Ints
    since: Ints
    converts: Flags
    is_multiset: Flags

    @classmethod
    def of(cls, mapping: SchemaMapping, bound: int) -> _Lookup:
        lookup = cls(
            np.full(bound, _SKIPPED, np.int64),
            np.zeros(bound, np.int64),
            np.zeros(bound, np.bool_),
            np.zeros(bound, np.bool_),
        )
        lookup.now[NO_GROUP] = NO_GROUP
        for number in mapping.unchanged:
            if number < bound:
                lookup.now[number] = number
        for number, one in mapping.conversions.items():
            if number < bound:
                lookup.now[number] = one.number
                lookup.converts[number], lookup.is_multiset[number] = not one.keeps_lines, one.is_multiset
        for number, position in mapping.since.items():
            if number < bound:
                lookup.since[number] = position
        return lookup


def _blocks(table: pa.Table, conversion: Conversion) -> Iterator[pa.Table]:
    """Split the table into blocks of whole rows, so that converting a block takes little more than the limits."""
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
    arrays = [columns.get(name, table[name]) for name in table.column_names]
    return pa.Table.from_arrays(arrays, schema=table.schema)
