from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutline.columns.bytes_column import BytesColumn, from_list, offsets_of
from cutline.snapshots.fold import key_history
from cutline.snapshots.fold.key_history import Images, merge, merge_in_blocks

MARK = b"\\u"
# `\\\\u` is COPY's text of a value that is a backslash and a u: not a mark.
FIELDS = st.sampled_from([MARK, MARK, b"", b"a", b"\\N", b"\\\\u", b"u", b"longer value", b"\\\\"])


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[list[list[bytes] | None]]]:
    """The number of columns, and for every row its images, oldest first; None where the row was deleted."""
    width = draw(st.integers(1, 4))
    image = st.lists(FIELDS, min_size=width, max_size=width)
    history = st.tuples(st.lists(st.none() | image, max_size=5), image).map(lambda both: [*both[0], both[1]])
    return width, draw(st.lists(history, min_size=1, max_size=8))


def line(fields: list[bytes] | None) -> bytes:
    return b"" if fields is None else b"\t".join(fields) + b"\n"


def merge_row(history: list[list[bytes] | None]) -> list[bytes]:
    """Merge one row: each value comes from the newest image that has it, and never from before a gap."""
    found = list(history[-1] or [])
    for image in reversed(history[:-1]):
        if image is None:
            break
        found = [old if new == MARK else new for new, old in zip(found, image, strict=True)]
    return found


def merge_rows(width: int, rows: list[list[list[bytes] | None]], before: list[bytes]) -> tuple[list[bytes], list[bool]]:
    """Merge images that are inside a larger buffer."""
    lines = from_list([*before, *(line(image) for history in rows for image in history)])
    lines = BytesColumn(lines.data, lines.offsets[len(before) :])
    offsets = offsets_of(np.array([len(history) for history in rows], np.int64))
    column, complete = merge(Images(lines, offsets), width)
    return column.to_arrow().to_pylist(), complete.tolist()


@given(histories(), st.lists(st.sampled_from([b"x\ty\n", b"", b"\\u\n"]), max_size=2))
def test_values_come_from_the_newest_image_that_has_them(
    found: tuple[int, list[list[list[bytes] | None]]], before: list[bytes]
) -> None:
    width, rows = found
    expected = [merge_row(history) for history in rows]
    lines, complete = merge_rows(width, rows, before)
    assert complete == [MARK not in fields for fields in expected]
    assert lines == [line(fields) for fields in expected]


@given(histories(), st.integers(1, 12))
def test_blocks_of_images_are_merged_to_the_same_rows(
    found: tuple[int, list[list[list[bytes] | None]]], fields_max: int
) -> None:
    width, rows = found
    present = [[image for image in history if image is not None] for history in rows]
    lines = from_list([line(image) for history in present for image in history])
    images = Images(lines, offsets_of(np.array([len(history) for history in present], np.int64)))
    with patch.object(key_history, "MERGED_FIELDS_MAX", fields_max):
        column, complete = merge_in_blocks(images, width)
    expected = [merge_row([*history]) for history in present]
    assert complete.tolist() == [MARK not in fields for fields in expected]
    assert column.to_arrow().to_pylist() == [line(fields) for fields in expected]


def test_a_row_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match="no image"):
        merge_rows(1, [[[b"1"]], []], [])


def test_a_row_that_was_deleted_takes_nothing_from_before() -> None:
    history: list[list[bytes] | None] = [[b"1", b"old"], None, [b"1", MARK]]
    lines, complete = merge_rows(2, [history], [])
    assert complete == [False]
    assert lines == [b"1\t\\u\n"]


def test_one_row_with_many_partial_images_and_one_with_none() -> None:
    long: list[list[bytes] | None] = [[b"1", b"kept", b"0"]]
    long += [[b"1", MARK, b"%d" % number] for number in range(50)]
    lines, complete = merge_rows(3, [long, [[b"2", b"b", b"c"]]], [])
    assert complete == [True, True]
    assert lines == [b"1\tkept\t49\n", b"2\tb\tc\n"]
