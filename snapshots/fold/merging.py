"""Merge images: fill in the values that an UPDATE left unchanged from the row's earlier images, by whole columns.

Each row comes with its images from the oldest to the newest. The loop goes back in time image by image, for all rows at
once that still lack a value. So it runs as often as the longest run of partial images, not once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cutline.columns.bytes_column import BytesColumn, Ints, gather
from cutline.columns.lines import NEWLINE, TAB, UNCHANGED_MARK


@dataclass(frozen=True, slots=True)
class Images:
    """The images of n rows, oldest first: row i has the images `offsets[i]` to `offsets[i + 1]`.

    The image of a deleted row has no line: its length is 0.
    """

    lines: BytesColumn
    offsets: Ints


def merge(images: Images, column_count: int) -> tuple[BytesColumn, npt.NDArray[np.bool_]]:
    """Complete the newest image of every row; also return which rows could be completed."""
    starts, lengths = _fields(images.lines, column_count)
    newest = images.offsets[1:] - 1
    field_starts, field_lengths = starts[newest].copy(), lengths[newest].copy()
    open_rows = np.flatnonzero(_is_unchanged(images.lines, field_starts, field_lengths).any(axis=1))
    back = 1
    while len(open_rows):
        image = newest[open_rows] - back
        open_rows = open_rows[image >= images.offsets[:-1][open_rows]]
        image = newest[open_rows] - back
        # A row that was deleted has no earlier values.
        open_rows, image = open_rows[images.lines.lengths[image] > 0], image[images.lines.lengths[image] > 0]
        is_lacking = _is_unchanged(images.lines, field_starts[open_rows], field_lengths[open_rows])
        field_starts[open_rows] = np.where(is_lacking, starts[image], field_starts[open_rows])
        field_lengths[open_rows] = np.where(is_lacking, lengths[image], field_lengths[open_rows])
        still = _is_unchanged(images.lines, field_starts[open_rows], field_lengths[open_rows]).any(axis=1)
        open_rows = open_rows[still]
        back += 1
    lacking = np.any(_is_unchanged(images.lines, field_starts, field_lengths), axis=1)
    return _lines(images.lines, field_starts, field_lengths), np.logical_not(lacking)


def _fields(lines: BytesColumn, column_count: int) -> tuple[Ints, Ints]:
    """The start and length of each line's fields; lines of length 0 have no fields."""
    present = np.flatnonzero(lines.lengths > 0)
    starts = np.zeros((len(lines), column_count), np.int64)
    lengths = np.zeros((len(lines), column_count), np.int64)
    first, last = int(lines.offsets[0]), int(lines.offsets[-1])
    tabs = first + np.flatnonzero(lines.data[first:last] == TAB).reshape(len(present), column_count - 1)
    begins = np.concatenate([lines.offsets[:-1][present, None], tabs + 1], axis=1)
    ends = np.concatenate([tabs, lines.offsets[1:][present, None] - 1], axis=1)
    starts[present], lengths[present] = begins, ends - begins
    return starts, lengths


def _is_unchanged(lines: BytesColumn, starts: Ints, lengths: Ints) -> npt.NDArray[np.bool_]:
    first, second = UNCHANGED_MARK
    last = max(len(lines.data) - 1, 0)
    is_mark: npt.NDArray[np.bool_] = (lengths == len(UNCHANGED_MARK)) & (lines.data[np.minimum(starts, last)] == first)
    is_mark &= lines.data[np.minimum(starts + 1, last)] == second
    return is_mark


def _lines(lines: BytesColumn, starts: Ints, lengths: Ints) -> BytesColumn:
    rows, width = starts.shape
    source = np.concatenate([lines.data, np.array([TAB, NEWLINE], np.uint8)])
    piece_starts = np.empty((rows, 2 * width), np.int64)
    piece_lengths = np.ones((rows, 2 * width), np.int64)
    piece_starts[:, ::2], piece_lengths[:, ::2] = starts, lengths
    piece_starts[:, 1::2] = len(lines.data)
    piece_starts[:, -1] = len(lines.data) + 1
    pieces = gather(source, piece_starts.reshape(-1), piece_lengths.reshape(-1))
    return BytesColumn(pieces.data, np.ascontiguousarray(pieces.offsets[:: 2 * width]))
