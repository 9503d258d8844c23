from __future__ import annotations

import numpy as np
import pytest

from cutline.columns.bytes_column import BytesColumn, from_list
from cutline.wal.decoding.pgoutput import (
    DecodingError,
    Relation,
    RelationColumn,
    messages_of,
    read_relation,
    read_tuples,
)
from tests.wal import pgoutput_messages as pgoutput


def test_a_relation_is_read_as_it_was_sent() -> None:
    columns = [(True, "id", 23, -1), (False, 'say "ü"', 1043, 14), (False, "", 4_000_000_000 - 2**32, -1)]
    sent = pgoutput.relation(16_400, "my schema", "order", "d", columns)
    assert read_relation(sent) == Relation(
        16_400,
        "my schema",
        "order",
        "d",
        (
            RelationColumn("id", 23, -1, is_key=True),
            RelationColumn('say "ü"', 1043, 14, is_key=False),
            RelationColumn("", 4_000_000_000, -1, is_key=False),
        ),
    )
    assert read_relation(pgoutput.relation(1, "", "t", "n", [])) == Relation(1, "pg_catalog", "t", "n", ())


def test_tuples_are_read_by_column_with_their_ends() -> None:
    rows: list[list[pgoutput.Value]] = [[b"1", None, ()], [b"", b"t\0n", b"x" * 300], [None, (), None]]
    column = from_list([pgoutput.insert(7, row) for row in rows])
    messages = messages_of(column)
    values, ends = read_tuples(messages, np.arange(3), messages.starts + 6, 3, is_last=True)
    assert ends.tolist() == messages.ends.tolist()
    for place, one in enumerate(values):
        for number, row in enumerate(rows):
            start = int(one.starts[number])
            value = row[place]
            kind = chr(one.kinds[number])
            if isinstance(value, bytes):
                assert kind == "t"
                assert bytes(messages.source[start : start + int(one.lengths[number])]) == value
            else:
                assert kind == ("n" if value is None else "u")
                assert one.lengths[number] == 0


def test_messages_inside_a_larger_buffer_are_read_at_their_own_places() -> None:
    whole = from_list([b"?rubbish", pgoutput.begin(5, 6), pgoutput.commit(5, 9)])
    messages = messages_of(BytesColumn(whole.data, whole.offsets[1:]))
    assert bytes(messages.kinds) == b"BC"
    assert messages.u64(messages.starts + np.array([1, 2])).tolist() == [5, 5]
    assert messages.bytes_at(1) == pgoutput.commit(5, 9)


@pytest.mark.parametrize("letter", [b"S", b"E", b"c", b"A", b"p", b"?"])
def test_messages_of_another_protocol_are_refused(letter: bytes) -> None:
    with pytest.raises(DecodingError, match="protocol 3"):
        messages_of(from_list([pgoutput.begin(1, 2), letter + b"1234"]))


def test_a_tuple_of_another_width_or_with_binary_values_is_refused() -> None:
    messages = messages_of(from_list([pgoutput.insert(7, [b"1", b"2"])]))
    with pytest.raises(DecodingError, match="2 columns instead of 3"):
        read_tuples(messages, np.arange(1), messages.starts + 6, 3, is_last=True)
    binary = messages_of(from_list([pgoutput.insert(7, [b"1"]).replace(b"t\0\0\0\1", b"b\0\0\0\1")]))
    with pytest.raises(DecodingError, match="neither text"):
        read_tuples(binary, np.arange(1), binary.starts + 6, 1, is_last=True)
