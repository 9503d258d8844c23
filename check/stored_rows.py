"""Check stored rows against the definitions of their tables, without another copy to compare them with.

A row that COPY did not print, or that COPY can't load, is damage: a line with more or fewer fields than the table has
columns, a key that is not the first fields of its line, a row in the wrong partition, or a value that its type does not
accept. Each rule is a few passes over whole columns. Which bytes a type's values consist of is in PostgreSQL's manual,
"Data Types"; how COPY escapes them is in "COPY", "Text Format".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import Bytes, BytesColumn, Flags, Hashes, Ints, from_arrow, gather, runs, xxhash64
from cutline.columns.fields import read_texts
from cutline.columns.lines import BACKSLASH, ESCAPES, NEWLINE, NULL_MARK, TAB, UNCHANGED_MARK, find_byte
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.wal.segments.segments import (
    CHANGES,
    COMMIT,
    DELETE,
    EVERY_PARTITION,
    INSERT,
    PARTIAL,
    PREPARE,
    TRUNCATE,
    UPSERT,
)

# The built-in types whose values are checked, by oid (PostgreSQL's pg_type.dat).
BOOL, INT8, INT2, INT4, OID, UUID = 16, 20, 21, 23, 26, 2950
BPCHAR, VARCHAR, DATE, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1114, 1184
NUMBERS: Mapping[int, pa.DataType] = {INT2: pa.int16(), INT4: pa.int32(), INT8: pa.int64(), OID: pa.uint32()}
UUID_CHARACTERS, UUID_HYPHENS = 36, (8, 13, 18, 23)
# The modifier of char(n) and varchar(n) is n + 4; without a limit it is -1.
MODIFIER_HEADER = 4
# The bytes that COPY escapes never occur in a line, except for separators.
_IS_SEPARATOR = np.zeros(256, np.bool_)
_IS_SEPARATOR[[0, *(byte for byte in ESCAPES if byte != BACKSLASH)]] = True
# The bytes after a backslash; octal and hexadecimal escapes are never printed.
_IS_LETTER = np.zeros(256, np.bool_)
_IS_LETTER[[letter[0] for letter in ESCAPES.values()]] = True
_HEX = np.zeros(256, np.bool_)
_HEX[list(b"0123456789abcdef")] = True
_TIME = np.zeros(256, np.bool_)
# An ISO date and time, `infinity`, `-infinity`, and BC after a year before the first.
_TIME[list(b"0123456789-+:. BCinfty")] = True


class RowsInvalidError(ValueError):
    """Stored rows contradict the definition of their table; `kind` is the kind of conflict."""

    def __init__(self, detail: str, kind: str = "rows") -> None:
        super().__init__(detail)
        self.kind = kind


def check_base_rows(batch: pa.RecordBatch, groups: Mapping[int, Group], key_hashes: Hashes) -> None:
    """Check the rows of a base copy (BASE_SCHEMA); `key_hashes` are the XXH64 of their keys.

    Raises RowsInvalidError.
    """
    group, partition = to_numpy(batch.column("group")), to_numpy(batch.column("partition"))
    rows, keys = from_arrow(batch.column("row")), from_arrow(batch.column("key"))
    for at in runs(group):
        number = int(group[at.start])
        if number not in groups:
            raise RowsInvalidError(f"it contains rows of group {number}, which no commit defines")
        definition, lines = groups[number], rows.part(at)
        starts, ends = fields_of_lines(lines, definition)
        _check_keys(lines, keys.part(at), ends, definition)
        _check_places(definition, lines, key_hashes[at], partition[at])
        check_values(lines, starts, ends, definition)
        _check_once(definition, key_hashes[at])


@dataclass(slots=True)
class SegmentChecks:
    """The checks of a segment that is read table by table; `groups` are the definitions of the node's tables.

    `open` is the position of the transaction of which the segment has only the beginning. Every method raises
    RowsInvalidError.
    """

    groups: Mapping[int, Group]
    open: Lsn | None = None
    _changed: list[Ints] = field(default_factory=list)
    _ended: list[Ints] = field(default_factory=list)
    _changes: list[Hashes] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        """Check rows of the segment (SEGMENT_SCHEMA)."""
        op, lsn = to_numpy(table["op"]), to_numpy(table["lsn"])
        is_change = np.isin(op, CHANGES)
        self._ended.append(np.unique(lsn[np.isin(op, (COMMIT, PREPARE))]))
        if not is_change.any():
            return
        changes = table.filter(to_mask(is_change))
        check_changes(changes, self.groups)
        self._changed.append(np.unique(lsn[is_change]))
        numbers = np.stack([lsn[is_change], to_numpy(changes["seq"])], axis=1)
        data = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1)
        self._changes.append(xxhash64(BytesColumn(data, np.arange(len(numbers) + 1, dtype=np.int64) * 16)))

    def end(self) -> None:
        """Check what only the whole segment shows: each change once, and each transaction with its end."""
        if not self._changes:
            return
        changes = np.concatenate(self._changes)
        if len(np.unique(changes)) < len(changes):
            raise RowsInvalidError("it contains the same change of a transaction twice")
        ended = np.concatenate([*self._ended, *([[int(self.open)]] if self.open else [])])
        without = np.setdiff1d(np.concatenate(self._changed), ended)
        if len(without):
            raise RowsInvalidError(f"it contains changes at {Lsn(int(without[0]))}, where no transaction ends")


def check_changes(changes: pa.Table, groups: Mapping[int, Group]) -> None:
    """Check the rows of changes (SEGMENT_SCHEMA) against the definitions of their tables; raise RowsInvalidError."""
    for batch in changes.to_batches():
        group, ops = to_numpy(batch.column("group")), to_numpy(batch.column("op"))
        for at in runs(group.astype(np.int64) * 256 + ops):
            number = int(group[at.start])
            if number not in groups:
                raise RowsInvalidError(f"it contains changes of group {number}, which no commit defines")
            _check_changes_of(batch.slice(at.start, at.stop - at.start), int(ops[at.start]), groups[number])


def _check_changes_of(batch: pa.RecordBatch, op: int, group: Group) -> None:
    """Check changes with the same op of one group."""
    keys, rows = from_arrow(batch.column("key")), from_arrow(batch.column("row"))
    partition = to_numpy(batch.column("partition"))
    if op == TRUNCATE:
        if (partition != EVERY_PARTITION).any() or keys.lengths.any() or rows.lengths.any():
            raise RowsInvalidError(f"a TRUNCATE of {group.name} has a key, a row or a partition")
        return
    if op not in ((INSERT, DELETE) if group.is_multiset else (UPSERT, PARTIAL, DELETE)):
        raise RowsInvalidError(f"it contains a change of kind {chr(op)} to {group.name}, whose key does not allow it")
    _check_places(group, rows, xxhash64(keys), partition)
    if op == DELETE and not group.is_multiset:
        key = _key_only(group)
        starts, ends = fields_of_lines(_with_newlines(keys), key)
        check_values(_with_newlines(keys), starts, ends, key)
        renamed = np.flatnonzero(rows.lengths)
        rows = gather(rows.data, rows.offsets[renamed], rows.lengths[renamed])
        fields_of_lines(rows, key)
        return
    starts, ends = fields_of_lines(rows, group)
    _check_keys(rows, keys, ends, group)
    check_values(rows, starts, ends, group, unchanged=op == PARTIAL)


def _key_only(group: Group) -> Group:
    return structs.replace(group, columns=group.columns[: group.key_width])


def _with_newlines(keys: BytesColumn) -> BytesColumn:
    """Return keys as lines."""
    newline, nothing = (pa.scalar(text, pa.large_binary()) for text in (b"\n", b""))
    return from_arrow(pc.binary_join_element_wise(keys.to_large_arrow(), newline, nothing))


def fields_of_lines(lines: BytesColumn, group: Group) -> tuple[Ints, Ints]:
    """Return the starts and ends of the fields of complete lines (rows by columns), as offsets into `lines.data`.

    Raises RowsInvalidError unless each line has a field for each column, ends with its only newline, and contains no
    byte that COPY would have escaped.
    """
    width, count = len(group.columns), len(lines)
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    data = lines.data[first:last]
    line_ends = lines.offsets[1:] - first - 1
    if count and (not lines.lengths.all() or (data[line_ends] != NEWLINE).any()):
        raise RowsInvalidError(f"a row of {group.name} does not end with a newline")
    separators = np.flatnonzero(_IS_SEPARATOR[data])
    if len(separators) != count * max(width, 1) or (data[separators] == NEWLINE).sum() != count:
        raise RowsInvalidError(f"a row of {group.name} does not have {width} fields")
    ends = separators.reshape(count, max(width, 1))
    if count and ((ends[:, -1] != line_ends).any() or (data[ends[:, :-1]] != TAB).any()):
        raise RowsInvalidError(f"a row of {group.name} does not have {width} fields")
    starts = np.concatenate([lines.offsets[:-1].reshape(-1, 1) - first, ends[:, :-1] + 1], axis=1)
    return starts + first, ends + first


def _check_keys(lines: BytesColumn, keys: BytesColumn, ends: Ints, group: Group) -> None:
    """Check that each key is the first fields of its line; empty if the group has no key."""
    if group.is_multiset:
        if keys.lengths.any():
            raise RowsInvalidError(f"a row of {group.name} has a key, but the table has none")
        return
    begins = lines.offsets[:-1]
    expected = gather(lines.data, begins, ends[:, group.key_width - 1] - begins)
    if not expected.equals(keys).all():
        raise RowsInvalidError(f"a row of {group.name} is stored under a key other than its own")


def _check_places(group: Group, rows: BytesColumn, key_hashes: Hashes, partition: Ints) -> None:
    hashes = xxhash64(rows) if group.is_multiset else key_hashes
    if ((hashes & np.uint64(group.partitions - 1)).astype(np.int64) != partition).any():
        raise RowsInvalidError(f"a row of {group.name} is in the wrong partition", kind="partition")


def _check_once(group: Group, key_hashes: Hashes) -> None:
    """Check that no key occurs twice. Different keys of one table with equal hashes are less likely than bit errors."""
    if not group.is_multiset and len(np.unique(key_hashes)) < len(key_hashes):
        raise RowsInvalidError(f"it contains two rows of {group.name} with the same key")


def check_values(lines: BytesColumn, starts: Ints, ends: Ints, group: Group, *, unchanged: bool = False) -> None:
    """Check the escapes of all fields, and the values of the types that are cheap to check.

    `starts` and `ends` are the fields' offsets into `lines.data`. If `unchanged`, fields may have the mark for values
    that an UPDATE left unchanged. Raises RowsInvalidError.
    """
    data = lines.data
    is_mark = _find_marks(data, starts, ends, NULL_MARK)
    if unchanged:
        is_mark |= _find_marks(data, starts, ends, UNCHANGED_MARK)
    _check_escapes(lines, starts[is_mark], group)
    for number, column in enumerate(group.columns):
        chosen = ~is_mark[:, number]
        begins, lengths = starts[chosen, number], (ends - starts)[chosen, number]
        if len(begins) and not _are_valid(data, begins, lengths, column):
            raise RowsInvalidError(
                f"column {column.name} of {group.name} contains a value that type {column.type} does not accept"
            )


def _find_marks(data: Bytes, starts: Ints, ends: Ints, mark: bytes) -> Flags:
    found: Flags = ends - starts == len(mark)
    places = starts[found]
    found[found] = (data[places] == mark[0]) & (data[places + 1] == mark[1])
    return found


def _check_escapes(lines: BytesColumn, marks: Ints, group: Group) -> None:
    """Check that each backslash begins an escape that COPY prints, or a mark at one of the offsets `marks`."""
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    slashes = find_byte(lines.data[first:last], BACKSLASH) + first
    if not len(slashes):
        return
    # In a run of backslashes, each pair is an escape. The last one of an odd run escapes the next byte.
    is_begin = np.concatenate([[True], np.diff(slashes) > 1])
    begins = np.flatnonzero(is_begin)
    counts = np.diff(np.append(begins, len(slashes)))
    odd = counts % 2 == 1
    escaped = lines.data[slashes[begins[odd]] + counts[odd]]
    unknown = slashes[begins[odd]][~_IS_LETTER[escaped]]
    if not np.isin(unknown, marks).all():
        raise RowsInvalidError(f"a row of {group.name} contains an escape that COPY does not print")


def _are_valid(data: Bytes, starts: Ints, lengths: Ints, column: Column) -> bool:
    """Whether the type accepts all of these values; types that are not checked accept all."""
    if column.type_oid in NUMBERS:
        return _are_numbers(gather(data, starts, lengths), NUMBERS[column.type_oid])
    if column.type_oid == BOOL:
        return bool((lengths == 1).all() and np.isin(data[starts], list(b"tf")).all())
    if column.type_oid == UUID:
        return bool((lengths == UUID_CHARACTERS).all()) and _are_uuids(data, starts)
    if column.type_oid in (DATE, TIMESTAMP, TIMESTAMPTZ):
        return bool(lengths.all()) and bool(_TIME[gather(data, starts, lengths).data].all())
    if column.type_oid in (BPCHAR, VARCHAR) and column.type_modifier >= MODIFIER_HEADER:
        limit = column.type_modifier - MODIFIER_HEADER
        long = lengths > limit
        return _are_within(gather(data, starts[long], lengths[long]), limit)
    return True


def _are_numbers(values: BytesColumn, type_: pa.DataType) -> bool:
    try:
        values.to_large_arrow().cast(pa.large_string()).cast(type_)
    except pa.ArrowInvalid:
        return False
    return True


def _are_uuids(data: Bytes, starts: Ints) -> bool:
    for place in range(UUID_CHARACTERS):
        bytes_ = data[starts + place]
        if not (bytes_ == ord("-") if place in UUID_HYPHENS else _HEX[bytes_]).all():
            return False
    return True


def _are_within(values: BytesColumn, limit: int) -> bool:
    """Whether the values, of more bytes than `limit`, have at most `limit` characters in UTF-8, without escapes."""
    if not len(values):
        return True
    try:
        texts = read_texts(values).to_large_arrow().cast(pa.large_string())
    except pa.ArrowInvalid:
        # The database has another encoding, in which the characters can't be counted here.
        return True
    return int(pc.max(pc.utf8_length(texts)).as_py()) <= limit
