"""Rows of older definitions, converted to the schema at the cut: compared with a conversion row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cutline.columns.bytes_column import from_list, partition_of
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.base_copy.copy_ranges import BASE_SCHEMA
from cutline.snapshots.fold import schema_at_cut as module
from cutline.snapshots.fold.schema_at_cut import SchemaMapping, conversion, schema_mapping, to_schema_at_cut
from cutline.wal.segments.segments import COMMIT, DELETE, INSERT, PARTIAL, SEGMENT_SCHEMA, TRUNCATE, UPSERT

# COPY's text: `\\\\u` is a value that is a backslash and a u, not a mark; likewise `\\\\N` is not NULL.
VALUES = st.sampled_from([b"", b"a", b"\\N", b"\\\\N", b"\\\\u", b"x\\ty", b"longer value", "é".encode()])
MISSING = st.sampled_from([None, "", "7", "\\\\N", "a long default", "é", r"valid nowhere \xff"])
UNKNOWN_NUMBER = 99
PARTITIONS = 4


def column(number: int, missing: str | None = None) -> Column:
    return Column(
        name=f"c{number}", type="text", type_oid=25, type_modifier=-1, position=0, number=number, missing=missing
    )


def group(number: int, columns: list[Column], key_width: int) -> Group:
    identity = "default" if key_width else "full"
    return Group(number, "s", "t", identity, key_width, tuple(columns), PARTITIONS if key_width == 0 else 1)


@dataclass
class History:
    """The history of a table: its definitions by number, which one each of them continues, where copies began."""

    definitions: dict[int, Group] = field(default_factory=dict)
    successions: dict[int, int] = field(default_factory=dict)
    began: dict[int, Lsn] = field(default_factory=dict)

    def path(self, number: int) -> list[int] | None:
        """The numbers from this one to the newest; None if its rows no longer count."""
        newest, path = max(self.definitions), [number]
        while path[-1] != newest:
            later = [new for new, old in self.successions.items() if old == path[-1]]
            if not later:
                return None
            path += later
        return path

    def line(self, number: int, values: list[bytes]) -> bytes:
        """Convert these values of a row of definition `number` to the newest definition, step by step."""
        row = {one.number: value for one, value in zip(self.definitions[number].columns, values, strict=True)}
        for later in (self.path(number) or [])[1:]:
            missing = {one.number: one.missing for one in self.definitions[later].columns}
            row = {
                n: row.get(n, b"\\N" if text is None else text.encode().replace(rb"\xff", b"\xff"))
                for n, text in missing.items()
            }
        return b"\t".join(row.values()) + b"\n"

    def first(self, number: int) -> int:
        while number in self.successions:
            number = self.successions[number]
        return number

    def since(self, number: int) -> int:
        return self.began.get(self.first(number), 0)

    def mapping_with(self, pending: Mapping[int, frozenset[Lsn]]) -> SchemaMapping:
        last = self.definitions[max(self.definitions)]
        return schema_mapping([last], self.definitions, self.successions, self.began, pending)

    @property
    def mapping(self) -> SchemaMapping:
        return self.mapping_with({})


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Columns are added and dropped, in several steps; sometimes the table is copied again."""
    history = History()
    key_width = draw(st.integers(0, 2))
    columns = [column(number + 1) for number in range(key_width + draw(st.integers(0, 3)))]
    last = len(columns)
    for number in range(1, draw(st.integers(1, 4)) + 1):
        if number > 1:
            stay = [one for place, one in enumerate(columns) if place < key_width or draw(st.booleans())]
            added = [column(last + 1 + more, draw(MISSING)) for more in range(draw(st.integers(0, 3)))]
            last += len(added)
            # A rewrite makes PostgreSQL forget the missing value: from then on it is stored in every row.
            stay = [column(one.number) if draw(st.booleans()) else one for one in stay]
            columns = stay + added
            if draw(st.booleans()):
                history.successions[number] = number - 1
            else:
                history.began[number] = Lsn(draw(st.integers(0, 20)))
        history.definitions[number] = group(number, columns, key_width)
    return history


def key_of(definition: Group, values: list[bytes]) -> bytes:
    return b"\t".join(values[: definition.key_width])


def lines_of(definition: Group, *, partial: bool) -> st.SearchStrategy[list[bytes]]:
    wanted = VALUES | st.just(b"\\u") if partial else VALUES
    keys = [VALUES.filter(lambda value: value != b"\\N")] * definition.key_width
    return st.tuples(*keys, *[wanted] * (len(definition.columns) - definition.key_width)).map(list)


def partition(definition: Group, key: bytes, line: bytes) -> int:
    return int(partition_of(from_list([line if definition.is_multiset else key]), definition.partitions)[0])


@st.composite
def base_rows(draw: st.DrawFn, history: History) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Rows as they are stored, each with its row at the cut, or None if it does not count."""
    found: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    for number in draw(st.lists(st.sampled_from([*history.definitions, UNKNOWN_NUMBER]), max_size=8)):
        definition = history.definitions.get(number, history.definitions[1])
        values = draw(lines_of(definition, partial=False))
        line, key = b"\t".join(values) + b"\n", key_of(definition, values)
        stored = {"group": number, "partition": partition(definition, key, line), "key": key, "row": line}
        path = history.path(number) if number != UNKNOWN_NUMBER else None
        now = None
        if path:
            row = history.line(number, values)
            now = {"group": path[-1], "partition": partition(definition, key, row), "key": key, "row": row}
        found.append((stored, now))
    return found


@st.composite
def changes(
    draw: st.DrawFn, history: History, pending: Mapping[int, frozenset[Lsn]]
) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The same for changes of every kind, and for events; those at `pending`, by the number of the table when it was
    copied, count although a copy follows them.
    """
    found: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    fixed = {"end_lsn": 1, "xid": 1, "global_id": None}
    for seq in range(draw(st.integers(0, 10))):
        lsn = draw(st.integers(0, 20))
        place = fixed | {"lsn": lsn, "seq": seq}
        if draw(st.integers(0, 5)) == 0:
            event = place | {"op": COMMIT, "group": 0, "partition": 0, "key": b"", "row": b""}
            found.append((event, event))
            continue
        number = draw(st.sampled_from([*history.definitions, UNKNOWN_NUMBER]))
        definition = history.definitions.get(number, history.definitions[1])
        op = draw(
            st.sampled_from(
                [INSERT, DELETE, TRUNCATE] if definition.is_multiset else [UPSERT, PARTIAL, DELETE, TRUNCATE]
            )
        )
        values = draw(lines_of(definition, partial=op == PARTIAL))
        line, key = b"\t".join(values) + b"\n", key_of(definition, values)
        row, is_line = line, True
        if op == TRUNCATE:
            key, row, is_line = b"", b"", False
        elif op == DELETE and not definition.is_multiset:
            # The key that the row moved to, if the UPDATE left values unchanged.
            row, is_line = draw(st.sampled_from([b"", b"another key\n", key + b"\n"])), False
        part = -1 if op == TRUNCATE else partition(definition, key, row)
        stored = place | {"op": op, "group": number, "partition": part, "key": key, "row": row}
        path = history.path(number) if number != UNKNOWN_NUMBER else None
        now = None
        if path and (lsn >= history.since(number) or lsn in pending.get(history.first(number), ())):
            row = history.line(number, values) if is_line else row
            part = partition(definition, key, row) if is_line else part
            now = stored | {"group": path[-1], "row": row, "partition": part}
        found.append((stored, now))
    return found


def read(rows: list[dict[str, Any]], schema: pa.Schema, mapping: SchemaMapping, chunks: int) -> list[dict[str, Any]]:
    """Convert the rows to the schema at the cut, from a table in several chunks."""
    parts = [pa.Table.from_pylist(rows[start::chunks], schema) for start in range(chunks)]
    tables = list(to_schema_at_cut(pa.concat_tables(parts), mapping))
    assert all(table.schema == schema for table in tables)
    return [row for table in tables for row in table.to_pylist()]


def in_order(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted((sorted(row.items()) for row in rows), key=repr)


@given(st.data(), histories(), st.integers(1, 3))
def test_base_rows_are_converted_as_if_one_by_one(data: st.DataObject, history: History, chunks: int) -> None:
    rows = data.draw(base_rows(history))
    expected = [now for _, now in rows if now is not None]
    assert in_order(read([row for row, _ in rows], BASE_SCHEMA, history.mapping, chunks)) == in_order(expected)


@given(st.data(), histories(), st.integers(1, 3), st.sampled_from([1, 64, 1 << 20]))
def test_changes_are_converted_as_if_one_by_one(data: st.DataObject, history: History, chunks: int, block: int) -> None:
    positions = st.frozensets(st.builds(Lsn, st.integers(0, 20)))
    pending = {number: data.draw(positions) for number in history.began if data.draw(st.booleans())}
    in_base, counted_from = data.draw(positions), Lsn(data.draw(st.integers(0, 20)))
    mapping = replace(history.mapping_with(pending), counted_from=counted_from, pending=in_base)
    rows = data.draw(changes(history, pending))
    # Only the ends of transactions have a number of changes.
    expected = [
        now | {"changes": None}
        for _, now in rows
        if now is not None and (now["group"] == 0 or now["lsn"] >= counted_from or now["lsn"] in in_base)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        found = read([row for row, _ in rows], SEGMENT_SCHEMA, mapping, chunks)
    assert in_order(found) == in_order(expected)


@given(histories())
def test_a_restricted_mapping_agrees_with_the_whole_mapping(history: History) -> None:
    some = list(history.definitions)[:2]
    mapping = history.mapping
    assert [mapping.restrict_to(some).number_of(number) for number in some] == [
        mapping.number_of(number) for number in some
    ]
    assert mapping.restrict_to(some).number_of(UNKNOWN_NUMBER) is None


def test_older_rows_get_the_missing_value_of_the_definition_that_added_the_column() -> None:
    # The table was rewritten in between: then every row stores the value, and PostgreSQL forgets that it was missing.
    definitions = {
        1: group(1, [column(1)], 1),
        2: group(2, [column(1), column(2, "added")], 1),
        3: group(3, [column(1), column(2), column(3)], 1),
    }
    mapping = schema_mapping([definitions[3]], definitions, {2: 1, 3: 2}, {})
    row = {"group": 1, "partition": 0, "key": b"k", "row": b"k\n"}
    assert [one["row"] for one in read([row], BASE_SCHEMA, mapping, 1)] == [b"k\tadded\t\\N\n"]


@pytest.mark.parametrize(("before", "after", "line", "expected"), [
    ([], [column(1, "x")], b"\n", b"x\n"),
    ([], [column(1), column(2)], b"\n", b"\\N\t\\N\n"),
    ([column(1)], [], b"value\n", b"\n"),
    ([column(1), column(2)], [column(3, "")], b"\t\n", b"\n"),
    ([column(1), column(2)], [column(2), column(1)], b"a\tb\n", b"b\ta\n"),
        ([column(1), column(2)], [column(1), column(3, "x"), column(2)], b"a\tb\n", b"a\tx\tb\n"),
])  # fmt: skip
def test_columns_can_be_added_dropped_and_reordered_and_there_may_be_none(
    before: list[Column], after: list[Column], line: bytes, expected: bytes
) -> None:
    definitions = {1: group(1, before, 0), 2: group(2, after, 0)}
    mapping = schema_mapping([definitions[2]], definitions, {2: 1}, {})
    row = {"group": 1, "partition": 3, "key": b"", "row": line}
    (found,) = read([row], BASE_SCHEMA, mapping, 1)
    assert found["row"] == expected
    assert found["partition"] == partition_of(from_list([expected]), PARTITIONS)[0]


def test_rows_with_other_columns_than_their_definition_are_refused() -> None:
    definitions = {1: group(1, [column(1), column(2)], 0), 2: group(2, [column(2), column(1)], 0)}
    mapping = schema_mapping([definitions[2]], definitions, {2: 1}, {})
    for line in (b"a\n", b"a\tb\tc\n"):
        with pytest.raises(ValueError, match="the table has 2 columns, but some of its rows have more or fewer"):
            read([{"group": 1, "partition": 3, "key": b"", "row": line}], BASE_SCHEMA, mapping, 1)


def test_fields_that_stay_adjacent_are_one_piece() -> None:
    before = group(1, [column(number) for number in range(1, 6)], 1)
    added = conversion(before, group(2, [*before.columns, column(6, "x")], 1))
    assert added.pieces == [(0, 4), b"\tx\n"]
    dropped = conversion(before, group(2, [one for one in before.columns if one.number != 3], 1))
    assert dropped.pieces == [(0, 1), b"\t", (3, 4), b"\n"]
    assert not added.keeps_lines
    assert conversion(before, before).keeps_lines


def test_a_block_is_bounded_with_what_the_conversion_adds() -> None:
    definitions: Mapping[int, Group] = {
        1: group(1, [column(1)], 1),
        2: group(2, [column(1), column(2, "x" * (module.BLOCK_BYTES // 2))], 1),
    }
    mapping = schema_mapping([definitions[2]], definitions, {2: 1}, {})
    rows = [{"group": 1, "partition": 0, "key": b"%d" % one, "row": b"%d\n" % one} for one in range(4)]
    tables = list(to_schema_at_cut(pa.Table.from_pylist(rows, BASE_SCHEMA), mapping))
    assert [len(table) for table in tables] == [1, 1, 1, 1]


def test_rows_of_a_chain_without_changed_definitions_are_not_converted() -> None:
    table = pa.Table.from_pylist([{"group": UNKNOWN_NUMBER, "partition": 0, "key": b"", "row": b"\n"}], BASE_SCHEMA)
    (found,) = to_schema_at_cut(table, None)
    assert found is table
