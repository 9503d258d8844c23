"""Which rows a repair script knows at the cut: a line, no row, or a row of which nothing is known."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from cutline.check.live import stored_lines
from cutline.check.live.stored_lines import (
    INCOMPLETE,
    LINES_SCHEMA,
    LineAtCut,
    RowAtCut,
    WantedLines,
    read_stored,
    states_of,
)
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.fleet.progress import Silent
from cutline.snapshots.fold.sources import PROBLEM
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError, report_of
from cutline.storage.location import StoreLocation
from cutline.wal.segments.damage import ObjectDamagedError
from tests.unit.made_commits import unused_url

KEYED, FULL = 1, 2
SCHEMA = pa.schema([("group", pa.int32()), ("partition", pa.int32()), ("key", pa.binary()), ("row", pa.binary())])


def identity(value: bytes) -> int:
    return int(xxhash64(from_list([value])).view(np.int64)[0])


def table(*rows: tuple[int, int, bytes, bytes]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)


def at(group: int, value: bytes) -> RowAtCut:
    return RowAtCut("s1", group, 0, identity(value))


def wanted(*rows: RowAtCut, line_bytes: int = 100) -> WantedLines:
    groups, identities = [row.group for row in rows], [row.identity for row in rows]
    return WantedLines(np.array(groups, np.int64), np.array(identities, np.int64), frozenset({FULL}), line_bytes)


def test_wanted_rows_are_picked_once_and_cut_off() -> None:
    rows = table(
        (KEYED, 0, b"7", b"7\tseven\n"), (KEYED, 0, b"8", b"8\teight\n"),
        (FULL, 0, b"", b"line\n"), (FULL, 0, b"", b"line\n"), (FULL, 0, b"", b"7"), (3, 0, b"7", b"7\n"),
    )  # fmt: skip
    keys = at(KEYED, b"7"), at(FULL, b"line\n"), at(FULL, b"absent\n")
    found = wanted(*keys).pick(rows)
    assert states_of(keys, found, []) == {
        keys[0]: LineAtCut(b"7", b"7\tseven\n", is_cut=False), keys[1]: LineAtCut(b"", b"line\n", is_cut=False),
    }  # fmt: skip
    short = states_of(keys, wanted(*keys, line_bytes=5).pick(rows), [])
    assert short[keys[0]] == LineAtCut(b"7", b"7\tsev", is_cut=True)
    assert not short[keys[1]].is_cut


def test_a_row_that_lacks_an_image_is_unknown_and_not_absent() -> None:
    incomplete = table((PROBLEM, KEYED, b"7", b"7\tx\t\\u\n"), (KEYED, 0, b"8", b"8\ty\tz\n"))
    keys = at(KEYED, b"7"), at(KEYED, b"8")
    found = states_of(keys, wanted(*keys).pick(incomplete), [])
    assert (found[keys[0]].unknown, found[keys[1]].unknown, found[keys[1]].line) == (INCOMPLETE, "", b"8\ty\tz\n")


def test_nothing_is_known_if_an_object_is_damaged_and_a_store_that_does_not_answer_is_an_error() -> None:
    keys = at(KEYED, b"7"), at(KEYED, b"8")
    damaged = report_of(RefusedError("object x is damaged"))
    found = states_of(keys, LINES_SCHEMA.empty_table(), [damaged])
    assert [found[key].unknown for key in keys] == ["object x is damaged"] * 2
    with pytest.raises(SnapshotError, match="503 Slow Down"):
        states_of(keys, LINES_SCHEMA.empty_table(), [report_of(UnreachableError("S3: 503 Slow Down"))])


def test_a_damaged_segment_with_a_truncate_makes_rows_unknown_and_ends_no_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def find(*_: object, **__: object) -> None:
        raise ObjectDamagedError(key="wal/s1/2.parquet", kind="digest", node="s1", detail="its contents differ")

    monkeypatch.setattr(stored_lines, "sources_of", find)
    key = at(KEYED, b"7")
    # Nothing is read after that, so no session is needed.
    found = read_stored(cast("Any", None), cast("Any", None), StoreLocation(unused_url()), [key], Silent())
    assert "wal/s1/2.parquet" in found[key].unknown
