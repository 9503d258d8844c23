"""Check stored rows against the definitions of their tables, without another copy to compare them with.

A row that COPY did not print, or that COPY can't load, is damage: a line with more or fewer fields than the table has
columns, a key that is not the first fields of its line, a row in the wrong partition, a key that occurs twice, or a
value that its type does not accept. Each rule is a few passes over whole columns, which may contain rows of thousands
of tables in any order. Values in their usual form are recognised eight bytes at a time; only the others are parsed.
Source: PostgreSQL manual, COPY, "Text Format", and "Data Types".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct, field

from cutline.check.own_types import CompositeType, EnumType, OwnType, OwnTypes
from cutline.check.table_forms import (
    BOOL,
    DATE,
    INT2,
    INT4,
    INT8,
    LIMITED,
    OID,
    TEXTS,
    TIMES,
    TIMESTAMPTZ,
    UUID,
    Numbers,
    TableForms,
)
from cutline.check.value_forms import (
    NAMES,
    NUMERIC,
    OTHERS_OF_FIXED_SIZE,
    find_misprinted,
    find_other_composite,
    precision_of,
)
from cutline.columns.arrow_numbers import to_flags, to_mask, to_numpy
from cutline.columns.bytes_column import (
    Bytes,
    BytesColumn,
    Flags,
    Hashes,
    Ints,
    column_of,
    from_arrow,
    gather,
    offsets_of,
    xxhash64,
)
from cutline.columns.fields import read_texts
from cutline.columns.lines import (
    BACKSLASH,
    ESCAPES,
    NEWLINE,
    NULL_MARK,
    TAB,
    UNCHANGED_MARK,
    count_byte,
    find_byte,
)
from cutline.nodes.groups import Group, copy_line
from cutline.wal.segments.segments import (
    CHANGES,
    DELETE,
    EVERY_PARTITION,
    INSERT,
    PARTIAL,
    TRUNCATE,
    UPSERT,
    are_of,
)

UUID_FORM = b"00000000-0000-0000-0000-000000000000"
DATE_CHARACTERS, TIMESTAMP_CHARACTERS, UTC_OFFSET = len("2000-01-01"), len("2000-01-01 00:00:00"), b"+00"
# Values of these types are never stored outside of their rows, so an UPDATE always has them: pg_type.typlen > 0.
FIXED_SIZE = {BOOL, INT2, INT4, INT8, OID, UUID, *OTHERS_OF_FIXED_SIZE}
# The most digits that a number may have, and the first digit from which on a number with so many digits is parsed.
DIGITS: Mapping[int, tuple[int, int]] = {
    INT2: (5, ord("3")), INT4: (10, ord("2")), INT8: (19, ord("9")), OID: (10, ord("4"))
}  # fmt: skip
PARSED: Mapping[int, pa.DataType] = {INT2: pa.int16(), INT4: pa.int32(), INT8: pa.int64(), OID: pa.uint32()}
# Lines are checked in blocks of about this many fields, and of BLOCK_BYTES. Smaller blocks fit better into the CPU
# cache, but threads wait for each other at the end of every operation (measured: a fifth of the time with 1 << 16).
FIELDS_PER_BLOCK, BLOCK_BYTES = 1 << 18, 1 << 22
# With fewer lines than this, calls for each column take more time than one for all of a type.
LINES_BY_COLUMN_MIN = 1024
# The changes of a segment are checked in parts, because the rows of some kinds are copied.
PART_BYTES = 16 << 20
# At most this many bytes of values are matched or parsed at once, and longer values are not.
PARSED_BYTES_MAX = 16 << 20
# At most this many keys whose hashes occur twice are compared at once.
COMPARED_KEYS = 100_000
WORD_BYTES = 8
# Longer keys are not compared word by word, and values that are longer are not valid at a glance.
COMPARED_BYTES_MAX, GLANCE_BYTES_MAX = 64, 40
# Shifts that align the first n bytes of a word with its end, and zeros that fill the rest.
_SHIFTS = np.array([0, *(8 * (WORD_BYTES - count) for count in range(1, 9))], np.uint64)
_ZEROS = np.array([int.from_bytes(b"0" * (WORD_BYTES - count), "little") for count in range(9)], np.uint64)
_BYTE = np.uint64(0xFF)
_HIGH, _SIXES, _THREES = (np.uint64(byte * 0x0101010101010101) for byte in (0xF0, 0x06, 0x33))
# COPY escapes the bytes from backspace to carriage return, so in a line they are only separators. Most lines have no
# other bytes up to carriage return.
_SEPARATOR_MIN, _SEPARATOR_MAX = np.uint8(min(ESCAPES)), np.uint8(ord("\r"))
# The bytes after a backslash; COPY reads octal and hexadecimal escapes, but never prints them.
_IS_LETTER = np.zeros(256, np.bool_)
_IS_LETTER[[letter[0] for letter in ESCAPES.values()]] = True
# The words of a timestamp whose digits are all 0; and the numbers that may be added to each byte, once these words are
# removed, without making it larger than 15: 6 to a digit that may be 9, 10 to one up to 5, 15 to a separator.
_YEAR_MONTH, _DAY_HOUR_MINUTE, _SECOND = (
    np.uint64(int.from_bytes(text, "little")) for text in (b"0000-00-", b"00 00:00", b":00")
)
_IN_YEAR_MONTH, _IN_DAY_HOUR_MINUTE, _IN_SECOND = (
    np.uint64(int.from_bytes(bytes(15 - (byte - ord("0") if byte in b"0123456789" else 0) for byte in text), "little"))
    for text in (b"9999-19-", b"39 29:59", b":59")
)
_TWO_BYTES, _THREE_BYTES, _FOUR_BYTES = (np.uint64((1 << 8 * count) - 1) for count in (2, 3, 4))
# Masks that turn the first of the last n bytes of a word into a digit if it is a point.
_POINTS = np.array([0, *((ord(".") ^ ord("0")) << 8 * (WORD_BYTES - count) for count in range(1, 9))], np.uint64)
# The words of a UUID of zeros, and masks of its hyphens and of the bytes after it.
_UUID_TEXT = UUID_FORM.ljust(-(-len(UUID_FORM) // WORD_BYTES) * WORD_BYTES, b"0")
_UUID = np.frombuffer(_UUID_TEXT, np.dtype("<u8"))
_HYPHENS = np.frombuffer(bytes(0xFF if byte == ord("-") else 0 for byte in _UUID_TEXT), np.dtype("<u8"))
_AFTER_UUID = np.uint64((1 << 64) - (1 << 8 * (len(UUID_FORM) % WORD_BYTES)))
# Turns hyphens into zeros.
_HYPHENS_TO_ZEROS = _HYPHENS & np.uint64((ord("-") ^ ord("0")) * 0x0101010101010101)
_DAYS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0])
# The types with known forms whose usual values are recognised at a glance.
GLANCED = TIMES | {NUMERIC}
# Numbers with more decimal places, or more characters, are parsed.
GLANCED_SCALE_MAX, GLANCED_CHARACTERS_MAX = 6, 16
# To distinguish the keys of different tables, and changes with different positions, by hash.
_SALT, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class MarkedFields(NamedTuple):
    """Fields with a mark, such as that of NULL: the number of each field's line, and the place of its column."""

    line: Ints
    place: Ints


NO_FIELDS = MarkedFields(np.empty(0, np.int64), np.empty(0, np.int64))


class RowsInvalidError(ValueError):
    """Stored rows contradict the definition of their table; `kind` is the kind of conflict."""

    def __init__(self, detail: str, kind: str = "rows") -> None:
        super().__init__(detail)
        self.kind = kind


class BaseChecks(Struct):
    """The checks of an object of a base copy, which is read batch by batch; `forms` are those of the node's tables.

    Every method raises RowsInvalidError.
    """

    forms: TableForms
    _keys: list[Hashes] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch, key_hashes: Hashes) -> MarkedFields:
        """Check rows (BASE_SCHEMA) and return their fields that are NULL; `key_hashes` are the XXH64 of their keys."""
        if not len(batch):
            return NO_FIELDS
        group, partition = to_numpy(batch.column("group")), to_numpy(batch.column("partition"))
        rows, keys = from_arrow(batch.column("row")), from_arrow(batch.column("key"))
        forms = _find_forms(self.forms, group, "rows of group {}, which no commit defines")
        _check_places(self.forms, forms, rows, key_hashes, partition)
        nulls = _check_lines(self.forms, forms, rows, keys)
        has_key = self.forms.key_widths[forms] > 0
        hashes = salted(key_hashes, group)
        self._keys.append(hashes if has_key.all() else hashes[has_key])
        return nulls

    def end(self, read_again: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        """Check that no key occurs twice; `read_again` yields the batches once more, to compare keys of equal hash."""
        hashes = np.concatenate([np.empty(0, np.uint64), *self._keys])
        self._keys.clear()
        hashes.sort()
        repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
        for start in range(0, len(repeated), COMPARED_KEYS):
            name = _find_equal_keys(self.forms, read_again(), repeated[start : start + COMPARED_KEYS])
            if name is not None:
                raise RowsInvalidError(
                    f"it contains two rows of {name} with the same key (the table itself may contain them, if the index"
                    " of its key was damaged)",
                    kind="duplicate",
                )


def salted(key_hashes: Hashes, group: npt.NDArray[Any]) -> Hashes:
    """Return hashes of keys that also distinguish the keys of different tables."""
    return key_hashes ^ (group.astype(np.uint64) * _SALT)


def _find_equal_keys(forms: TableForms, batches: Iterable[pa.RecordBatch], hashes: Hashes) -> str | None:
    """Find two rows with the same key, whose salted hash is among `hashes`; return the name of their table."""
    found: set[tuple[int, bytes]] = set()
    for batch in batches:
        group, keys = to_numpy(batch.column("group")), batch.column("key")
        chosen = np.isin(salted(xxhash64(from_arrow(keys)), group), hashes)
        chosen[chosen] = forms.key_widths[forms.find(group[chosen].astype(np.int64))] > 0
        # These are only the keys that share a hash with others.
        for number, key in zip(group[chosen].tolist(), keys.filter(to_mask(chosen)).to_pylist(), strict=True):
            if (number, key) in found:
                return forms.table(int(forms.find(np.array([number]))[0]))
            found.add((number, key))
    return None


def invalid_older_values(groups: Iterable[Group], own: OwnTypes) -> list[str]:
    """Describe values of added columns in older rows (Column.missing) that their types do not accept.

    `own` are the types of columns that users have created.
    """
    found: list[str] = []
    for group in groups:
        if all(column.missing is None for column in group.columns):
            continue
        values = [NULL_MARK if column.missing is None else copy_line(column.missing) for column in group.columns]
        line = column_of(pa.array([b"\t".join(values) + b"\n"], pa.large_binary()))
        try:
            _check_lines(TableForms.of([group], own), np.zeros(1, np.int64), line, None)
        except RowsInvalidError as error:
            found.append(f"the value of older rows: {error}")
    return list(dict.fromkeys(found))


class SegmentChecks(Struct):
    """The checks of a segment that is read table by table; `forms` are those of the node's tables.

    Every method raises RowsInvalidError.
    """

    forms: TableForms
    _changes: list[Hashes] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        """Check rows of the segment (SEGMENT_SCHEMA)."""
        is_change = are_of(to_numpy(table["op"]), CHANGES)
        if not is_change.any():
            return
        # Changes and events are in separate row groups, and a row may be 1 GB: copy no rows without need.
        changes = table if is_change.all() else table.filter(to_mask(is_change))
        for batch in changes.to_batches():
            for at in _slices_of_bytes(from_arrow(batch.column("row")).offsets, PART_BYTES):
                _check_changes(batch.slice(at.start, at.stop - at.start), self.forms)
        # A TRUNCATE of several tables is a change of each of them, all with the same number.
        position, number, group = (to_numpy(changes[name]).astype(np.uint64) for name in ("lsn", "seq", "group"))
        self._changes.append((position * _SALT + number) * _MIX + group)

    def end(self, read_again: Callable[[], Iterator[pa.Table]]) -> None:
        """Check that each change occurs once, which only the whole segment shows.

        `read_again` yields the tables once more, to compare changes of equal hash.
        """
        if not self._changes:
            return
        hashes = np.sort(np.concatenate(self._changes))
        if (hashes[1:] == hashes[:-1]).any() and _has_equal_changes(read_again()):
            raise RowsInvalidError("it contains the same change of a transaction twice")


def _has_equal_changes(tables: Iterable[pa.Table]) -> bool:
    """Whether two changes have the same position, number and group."""
    parts = [
        np.stack([to_numpy(table[name]).astype(np.int64) for name in ("lsn", "seq", "group")], axis=1)
        for table in tables
    ]
    numbers = np.concatenate([np.empty((0, 3), np.int64), *parts])
    # Events have no group.
    numbers = numbers[numbers[:, 2] > 0]
    ordered = numbers[np.lexsort(numbers.T)]
    return bool((ordered[1:] == ordered[:-1]).all(axis=1).any())


def _check_changes(batch: pa.RecordBatch, forms: TableForms) -> None:
    """Check changes (SEGMENT_SCHEMA) of any tables, in any order."""
    op, partition = to_numpy(batch.column("op")), to_numpy(batch.column("partition"))
    keys, rows = from_arrow(batch.column("key")), from_arrow(batch.column("row"))
    form = _find_forms(
        forms, to_numpy(batch.column("group")), "changes of group {}, which neither it nor a commit defines"
    )
    has_key = forms.key_widths[form] > 0
    is_truncate, is_delete = op == TRUNCATE, op == DELETE
    is_wrong = is_truncate & ((partition != EVERY_PARTITION) | (keys.lengths > 0) | (rows.lengths > 0))
    if is_wrong.any():
        name = forms.table(int(form[is_wrong.argmax()]))
        raise RowsInvalidError(f"a TRUNCATE of {name} has a key, a row or a partition")
    of_keyed, of_others = are_of(op, (UPSERT, PARTIAL)), op == INSERT
    is_wrong = ~(is_truncate | is_delete | np.where(has_key, of_keyed, of_others))
    if is_wrong.any():
        at = int(is_wrong.argmax())
        name = forms.table(int(form[at]))
        raise RowsInvalidError(f"it contains a change of kind {chr(op[at])} to {name}, whose key does not allow it")
    _check_places(forms, form, rows, xxhash64(keys), partition, ~is_truncate)
    keyed_delete = is_delete & has_key
    for chosen, unchanged in ((~is_truncate & ~keyed_delete & (op != PARTIAL), False), (op == PARTIAL, True)):
        if chosen.all():
            _check_lines(forms, form, rows, keys, unchanged=unchanged)
        elif chosen.any():
            places = np.flatnonzero(chosen)
            # The rows between them are usually DELETEs, which have no line.
            lines = rows.take_ascending(places)
            _check_lines(forms, form[places], lines, keys.take(places), unchanged=unchanged)
    if keyed_delete.any():
        places = np.flatnonzero(keyed_delete)
        _check_lines(forms.keys, form[places], _with_newlines(keys.take(places)), None)
        # The row's new key, if an update changed the key and left values out.
        renamed = places[rows.lengths[places] > 0]
        if len(renamed):
            _check_lines(forms.keys, form[renamed], rows.take(renamed), None)


def _with_newlines(keys: BytesColumn) -> BytesColumn:
    newline, nothing = (pa.scalar(text, pa.large_binary()) for text in (b"\n", b""))
    return column_of(pc.binary_join_element_wise(keys.to_large_arrow(), newline, nothing))


def _find_forms(forms: TableForms, group: npt.NDArray[Any], what: str) -> Ints:
    """Return the form of each row's table; `what` describes rows of an unknown group, for the error."""
    starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
    numbers = group[starts].astype(np.int64)
    known = forms.has(numbers)
    if not known.all():
        raise RowsInvalidError(f"it contains {what.format(int(numbers[known.argmin()]))}")
    return np.repeat(forms.find(numbers), np.diff(np.append(starts, len(group))))


def _check_places(
    forms: TableForms,
    form: Ints,
    rows: BytesColumn,
    key_hashes: Hashes,
    partition: npt.NDArray[Any],
    chosen: Flags | None = None,
) -> None:
    """Check that each row is in the partition of its key or, without a key, of its line; only the `chosen` rows."""
    hashes, without_key = key_hashes, forms.key_widths[form] == 0
    if without_key.all():
        hashes = xxhash64(rows)
    elif without_key.any():
        hashes = hashes.copy()
        hashes[without_key] = xxhash64(rows.take(np.flatnonzero(without_key)))
    is_wrong = (hashes & forms.masks[form].astype(np.uint64)).astype(np.int64) != partition
    if chosen is not None:
        is_wrong &= chosen
    if is_wrong.any():
        name = forms.table(int(form[is_wrong.argmax()]))
        raise RowsInvalidError(f"a row of {name} is in the wrong partition", kind="partition")


class _Words(Struct, frozen=True):
    """Text as numbers: item i are the 8 bytes from offset i on. More bytes follow the text, which mean nothing."""

    text: Bytes
    items: npt.NDArray[np.uint64]

    @classmethod
    def of(cls, data: Bytes, start: int = 0, stop: int | None = None) -> _Words:
        """Return the words of a range of `data`, which is copied if it ends with the range."""
        stop = len(data) if stop is None else stop
        text = data[start : stop + WORD_BYTES]
        if len(text) < stop - start + WORD_BYTES:
            text = np.concatenate([data[start:stop], np.zeros(WORD_BYTES, np.uint8)])
        return cls(text, np.ndarray((stop - start + 1,), np.dtype("<u8"), text, strides=(1,)))

    def __getitem__(self, offsets: Ints) -> npt.NDArray[np.uint64]:
        """Return the words at these offsets."""
        return self.items[offsets]

    def rows(self, offsets: Ints, count: int) -> npt.NDArray[np.uint64]:
        """Return `count` words from each offset on, of which all but the last belong to the text; one row for each."""
        # numpy copies an item of any length in about the same time as a word that is not aligned.
        width = count * WORD_BYTES
        items = np.ndarray((max(len(self.text) - width + 1, 0),), np.dtype(f"V{width}"), self.text, strides=(1,))
        found: npt.NDArray[np.uint64] = items[offsets].view(np.dtype("<u8")).reshape(len(offsets), count)
        return found


class _Values(NamedTuple):
    """Values of a type: where they start and end, and their limits, if any.

    Their fields have the numbers `lines` + `places`: each line's first field, and the place of the column.
    """

    lines: Ints
    places: Numbers
    starts: Ints
    ends: Ints
    limits: Numbers | None

    def fields(self, rows: Ints) -> Ints:
        """Return the numbers of the fields of these values."""
        return self.lines[rows] + self.places[rows]


class _Block(Struct, frozen=True):
    """Complete lines, split into fields, which are numbered across all lines.

    `form` is the form of each line's table, and `first` the line's first field. `starts` and `ends` of the fields are
    offsets into `data`; a separator follows each field. `words` are None if the data is too long to be copied.
    """

    forms: TableForms
    form: Ints
    first: Ints
    data: Bytes
    starts: Ints
    ends: Ints
    words: _Words | None

    def values_of(self, oid: int) -> Iterator[_Values]:
        """Yield all values of a type. If many lines have the same form, yield column by column, without copying."""
        columns, form = self.forms.types[oid], int(self.form[0])
        is_limited = self.forms.base_of(oid) in LIMITED
        if len(self.form) < LINES_BY_COLUMN_MIN or (self.form != form).any():
            found = columns.of_forms(self.form)
            lines, places = np.repeat(self.first, columns.counts(self.form)), columns.places[found]
            fields = lines + places
            limits = columns.limits[found] if is_limited else None
            yield _Values(lines, places, self.starts[fields], self.ends[fields], limits)
            return
        count = len(self.first)
        starts, ends = self.starts.reshape(count, -1), self.ends.reshape(count, -1)
        for number in range(int(columns.offsets[form]), int(columns.offsets[form + 1])):
            place = columns.places[number]
            limits = np.broadcast_to(columns.limits[number], count) if is_limited else None
            yield _Values(self.first, np.broadcast_to(place, count), starts[:, place], ends[:, place], limits)

    def with_separators(self, fields: Ints) -> BytesColumn:
        """Copy fields, each with the separator that follows it; faster than copying them alone."""
        return BytesColumn(self.data, np.append(self.starts, len(self.data))).take(fields)

    def locate(self, field: int) -> tuple[int, int]:
        """Return the form of a field's table, and the place of its column."""
        line = int(np.searchsorted(self.first, field, side="right")) - 1
        return int(self.form[line]), field - int(self.first[line])


def _check_lines(
    forms: TableForms, form: Ints, lines: BytesColumn, keys: BytesColumn | None, *, unchanged: bool = False
) -> MarkedFields:
    """Check lines and, unless `keys` is None, that each key is the first fields of its line; return fields with marks.

    If `unchanged`, fields may have the mark for values that an UPDATE left unchanged; otherwise the mark is NULL's.
    """
    found = [NO_FIELDS]
    # A line of a table without columns has one empty field.
    widths = np.maximum(forms.widths, 1)[form]
    for at in _block_slices(lines.offsets, widths):
        if forms.is_utf8:
            _check_encoding(forms, form[at], lines.part(at))
        block = _split(forms, form[at], lines, at, widths[at])
        if keys is not None:
            _check_keys(block, keys.part(at))
        fields = _check_values(block, unchanged=unchanged)
        line = np.searchsorted(block.first, fields, side="right") - 1
        found.append(MarkedFields(line + at.start, fields - block.first[line]))
    return MarkedFields(*map(np.concatenate, zip(*found, strict=True)))


def _check_encoding(forms: TableForms, form: Ints, lines: BytesColumn) -> None:
    """Check that lines are in UTF-8, without surrogates, as PostgreSQL does."""
    try:
        lines.to_large_arrow().cast(pa.large_string())
    except pa.ArrowInvalid:
        for number, line in enumerate(lines.to_large_arrow()):  # up to the first that is not
            try:
                line.as_py().decode()
            except UnicodeDecodeError as error:
                raise RowsInvalidError(
                    f"a row of {forms.table(int(form[number]))} is not in the database's encoding, UTF8: {error.reason}"
                    " (the table itself may contain it, if a function made it)"
                ) from None


def _block_slices(offsets: Ints, widths: Ints) -> Iterator[slice]:
    """Yield ranges of lines of FIELDS_PER_BLOCK fields and BLOCK_BYTES at most, or of one line."""
    fields = np.concatenate([[0], np.cumsum(widths)])
    for at in _slices_of_bytes(offsets, BLOCK_BYTES):
        low = at.start
        while low < at.stop:
            high = int(np.searchsorted(fields, fields[low] + FIELDS_PER_BLOCK, side="right")) - 1
            high = min(max(high, low + 1), at.stop)
            yield slice(low, high)
            low = high


def _slices_of_bytes(offsets: Ints, bytes_max: int) -> Iterator[slice]:
    """Yield ranges of values that have at most this many bytes together, or of one value."""
    low, count = 0, len(offsets) - 1
    while low < count:
        high = max(int(np.searchsorted(offsets, offsets[low] + bytes_max, side="right")) - 1, low + 1)
        yield slice(low, high)
        low = high


def _split(forms: TableForms, form: Ints, all_lines: BytesColumn, at: slice, widths: Ints) -> _Block:
    """Split a range of lines into their fields.

    Raises RowsInvalidError unless each line has a field for each column, ends with its only newline, and contains no
    byte that COPY would have escaped.
    """
    lines = all_lines.part(at)
    data, line_ends = lines.data, lines.offsets[1:] - 1
    ends_well = (data[line_ends] == NEWLINE) & (lines.lengths > 0) if len(data) else np.zeros(len(lines), np.bool_)
    if not ends_well.all():
        name = forms.table(int(form[ends_well.argmin()]))
        raise RowsInvalidError(f"a row of {name} does not end with a newline")
    ends = _low_bytes(data)
    kinds = data[ends]
    lowest = int(kinds.min(initial=TAB))
    if lowest < _SEPARATOR_MIN:
        # Other control characters are no separators, and COPY prints them as they are.
        are_separators = kinds >= _SEPARATOR_MIN
        ends, kinds = ends[are_separators], kinds[are_separators]
    next_fields = np.cumsum(widths)
    if (
        len(ends) != next_fields[-1]
        or (ends[next_fields - 1] != line_ends).any()
        or np.count_nonzero(kinds == TAB) != len(ends) - len(lines)
        or not lowest
    ):
        number = _find_misfit(lines, ends, widths)
        raise RowsInvalidError(
            f"a row of {forms.table(int(form[number]))} does not have {forms.widths[form[number]]} fields, or contains"
            " a byte that COPY would have escaped"
        )
    starts = np.empty_like(ends)
    # Each line follows the newline of the line before.
    starts[0], starts[1:] = 0, ends[:-1] + 1
    # Only a single line can be longer than a block.
    first, last = all_lines.offsets[[at.start, at.stop]].tolist()
    words = _Words.of(all_lines.data, first, last) if len(data) <= BLOCK_BYTES else None
    return _Block(forms, form, next_fields - widths, data, starts, ends, words)


def _low_bytes(data: Bytes) -> Ints:
    """Return the offsets of all bytes up to the last separator."""
    if len(data) <= BLOCK_BYTES:
        return np.flatnonzero(data <= _SEPARATOR_MAX)
    blocks = range(0, len(data), BLOCK_BYTES)
    return np.concatenate([low + np.flatnonzero(data[low : low + BLOCK_BYTES] <= _SEPARATOR_MAX) for low in blocks])


def _find_misfit(lines: BytesColumn, separators: Ints, widths: Ints) -> int:
    """Find the first line that has other separators than a line of its table."""
    tabs, zeros = separators[lines.data[separators] == TAB], find_byte(lines.data, 0)
    counts = [np.diff(np.searchsorted(places, lines.offsets)) for places in (separators, tabs, zeros)]
    return int(((counts[0] != widths) | (counts[1] != widths - 1) | (counts[2] > 0)).argmax())


def _check_keys(block: _Block, keys: BytesColumn) -> None:
    """Check that each key is the first fields of its line; empty if the table has no key."""
    key_widths, begins = block.forms.key_widths[block.form], block.starts[block.first]
    ends = np.where(key_widths > 0, block.ends[block.first + np.maximum(key_widths, 1) - 1], begins)
    is_equal: Flags = ends - begins == keys.lengths
    if is_equal.all():
        is_equal = _are_equal(block, begins, keys)
    if not is_equal.all():
        at = int(is_equal.argmin())
        name = block.forms.table(int(block.form[at]))
        raise RowsInvalidError(
            f"a row of {name} is stored under a key other than its own"
            if key_widths[at]
            else f"a row of {name} has a key, but the table has none"
        )


def _are_equal(block: _Block, starts: Ints, keys: BytesColumn) -> Flags:
    """Compare keys with as many bytes of the block's data from `starts` on."""
    lengths = keys.lengths
    longest = int(lengths.max())
    if block.words is None or longest > COMPARED_BYTES_MAX:
        return gather(block.data, starts, lengths).equals(keys)
    first, last = keys.offsets[[0, -1]].tolist()
    words, places = _Words.of(keys.data, first, last), keys.offsets[:-1] - first
    is_equal = np.ones(len(starts), np.bool_)
    for position in range(0, longest, WORD_BYTES):
        rows: Any = slice(None) if (lengths > position).all() else np.flatnonzero(lengths > position)
        left = np.minimum(lengths[rows] - position, WORD_BYTES)
        differing = block.words[starts[rows] + position] ^ words[places[rows] + position]
        is_equal[rows] &= differing << _SHIFTS[left] == 0
    return is_equal


def _check_values(block: _Block, *, unchanged: bool) -> Ints:
    """Check all escapes, and the values of the types that are cheap to check; return the fields with marks."""
    marks = (NULL_MARK, UNCHANGED_MARK) if unchanged else (NULL_MARK,)
    marked, has_escapes = _check_escapes(block, marks)
    for oid in block.forms.types:
        for values in block.values_of(oid):
            _check_type(block, oid, values, marks, has_escapes=has_escapes)
    return marked


def _check_type(block: _Block, oid: int, values: _Values, marks: tuple[bytes, ...], *, has_escapes: bool) -> None:
    """Check values of a type. Only those that are not valid at a glance are copied."""
    starts, limits = values.starts, values.limits
    lengths = values.ends - starts
    others = np.flatnonzero(~_are_usual(block, oid, starts, lengths, limits))
    base, own = block.forms.base_of(oid), block.forms.definition_of(oid)
    of_type = (NULL_MARK,) if base in FIXED_SIZE or isinstance(own, EnumType) else marks
    others = others[~_are_marks(block.data, starts[others], lengths[others], of_type)]
    if not len(others):
        return
    given = limits[others] if limits is not None else None
    fields = values.fields(others)
    if base in NAMES or isinstance(own, CompositeType):
        at = _find_misprinted(block, oid, fields, lengths[others], given, has_escapes=has_escapes)
    else:
        at = _find_invalid(gather(block.data, starts[others], lengths[others]), base, given, own)
    if at is not None:
        form, place = block.locate(int(fields[at]))
        type_ = block.forms.type_name(oid, None if given is None else int(given[at]))
        raise RowsInvalidError(
            f"column {block.forms.column(form, place)} of {block.forms.table(form)} contains a value that type"
            f" {type_} does not accept or print"
        )


def _find_misprinted(
    block: _Block, oid: int, fields: Ints, lengths: Ints, limits: Numbers | None, *, has_escapes: bool
) -> int | None:
    """Return the index of the first field that does not have the form of its type; long values are not parsed."""
    rows = np.arange(len(fields))
    if len(block.data) > BLOCK_BYTES:
        rows = rows[lengths <= PARSED_BYTES_MAX]
    for at in _slices_of_bytes(offsets_of(lengths[rows]), PARSED_BYTES_MAX):
        part = rows[at]
        values = block.with_separators(fields[part])
        own = block.forms.definition_of(oid)
        if isinstance(own, CompositeType):
            found = find_other_composite(values, own.versions)
        else:
            modifiers = None if limits is None else limits[part]
            found = find_misprinted(values, block.forms.base_of(oid), modifiers, has_escapes=has_escapes)
        if found is not None:
            return int(part[found])
    return None


def _are_marks(data: Bytes, starts: Ints, lengths: Ints, marks: tuple[bytes, ...]) -> Flags:
    found: Flags = lengths == len(NULL_MARK)
    found[found] = _begin_with(data, starts[found], marks)
    return found


def _begin_with(data: Bytes, starts: Ints, marks: tuple[bytes, ...]) -> Flags:
    second = np.zeros(256, np.bool_)
    second[[mark[1] for mark in marks]] = True
    found: Flags = (data[starts] == BACKSLASH) & second[data[starts + 1]]
    return found


def _check_escapes(block: _Block, marks: tuple[bytes, ...]) -> tuple[Ints, bool]:
    """Check that each backslash begins an escape that COPY prints, or one of the marks, which is a whole field.

    Returns the numbers of the fields with marks, and whether there are other backslashes.
    """
    data = block.data
    count = count_byte(data, BACKSLASH)
    if not count:
        return np.empty(0, np.int64), False
    short = np.flatnonzero(block.ends - block.starts == len(NULL_MARK))
    marked = short[_begin_with(data, block.starts[short], marks)]
    # Most tables have no other backslashes than those of NULLs.
    if len(marked) == count:
        return marked, False
    slashes = find_byte(data, BACKSLASH)
    # In a run of backslashes, each pair is an escape. The last one of an odd run escapes the next byte.
    begins = np.flatnonzero(np.concatenate([[True], np.diff(slashes) > 1]))
    counts = np.diff(np.append(begins, len(slashes)))
    last = slashes[begins + counts - 1][counts % 2 == 1]
    is_known: Flags = _IS_LETTER[data[last + 1]]
    if is_known.all():
        return slashes[:0], True
    unknown = last[~is_known]
    # Fields are in order, so the field that contains a backslash is the last one that starts at or before it.
    places: Ints = np.searchsorted(block.starts, unknown, side="right") - 1
    starts = block.starts[places]
    is_mark = (starts == unknown) & _are_marks(data, starts, block.ends[places] - starts, marks)
    if not is_mark.all():
        form, _ = block.locate(int(places[is_mark.argmin()]))
        raise RowsInvalidError(f"a row of {block.forms.table(form)} contains an escape that COPY does not print")
    return places, True


def _are_usual(block: _Block, oid: int, starts: Ints, lengths: Ints, limits: Numbers | None) -> Flags:
    """Flag values that are valid at a glance. Others, except for booleans and UUIDs, may be valid, too."""
    own, oid = block.forms.definition_of(oid), block.forms.base_of(oid)
    if (oid in NAMES and oid not in GLANCED) or isinstance(own, CompositeType):
        return np.zeros(len(starts), np.bool_)
    if oid in TEXTS and limits is not None:
        # A character has at least one byte.
        is_short: Flags = lengths <= limits
        return is_short
    words = block.words
    if words is None:
        values = gather(block.data, starts, np.where(lengths <= GLANCE_BYTES_MAX, lengths, 0))
        words, starts, lengths = _Words.of(values.data), values.offsets[:-1], values.lengths
    if oid == BOOL:
        letters = words[starts] & _BYTE
        is_letter: Flags = ((letters == ord("t")) | (letters == ord("f"))) & (lengths == 1)
        return is_letter
    if oid == UUID:
        return _are_uuids(words, starts, lengths)
    if oid in TIMES:
        return _are_usual_times(words, oid, starts, lengths)
    if oid == NUMERIC:
        return _are_usual_numerics(words, starts, lengths, limits)
    if isinstance(own, EnumType):
        return _are_short_labels(words, starts, lengths, own)
    return _are_usual_numbers(words, oid, starts, lengths)


def _are_usual_numbers(words: _Words, oid: int, starts: Ints, lengths: Ints) -> Flags:
    """Flag values of only digits, perhaps after a sign, that are certainly not too large."""
    digits_max, first_digit = DIGITS[oid]
    begin = words[starts]
    is_negative = (begin & _BYTE) == ord("-")
    if oid != OID and is_negative.any():
        starts, lengths = starts + is_negative, lengths - is_negative
        begin = words[starts]
    count = np.clip(lengths, 0, WORD_BYTES)
    is_usual = _are_digits((begin << _SHIFTS[count]) | _ZEROS[count]) & (lengths > 0)
    is_usual &= (lengths < digits_max) | ((lengths == digits_max) & ((begin & _BYTE) < first_digit))
    is_usual &= ((begin & _BYTE) != ord("0")) | ((lengths == 1) & ~is_negative)
    # The last eight digits, and the eight before them.
    for digits in (WORD_BYTES, 2 * WORD_BYTES):
        if digits < digits_max and len(long := np.flatnonzero(is_usual & (lengths > digits))):
            is_usual[long] = _are_digits(words[starts[long] + lengths[long] - digits])
    return is_usual


def _are_usual_numerics(words: _Words, starts: Ints, lengths: Ints, modifiers: Numbers | None) -> Flags:
    """Flag numbers with all decimal places of their type, and without more digits before the point than it allows."""
    found = np.zeros(len(starts), np.bool_)
    if modifiers is None or not len(modifiers):
        return found
    are_equal = (modifiers == modifiers[0]).all()
    for modifier in [int(modifiers[0])] if are_equal else np.unique(modifiers).tolist():
        precision, scale = precision_of(modifier) or (0, 0)
        if 0 < scale <= min(precision - 1, GLANCED_SCALE_MAX):
            rows: Any = slice(None) if are_equal else np.flatnonzero(modifiers == modifier)
            found[rows] = _are_decimals(words, starts[rows], lengths[rows], precision, scale)
    return found


def _are_decimals(words: _Words, starts: Ints, lengths: Ints, precision: int, scale: int) -> Flags:
    begin = words[starts]
    is_negative = (begin & _BYTE) == ord("-")
    if is_negative.any():
        starts, lengths = starts + is_negative, lengths - is_negative
        begin = words[starts]
    digits = lengths - scale - 1
    is_fitting = (digits > 0) & (digits <= precision - scale) & (lengths <= GLANCED_CHARACTERS_MAX)
    is_fitting &= ((begin & _BYTE) != ord("0")) | (digits == 1)
    # Compare the last eight characters, and those before them; a shorter number begins with zeros.
    count = np.clip(lengths, 0, WORD_BYTES)
    last = (words[starts + lengths - count] << _SHIFTS[count]) | _ZEROS[count]
    # Turn the point into a digit; other characters could become digits, too, so the point itself is compared first.
    place = np.uint64(8 * (WORD_BYTES - 1 - scale))
    is_fitting &= (last >> place) & _BYTE == ord(".")
    is_fitting &= _are_digits(last ^ (np.uint64(ord(".") ^ ord("0")) << place))
    if len(long := np.flatnonzero(is_fitting & (lengths > WORD_BYTES))):
        more = lengths[long] - WORD_BYTES
        is_fitting[long] = _are_digits((begin[long] << _SHIFTS[more]) | _ZEROS[more])
    return is_fitting


def _are_digits(words: npt.NDArray[np.uint64]) -> Flags:
    """Whether all bytes of each word are digits: their upper half is 3, and is still 3 if 6 is added."""
    found: Flags = ((words & _HIGH) | (((words + _SIXES) & _HIGH) >> np.uint64(4))) == _THREES
    return found


def _are_uuids(words: _Words, starts: Ints, lengths: Ints) -> Flags:
    found: Flags = lengths == len(UUID_FORM)
    rows: Any = slice(None) if found.all() else np.flatnonzero(found)
    values = words.rows(starts[rows], len(_UUID))
    values[:, -1] = (values[:, -1] & ~_AFTER_UUID) | (_UUID[-1] & _AFTER_UUID)
    have_hyphens = (values & _HYPHENS) == (_UUID & _HYPHENS)
    values ^= _HYPHENS_TO_ZEROS
    characters = values.view(np.uint8)
    are_digits = (characters - np.uint8(ord("0")) < 10) | (characters - np.uint8(ord("a")) < 6)
    if not (have_hyphens.all() and are_digits.all()):
        found[rows] = have_hyphens.all(axis=1) & are_digits.all(axis=1)
    return found


def _are_usual_times(words: _Words, oid: int, starts: Ints, lengths: Ints) -> Flags:
    """Flag dates with four digits of years after 1 BC, other than leap days, and timestamps of such dates in UTC."""
    offset = len(UTC_OFFSET) if oid == TIMESTAMPTZ else 0
    # The point and digits of seconds.
    fraction = lengths - (DATE_CHARACTERS if oid == DATE else TIMESTAMP_CHARACTERS + offset)
    found: Flags = (fraction == 0) | ((fraction > 1) & (fraction < WORD_BYTES) & (oid != DATE))
    rows: Any = slice(None) if found.all() else np.flatnonzero(found)
    starts, fraction = starts[rows], fraction[rows]
    values = words.rows(starts, 2 if oid == DATE else 3)
    # Digits become their value, and separators 0.
    first, second = values[:, 0] ^ _YEAR_MONTH, values[:, 1] ^ _DAY_HOUR_MINUTE
    if oid == DATE:
        second &= _TWO_BYTES
    is_fitting = _are_values(first, _IN_YEAR_MONTH) & _are_values(second, _IN_DAY_HOUR_MINUTE)
    month, day = _two_digits(first, 5), _two_digits(second, 0)
    is_fitting &= ((first & _FOUR_BYTES) > 0) & (day > 0) & (day <= _DAYS[np.minimum(month, len(_DAYS) - 1)])
    if oid != DATE:
        third = (values[:, 2] & _THREE_BYTES) ^ _SECOND
        is_fitting &= _are_values(third, _IN_SECOND) & (_two_digits(second, 3) < 24)
        if fraction.any():
            end = words[starts + TIMESTAMP_CHARACTERS]
            # As above: the point becomes a digit, and is compared itself.
            digits = (end << _SHIFTS[fraction]) | _ZEROS[fraction]
            is_fraction = _are_digits(digits ^ _POINTS[fraction]) & (end & _BYTE == ord("."))
            # The last digit is no zero.
            is_fitting &= (fraction == 0) | (is_fraction & (digits >> np.uint64(56) != ord("0")))
    if offset:
        zone = words[starts + TIMESTAMP_CHARACTERS + fraction] & _THREE_BYTES
        is_fitting &= zone == int.from_bytes(UTC_OFFSET, "little")
    found[rows] = is_fitting
    return found


def _are_values(words: npt.NDArray[np.uint64], highest: np.uint64) -> Flags:
    """Whether no byte of a word is above 15, nor above 15 less the same byte of `highest`."""
    found: Flags = ((words | (words + highest)) & _HIGH) == 0
    return found


def _two_digits(words: npt.NDArray[np.uint64], place: int) -> Ints:
    """Return the number whose digits are the bytes at this place and after it."""
    tens, units = ((words >> np.uint64(8 * at)) & np.uint64(15) for at in (place, place + 1))
    return (tens * np.uint64(10) + units).astype(np.int64)


def _are_short_labels(words: _Words, starts: Ints, lengths: Ints, enum: EnumType) -> Flags:
    """Flag values that are labels of at most 8 bytes."""
    found: Flags = (lengths > 0) & (lengths <= WORD_BYTES)
    # No value contains NUL, so words that are aligned with their ends differ if the values do.
    labels = [label.rjust(WORD_BYTES, b"\0") for label in enum.labels if 0 < len(label) <= WORD_BYTES]
    known = np.frombuffer(b"".join(labels), np.dtype("<u8"))
    found[found] = np.isin(words[starts[found]] << _SHIFTS[lengths[found]], known)
    return found


def _find_invalid(values: BytesColumn, oid: int, limits: Numbers | None, own: OwnType | None) -> int | None:
    """Return the index of the first value that the type does not accept; None if it accepts all."""
    if limits is not None:
        return _find_longer(values, limits)
    if isinstance(own, EnumType):
        known = pa.array(sorted(own.labels), pa.large_binary())
        is_wrong = ~to_flags(pc.is_in(values.to_large_arrow(), known))
        return int(is_wrong.argmax()) if is_wrong.any() else None
    if oid in PARSED:
        texts = values.to_large_arrow()
        if _are_numbers(texts, oid):
            is_wrong = _have_leading_zeros(values)
            return int(is_wrong.argmax()) if is_wrong.any() else None
        return next(index for index in range(len(values)) if not _are_numbers(texts.slice(index, 1), oid))
    # Booleans and UUIDs have only one form.
    return 0


def _have_leading_zeros(numbers: BytesColumn) -> Flags:
    """Flag numbers with a zero before other digits, or after a sign: the types accept them, but never print them."""
    starts = numbers.offsets[:-1]
    is_negative = numbers.data[starts] == ord("-")
    found: Flags = (numbers.data[starts + is_negative] == ord("0")) & ((numbers.lengths > 1) | is_negative)
    return found


def _are_numbers(texts: pa.Array, oid: int) -> bool:
    try:
        texts.cast(pa.large_string()).cast(PARSED[oid])
    except pa.ArrowInvalid:
        return False
    return True


def _find_longer(values: BytesColumn, limits: Numbers) -> int | None:
    """Return the index of the first value that has more characters than its limit; None if there is none.

    In an encoding other than UTF-8, the characters can't be counted here.
    """
    try:
        texts = read_texts(values).to_large_arrow().cast(pa.large_string())
    except pa.ArrowInvalid:
        return None
    is_longer = to_numpy(pc.utf8_length(texts)) > limits
    return int(is_longer.argmax()) if is_longer.any() else None
