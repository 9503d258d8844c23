from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.columns.bytes_column import BytesColumn, from_list
from cutline.columns.lines import Values, concatenate, escape, key_lines, keys_of, lines_of, with_constants

# None is NULL, an empty tuple stands for an unchanged TOASTed value.
Value = bytes | None | tuple[()]
VALUE = st.one_of(
    st.none(),
    st.just(()),
    st.binary(max_size=12),
    st.text(alphabet="a\b\t\n\v\f\r\\Nu.", max_size=8).map(str.encode),
)
# PostgreSQL manual, COPY, "Text Format": the characters that are written with a backslash.
ESCAPED = {
    0x08: b"\\b",
    0x09: b"\\t",
    0x0A: b"\\n",
    0x0B: b"\\v",
    0x0C: b"\\f",
    0x0D: b"\\r",
    0x5C: b"\\\\",
}


def escape_by_bytes(value: bytes) -> bytes:
    return b"".join(ESCAPED.get(byte, bytes([byte])) for byte in value)


def print_value(value: Value) -> bytes:
    if value is None:
        return b"\\N"
    return escape_by_bytes(value) if isinstance(value, bytes) else b"\\u"


def line(row: list[Value]) -> bytes:
    return b"\t".join(print_value(value) for value in row) + b"\n"


def columns_of(rows: list[list[Value]], width: int) -> tuple[bytes, list[Values]]:
    """The rows' values in one buffer with other bytes between them, and their places in it, by column."""
    data = b""
    columns = []
    for place in range(width):
        kinds, starts, lengths = [], [], []
        for row in rows:
            value = row[place]
            data += b"\\\t\n"
            kinds.append(ord("n") if value is None else ord("t") if isinstance(value, bytes) else ord("u"))
            # Without a text, start and length have no meaning.
            starts.append(len(data) if isinstance(value, bytes) else 2)
            lengths.append(len(value) if isinstance(value, bytes) else 0)
            data += value if isinstance(value, bytes) else b""
        columns.append(Values(np.array(kinds, np.uint8), np.array(starts, np.int64), np.array(lengths, np.int64)))
    return data, columns


def values_of(column: BytesColumn) -> list[bytes]:
    return column.to_arrow().to_pylist()


TABLES = st.integers(0, 4).flatmap(
    lambda width: st.tuples(st.just(width), st.lists(st.lists(VALUE, min_size=width, max_size=width), max_size=6))
)


@given(TABLES, st.data())
def test_lines_are_copys_and_keys_are_their_beginnings(
    table: tuple[int, list[list[Value]]], data: st.DataObject
) -> None:
    width, rows = table
    raw, columns = columns_of(rows, width)
    source = with_constants(np.frombuffer(raw, np.uint8))
    lines = lines_of(source, len(raw), columns, len(rows))
    assert values_of(lines) == [line(row) for row in rows]
    key_width = data.draw(st.integers(0, width))
    keys = [line(row[:key_width]).removesuffix(b"\n") for row in rows]
    assert values_of(keys_of(lines, key_width, width)) == keys
    if key_width:
        assert values_of(key_lines(source, len(raw), columns[:key_width], len(rows))) == keys


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_every_byte_is_escaped_as_the_manual_says(values: list[bytes]) -> None:
    values.append(bytes(range(256)))
    assert values_of(escape(from_list(values))) == [escape_by_bytes(value) for value in values]


@given(st.lists(VALUE, max_size=10), st.integers(1, 9))
def test_escaping_in_blocks_gives_the_same_as_escaping_at_once(values: list[Value], block_bytes: int) -> None:
    texts = [value for value in values if isinstance(value, bytes)]
    assert values_of(escape(from_list(texts), block_bytes)) == [escape_by_bytes(text) for text in texts]


def test_a_text_that_looks_like_a_mark_is_not_one() -> None:
    rows: list[list[Value]] = [[b"\\N", None], [b"\\u", ()], [b"\\.", b""]]
    raw, columns = columns_of(rows, 2)
    lines = lines_of(with_constants(np.frombuffer(raw, np.uint8)), len(raw), columns, 3)
    assert values_of(lines) == [b"\\\\N\t\\N\n", b"\\\\u\t\\u\n", b"\\\\.\t\n"]


def test_unchanged_values_are_filled_from_the_other_row() -> None:
    _, (new, old) = columns_of([[(), b"old"], [b"new", b"older"], [None, b"oldest"], [(), ()]], 2)
    filled = new.fill_unchanged(old)
    assert bytes(filled.kinds) == b"ttnu"
    assert filled.starts[0] == old.starts[0]
    assert filled.lengths.tolist()[:2] == [3, 3]
    assert filled.starts[1] == new.starts[1]


@given(st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5)), max_size=20), st.integers(1, 9))
def test_columns_are_equal_where_their_values_are(pairs: list[tuple[bytes, bytes]], block_bytes: int) -> None:
    pairs += [(left, left) for left, _ in pairs]
    left, right = from_list([one for one, _ in pairs]), from_list([other for _, other in pairs])
    assert left.equals(right).tolist() == [one == other for one, other in pairs]


@given(st.lists(st.lists(st.binary(max_size=5), max_size=5), max_size=4), st.integers(0, 3))
def test_columns_are_concatenated_without_the_bytes_before_their_values(parts: list[list[bytes]], skip: int) -> None:
    columns = []
    for values in parts:
        whole = from_list([b"rubbish", *values])
        columns.append(BytesColumn(whole.data, whole.offsets[1:]))
    assert values_of(concatenate(columns)) == [value for values in parts for value in values]


@pytest.mark.parametrize("padding", [b"", b"\x08\x0a\x00\xff" * 3, b"x" * 70])
def test_keys_of_all_lengths_end_at_their_tab(padding: bytes) -> None:
    texts = [
        bytes([1 + (size + place) % 8 for place in range(size)]) for size in (*range(40), 127, 128, 129, 300, 5000)
    ]
    lines = [b"\t".join([text, text[:3], padding, b""]) + b"\n" for text in texts]
    for some in (lines, lines[::-1], *([line] for line in lines)):
        rows = from_list(some)
        assert values_of(keys_of(rows, 1, 4)) == [line.split(b"\t")[0] for line in some]
        assert values_of(keys_of(rows, 2, 4)) == [b"\t".join(line.split(b"\t")[:2]) for line in some]
        assert values_of(keys_of(rows, 4, 4)) == [line[:-1] for line in some]
    assert len(keys_of(from_list([]), 1, 2)) == 0
