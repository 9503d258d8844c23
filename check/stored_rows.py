"""Check stored rows against the definitions of their tables, without another copy to compare them with.

A row that COPY did not print, or that COPY can't load, is damage: a line with more or fewer fields than the table has
columns, a key that is not the first fields of its line, a row in the wrong partition, a key that occurs twice, or a
value that its type does not accept. Each rule is a few passes over whole columns. Source: PostgreSQL manual, COPY,
"Text Format", and "Data Types".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.columns.bytes_column import (
    Bytes,
    BytesColumn,
    Flags,
    Hashes,
    Ints,
    column_of,
    from_arrow,
    gather,
    runs,
    xxhash64,
)
from cutline.columns.fields import read_texts
from cutline.columns.lines import BACKSLASH, BLOCK_BYTES, ESCAPES, NEWLINE, NULL_MARK, TAB, UNCHANGED_MARK, find_byte
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Group
from cutline.snapshots.records.chain import Chain
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
    OpenTransaction,
)

# The built-in types whose values are checked, by oid (PostgreSQL's pg_type.dat).
BOOL, INT8, INT2, INT4, OID, UUID = 16, 20, 21, 23, 26, 2950
BPCHAR, VARCHAR, DATE, TIMESTAMP, TIMESTAMPTZ = 1042, 1043, 1082, 1114, 1184
NUMBERS: Mapping[int, pa.DataType] = {INT2: pa.int16(), INT4: pa.int32(), INT8: pa.int64(), OID: pa.uint32()}
TIMES, TEXTS = frozenset({DATE, TIMESTAMP, TIMESTAMPTZ}), frozenset({BPCHAR, VARCHAR})
CHECKED = frozenset({BOOL, UUID, *NUMBERS, *TIMES})
UUID_CHARACTERS, UUID_HYPHENS = 36, (8, 13, 18, 23)
# The modifier of char(n) and varchar(n) is n + 4; without a limit it is -1.
MODIFIER_HEADER = 4
# Lines are checked in blocks of about this many fields: each field takes about 50 bytes of memory meanwhile.
FIELDS_PER_BLOCK = 1 << 18
# The bytes that COPY escapes never occur in a line, except for separators.
_IS_SEPARATOR = np.zeros(256, np.bool_)
_IS_SEPARATOR[[0, *(byte for byte in ESCAPES if byte != BACKSLASH)]] = True
# The bytes after a backslash; COPY reads octal and hexadecimal escapes, but never prints them.
_IS_LETTER = np.zeros(256, np.bool_)
_IS_LETTER[[letter[0] for letter in ESCAPES.values()]] = True
_HEX = np.zeros(256, np.bool_)
_HEX[list(b"0123456789abcdef")] = True
# The characters of ISO dates and times, of infinity, and of BC.
_TIME = np.zeros(256, np.bool_)
_TIME[list(b"0123456789-+:. BCinfty")] = True


class RowsInvalidError(ValueError):
    """Stored rows contradict the definition of their table; `kind` is the kind of conflict."""

    def __init__(self, detail: str, kind: str = "rows") -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class CheckedColumn:
    """A column whose values are checked: its field in the line, its name and type, and the type's oid and limit.

    `labels` are the values of an enum type, as COPY prints them.
    """

    place: int
    name: str
    type: str
    type_oid: int
    limit: int
    labels: frozenset[bytes] | None = None


@dataclass(frozen=True, slots=True)
class TableForm:
    """What the checks need of a table's definition. `checked` lists the columns of types that are checked."""

    name: str
    width: int
    key_width: int
    partitions: int
    checked: tuple[CheckedColumn, ...]

    @classmethod
    def of(cls, group: Group, labels: Mapping[int, frozenset[bytes]] | None = None) -> TableForm:
        """Return the form of a definition; `labels` are those of enum columns, by the column's place in `columns`."""
        known = labels or {}
        limits = [
            column.type_modifier - MODIFIER_HEADER if column.type_oid in TEXTS else -1 for column in group.columns
        ]
        checked = tuple(
            CheckedColumn(place, column.name, column.type, column.type_oid, limit, known.get(place))
            for place, (column, limit) in enumerate(zip(group.columns, limits, strict=True))
            if is_checked(column.type_oid, limit) or place in known
        )
        return cls(group.name, len(group.columns), group.key_width, group.partitions, checked)

    @property
    def is_multiset(self) -> bool:
        """Whether the table has no key, so that only the whole line identifies a row."""
        return self.key_width == 0

    @property
    def without_labels(self) -> TableForm:
        """The form without what only the DDL tells."""
        checked = tuple(replace(column, labels=None) for column in self.checked)
        # An enum column is checked only if its labels are known.
        return replace(self, checked=tuple(column for column in checked if is_checked(column.type_oid, column.limit)))

    @property
    def key(self) -> TableForm:
        """The form of the key alone, as a line."""
        checked = tuple(column for column in self.checked if column.place < self.key_width)
        return TableForm(self.name, self.key_width, self.key_width, self.partitions, checked)


def is_checked(type_oid: int, limit: int) -> bool:
    """Whether values of a type are checked without the DDL; `limit` is the type's limit of characters, or -1."""
    return type_oid in CHECKED or limit >= 0


def forms_of(
    groups: Mapping[int, Group], labels: Mapping[int, Mapping[int, frozenset[bytes]]] | None = None
) -> dict[int, TableForm]:
    """Return the forms of definitions, keyed by number; `labels` are those of enum columns, by number and place."""
    known = labels or {}
    return {number: TableForm.of(group, known.get(number)) for number, group in groups.items()}


def enum_labels(
    chain: Chain, shard: str, labels: Mapping[int, frozenset[bytes]]
) -> dict[int, dict[int, frozenset[bytes]]]:
    """Return the labels of the enum columns that the table at the last commit still has, by number and place.

    `labels` are keyed by the oid of the type. A column that was dropped since may have had labels that no commit has.
    """
    definitions, found = chain.definitions(shard), dict[int, dict[int, frozenset[bytes]]]()
    for number, at_cut in chain.numbers_at_cut(shard).items():
        kept = {(column.number, column.type_oid) for column in definitions[at_cut].columns}
        of_enums = {
            place: labels[column.type_oid]
            for place, column in enumerate(definitions[number].columns)
            if column.type_oid in labels and (column.number, column.type_oid) in kept
        }
        if of_enums:
            found[number] = of_enums
    return found


@dataclass(slots=True)
class BaseChecks:
    """The checks of an object of a base copy, which is read batch by batch; `forms` are those of its groups.

    Every method raises RowsInvalidError.
    """

    forms: Mapping[int, TableForm]
    _keys: dict[int, list[Hashes]] = field(default_factory=dict)

    def add(self, batch: pa.RecordBatch, key_hashes: Hashes) -> None:
        """Check rows (BASE_SCHEMA); `key_hashes` are the XXH64 of their keys."""
        group, partition = to_numpy(batch.column("group")), to_numpy(batch.column("partition"))
        rows, keys = from_arrow(batch.column("row")), from_arrow(batch.column("key"))
        for at in runs(group):
            number = int(group[at.start])
            if number not in self.forms:
                raise RowsInvalidError(f"it contains rows of group {number}, which its commit does not list for it")
            form, hashes = self.forms[number], key_hashes[at]
            _check_places(form, rows.part(at), hashes, partition[at])
            _check_lines(form, rows.part(at), keys.part(at))
            if not form.is_multiset:
                self._keys.setdefault(number, []).append(hashes)

    def end(self, read_again: Callable[[], Iterator[pa.RecordBatch]]) -> None:
        """Check that no key occurs twice; `read_again` yields the batches once more, to compare keys of equal hash."""
        for number, parts in self._keys.items():
            hashes = np.sort(np.concatenate(parts))
            repeated = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
            if len(repeated) and _has_equal_keys(read_again(), number, repeated):
                raise RowsInvalidError(
                    f"it contains two rows of {self.forms[number].name} with the same key (the table itself may contain"
                    " them, if the index of its key was damaged)",
                    kind="duplicate",
                )


def _has_equal_keys(batches: Iterable[pa.RecordBatch], number: int, hashes: Hashes) -> bool:
    """Whether two rows of the group whose keys have one of these hashes have the same key."""
    keys: list[bytes] = []
    for batch in batches:
        chosen = (to_numpy(batch.column("group")) == number) & np.isin(
            xxhash64(from_arrow(batch.column("key"))), hashes
        )
        keys += batch.column("key").filter(to_mask(chosen)).to_pylist()  # keys that share a hash with others
    return len(set(keys)) < len(keys)


@dataclass(slots=True)
class SegmentChecks:
    """The checks of a segment that is read table by table; `forms` are those of the node's groups.

    `open` is the transaction of which the segment has only the beginning, and `continued` the one of which the segment
    before it has the beginning. `is_open_prepared` says whether `open` is a two-phase transaction; None if the segment
    has none of its changes. Every method raises RowsInvalidError.
    """

    forms: Mapping[int, TableForm]
    open: OpenTransaction | None = None
    continued: OpenTransaction | None = None
    is_open_prepared: bool | None = None
    _changed: list[Ints] = field(default_factory=list)
    _ended: list[Ints] = field(default_factory=list)
    _changes: list[Hashes] = field(default_factory=list)

    def add(self, table: pa.Table) -> None:
        """Check rows of the segment (SEGMENT_SCHEMA)."""
        op, lsn = to_numpy(table["op"]), to_numpy(table["lsn"])
        is_change, is_end = np.isin(op, CHANGES), np.isin(op, (COMMIT, PREPARE))
        self._ended.append(np.unique(lsn[is_end]))
        if self.open is not None and (lsn[is_end] >= self.open.lsn).any():
            raise RowsInvalidError(f"it contains the end of the transaction at {self.open.lsn}, or of a later one")
        if not is_change.any():
            return
        # Changes and events are in separate row groups, and a row may be 1 GB: copy no rows without need.
        changes = table if is_change.all() else table.filter(to_mask(is_change))
        _check_changes(changes, self.forms)
        self._check_spanning(changes)
        self._changed.append(np.unique(lsn[is_change]))
        # A TRUNCATE of several tables is a change of each of them, all with the same number.
        numbers = [to_numpy(changes[name]).astype(np.int64) for name in ("lsn", "seq", "group")]
        data = np.ascontiguousarray(np.stack(numbers, axis=1)).view(np.uint8).reshape(-1)
        width = 8 * len(numbers)
        self._changes.append(xxhash64(BytesColumn(data, np.arange(len(changes) + 1, dtype=np.int64) * width)))

    def _check_spanning(self, changes: pa.Table) -> None:
        """Check the changes of transactions that span segments: each segment has those after the segment before it."""
        lsn, seq = to_numpy(changes["lsn"]), to_numpy(changes["seq"])
        if self.continued is not None and ((lsn == self.continued.lsn) & (seq <= self.continued.seq)).any():
            known = f"up to change {self.continued.seq}"
            raise RowsInvalidError(f"it repeats changes of the transaction at {self.continued.lsn}, {known}")
        if self.open is None:
            return
        is_open = lsn == self.open.lsn
        if (seq[is_open] > self.open.seq).any():
            detail = f"it contains changes of the transaction at {self.open.lsn} after change {self.open.seq}"
            raise RowsInvalidError(f"{detail}, up to which it should contain them")
        if self.is_open_prepared is None and is_open.any():
            self.is_open_prepared = changes["global_id"].filter(to_mask(is_open)).null_count == 0

    @property
    def lacks_end(self) -> bool:
        """Whether the segment neither ends the transaction that it continues, nor leaves it open, once it was read."""
        if self.continued is None or (self.open is not None and self.open.lsn == self.continued.lsn):
            return False
        return not any(np.isin(int(self.continued.lsn), ended) for ended in self._ended)

    def end(self, read_again: Callable[[], Iterator[pa.Table]]) -> None:
        """Check what only the whole segment shows: each change once, and each transaction with its end.

        `read_again` yields the tables once more, to compare changes of equal hash.
        """
        if not self._changes:
            return
        hashes = np.sort(np.concatenate(self._changes))
        if (hashes[1:] == hashes[:-1]).any() and _has_equal_changes(read_again()):
            raise RowsInvalidError("it contains the same change of a transaction twice")
        ended = np.concatenate([*self._ended, np.asarray([int(self.open.lsn)] if self.open else [], np.int64)])
        without = np.setdiff1d(np.concatenate(self._changed), ended)
        if len(without):
            raise RowsInvalidError(f"it contains changes at {Lsn(int(without[0]))}, where no transaction ends")


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


def _check_changes(changes: pa.Table, forms: Mapping[int, TableForm]) -> None:
    """Check the rows of changes (SEGMENT_SCHEMA) against the forms of their tables."""
    for batch in changes.to_batches():
        group, ops = to_numpy(batch.column("group")), to_numpy(batch.column("op"))
        for at in runs(group.astype(np.int64) * 256 + ops):
            number = int(group[at.start])
            if number not in forms:
                raise RowsInvalidError(f"it contains changes of group {number}, which neither it nor a commit defines")
            _check_changes_of(batch.slice(at.start, at.stop - at.start), int(ops[at.start]), forms[number])


def _check_changes_of(batch: pa.RecordBatch, op: int, form: TableForm) -> None:
    """Check changes with the same op of one table."""
    keys, rows = from_arrow(batch.column("key")), from_arrow(batch.column("row"))
    partition = to_numpy(batch.column("partition"))
    if op == TRUNCATE:
        if (partition != EVERY_PARTITION).any() or keys.lengths.any() or rows.lengths.any():
            raise RowsInvalidError(f"a TRUNCATE of {form.name} has a key, a row or a partition")
        return
    if op not in ((INSERT, DELETE) if form.is_multiset else (UPSERT, PARTIAL, DELETE)):
        raise RowsInvalidError(f"it contains a change of kind {chr(op)} to {form.name}, whose key does not allow it")
    _check_places(form, rows, xxhash64(keys), partition)
    if op == DELETE and not form.is_multiset:
        as_lines = _with_newlines(keys)
        _check_lines(form.key, as_lines, None)
        # The row's new key, if an update changed the key and left values out.
        renamed = np.flatnonzero(rows.lengths)
        _check_lines(form.key, gather(rows.data, rows.offsets[renamed], rows.lengths[renamed]), None)
        return
    _check_lines(form, rows, keys, unchanged=op == PARTIAL)


def _with_newlines(keys: BytesColumn) -> BytesColumn:
    newline, nothing = (pa.scalar(text, pa.large_binary()) for text in (b"\n", b""))
    return column_of(pc.binary_join_element_wise(keys.to_large_arrow(), newline, nothing))


def _check_places(form: TableForm, rows: BytesColumn, key_hashes: Hashes, partition: Ints) -> None:
    hashes = xxhash64(rows) if form.is_multiset else key_hashes
    if ((hashes & np.uint64(form.partitions - 1)).astype(np.int64) != partition).any():
        raise RowsInvalidError(f"a row of {form.name} is in the wrong partition", kind="partition")


def _check_lines(form: TableForm, lines: BytesColumn, keys: BytesColumn | None, *, unchanged: bool = False) -> None:
    """Check lines and, unless `keys` is None, that each key is the first fields of its line.

    If `unchanged`, fields may have the mark for values that an UPDATE left unchanged.
    """
    step = max(FIELDS_PER_BLOCK // max(form.width, 1), 1)
    for low in range(0, len(lines), step):
        at = slice(low, min(low + step, len(lines)))
        block = lines.part(at)
        starts, ends = fields_of_lines(block, form)
        if keys is not None:
            _check_keys(form, block, keys.part(at), ends)
        _check_values(form, block, starts, ends, unchanged=unchanged)


def fields_of_lines(lines: BytesColumn, form: TableForm) -> tuple[Ints, Ints]:
    """Return the starts and ends of the fields of complete lines (rows by columns), as offsets into `lines.data`.

    Raises RowsInvalidError unless each line has a field for each column, ends with its only newline, and contains no
    byte that COPY would have escaped.
    """
    width, count = max(form.width, 1), len(lines)
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    data, line_ends = lines.data[first:last], lines.offsets[1:] - first - 1
    if count and (not lines.lengths.all() or (data[line_ends] != NEWLINE).any()):
        raise RowsInvalidError(f"a row of {form.name} does not end with a newline")
    separators = _separators(data)
    misfit = RowsInvalidError(
        f"a row of {form.name} does not have {form.width} fields, or contains a byte that COPY would have escaped"
    )
    if len(separators) != count * width:
        raise misfit
    ends = separators.reshape(count, width)
    if count and ((ends[:, -1] != line_ends).any() or (data[ends[:, :-1]] != TAB).any()):
        raise misfit
    starts = np.concatenate([lines.offsets[:-1].reshape(-1, 1) - first, ends[:, :-1] + 1], axis=1)
    return starts + first, ends + first


def _separators(data: Bytes) -> Ints:
    blocks = range(0, len(data), BLOCK_BYTES)
    found = [low + np.flatnonzero(_IS_SEPARATOR[data[low : low + BLOCK_BYTES]]) for low in blocks]
    return np.concatenate([np.empty(0, np.int64), *found])


def _check_keys(form: TableForm, lines: BytesColumn, keys: BytesColumn, ends: Ints) -> None:
    """Check that each key is the first fields of its line; empty if the table has no key."""
    if form.is_multiset:
        if keys.lengths.any():
            raise RowsInvalidError(f"a row of {form.name} has a key, but the table has none")
        return
    begins = lines.offsets[:-1]
    if not gather(lines.data, begins, ends[:, form.key_width - 1] - begins).equals(keys).all():
        raise RowsInvalidError(f"a row of {form.name} is stored under a key other than its own")


def _check_values(form: TableForm, lines: BytesColumn, starts: Ints, ends: Ints, *, unchanged: bool) -> None:
    """Check the escapes of all fields, and the values of the types that are cheap to check."""
    marks = (NULL_MARK, UNCHANGED_MARK) if unchanged else (NULL_MARK,)
    _check_escapes(form, lines, starts, ends, marks)
    for column in form.checked:
        begins = starts[:, column.place]
        lengths = ends[:, column.place] - begins
        is_value = ~_are_marks(lines.data, begins, lengths, marks)
        begins, lengths = begins[is_value], lengths[is_value]
        if len(begins) and not _are_valid(lines.data, begins, lengths, column):
            raise RowsInvalidError(
                f"column {column.name} of {form.name} contains a value that type {column.type} does not accept"
            )


def _are_marks(data: Bytes, starts: Ints, lengths: Ints, marks: tuple[bytes, ...]) -> Flags:
    found: Flags = lengths == len(NULL_MARK)
    places = starts[found]
    second = np.zeros(256, np.bool_)
    second[[mark[1] for mark in marks]] = True
    found[found] = (data[places] == BACKSLASH) & second[data[places + 1]]
    return found


def _check_escapes(form: TableForm, lines: BytesColumn, starts: Ints, ends: Ints, marks: tuple[bytes, ...]) -> None:
    """Check that each backslash begins an escape that COPY prints, or one of the marks, which is a whole field."""
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    slashes = find_byte(lines.data[first:last], BACKSLASH) + first
    if not len(slashes):
        return
    # In a run of backslashes, each pair is an escape. The last one of an odd run escapes the next byte.
    begins = np.flatnonzero(np.concatenate([[True], np.diff(slashes) > 1]))
    counts = np.diff(np.append(begins, len(slashes)))
    is_odd = counts % 2 == 1
    unknown = slashes[begins[is_odd]][~_IS_LETTER[lines.data[slashes[begins[is_odd]] + counts[is_odd]]]]
    if not len(unknown):
        return
    # Fields are in order, so the field that contains a backslash is the last one that starts at or before it.
    flat_starts, flat_ends = starts.reshape(-1), ends.reshape(-1)
    places = np.searchsorted(flat_starts, unknown, side="right") - 1
    is_whole = flat_starts[places] == unknown
    lengths = flat_ends[places] - flat_starts[places]
    if not (is_whole & _are_marks(lines.data, unknown, lengths, marks)).all():
        raise RowsInvalidError(f"a row of {form.name} contains an escape that COPY does not print")


def _are_valid(data: Bytes, starts: Ints, lengths: Ints, column: CheckedColumn) -> bool:
    """Whether the type accepts all of these values."""
    if column.labels is not None:
        known = pa.array(sorted(column.labels), pa.large_binary())
        return bool(pc.all(pc.is_in(gather(data, starts, lengths).to_large_arrow(), known)).as_py())
    if column.type_oid in NUMBERS:
        return _are_numbers(gather(data, starts, lengths), NUMBERS[column.type_oid])
    if column.type_oid == BOOL:
        return bool((lengths == 1).all() and np.isin(data[starts], list(b"tf")).all())
    if column.type_oid == UUID:
        return bool((lengths == UUID_CHARACTERS).all()) and _are_uuids(data, starts)
    if column.type_oid in TIMES:
        return bool(lengths.all() and _TIME[gather(data, starts, lengths).data].all())
    is_long = lengths > column.limit
    return _are_within(gather(data, starts[is_long], lengths[is_long]), column.limit)


def _are_numbers(values: BytesColumn, type_: pa.DataType) -> bool:
    try:
        values.to_large_arrow().cast(pa.large_string()).cast(type_)
    except pa.ArrowInvalid:
        return False
    return True


def _are_uuids(data: Bytes, starts: Ints) -> bool:
    for place in range(UUID_CHARACTERS):
        characters = data[starts + place]
        if not (characters == ord("-") if place in UUID_HYPHENS else _HEX[characters]).all():
            return False
    return True


def _are_within(values: BytesColumn, limit: int) -> bool:
    """Whether the values, which have more bytes than `limit`, have at most `limit` characters in UTF-8."""
    if not len(values):
        return True
    try:
        texts = read_texts(values).to_large_arrow().cast(pa.large_string())
    except pa.ArrowInvalid:
        # The database has another encoding, in which the characters can't be counted here.
        return True
    return int(pc.max(pc.utf8_length(texts)).as_py()) <= limit
