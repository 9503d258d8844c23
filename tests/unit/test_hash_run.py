"""Small segments that are read together have the reports that each has alone, also if one of them is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cutline.check.deleted_rows import expected_rows
from cutline.check.hashing import combine_all
from cutline.check.segment_hashes import StreamReport, StreamRun, StreamTask, hash_run, hash_stream
from cutline.check.segment_transactions import SegmentTransactions
from cutline.check.stored_rows import RowsInvalidError
from cutline.check.table_forms import TableForms
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.fold import sources
from cutline.snapshots.fold.sources import DECLARED, SegmentSource, Source, runs_of
from cutline.spark.task_processes import InDriver
from cutline.storage.digest import digest
from cutline.storage.location import StoreLocation
from cutline.wal.segments.archive import OpenTransaction, Segment, SegmentMetadata, SegmentRange
from cutline.wal.segments.damage import HeldObjects
from cutline.wal.segments.segments import create_segment, segment_bytes
from tests.stores.damage import flip_byte
from tests.unit.made_segments import event, table

GROUP, COUNT = 7, 6
FORMS = TableForms.of(
    [Group(GROUP, "public", "t", "default", 1, tuple(Column(f"c{n}", "text", 25, -1, n) for n in range(2)))]
)
Row = dict[str, object]


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    return StoreLocation(f"file://{tmp_path}")


def at_commit(number: int) -> int:
    """The position of the one transaction of a segment."""
    return number * 100 + 20


def change(position: int, key: bytes, op: str = "U") -> Row:
    row = b"" if op == "D" else key + b"\tone\n"
    return event(position, op) | {"group": GROUP, "partition": 0, "key": key, "row": row, "xid": position}


def commit(position: int) -> Row:
    return event(position) | {"xid": position}


def marker(position: int) -> Row:
    return event(position, "M") | {"row": b"marker %d" % position}


def stored(location: StoreLocation, *, moved: int | None = None) -> list[Segment]:
    """Segments of a transaction and a marker each; the change in segment `moved` is in the segment before it instead.

    Each writes a key of its own, and the last deletes the key of the second, and one that was never there.
    """
    rows = {number: [change(at_commit(number), b"%d" % number)] for number in range(1, COUNT + 1)}
    rows[COUNT] = [change(at_commit(COUNT), b"2", "D"), change(at_commit(COUNT), b"none", "D") | {"seq": 1}]
    if moved is not None:
        rows[moved - 1] += rows[moved]
        rows[moved] = []
    segments: list[Segment] = []
    for number, changes in rows.items():
        held = SegmentRange("n1", "op", Lsn(number * 100), Lsn((number + 1) * 100))
        events = [commit(at_commit(number)), marker(at_commit(number) + 30)]
        tables = table(changes), table(events)
        segments.append(create_segment(location.open(), "wal", number, held, tables, continued=None).segment)
    return segments


def tasks_of(location: StoreLocation | HeldObjects, segments: Sequence[Segment]) -> StreamRun:
    found = (Source(one.key, "n1", 0, one.size, one.digest, segment=one) for one in segments)
    forms = InDriver(FORMS)
    return tuple(
        StreamTask(SegmentSource(source, one, Lsn(10_000), frozenset(), {}), Lsn(0), location, forms, with_deletes=True)
        for source, one in zip(found, segments, strict=True)
    )


def without_sums(report: StreamReport) -> tuple[object, ...]:
    """What a report says of its segment alone."""
    return report.changes, report.markers, report.problem, report.groups, report.lacks_end, report.first_changes


def assert_same(together: list[StreamReport], alone: list[StreamReport]) -> None:
    assert list(map(without_sums, together)) == list(map(without_sums, alone))
    sums = [combine_all([report.sums for report in reports if report.sums], 2) for reports in (together, alone)]
    assert sums[0].as_dict() == sums[1].as_dict()
    deletes = [[report.deletes for report in reports if report.deletes] for reports in (together, alone)]
    expected = [expected_rows(of_node) for of_node in deletes]
    assert expected[0].lsn.tolist() == expected[1].lsn.tolist()
    assert expected[0].hashes.tolist() == expected[1].hashes.tolist()
    last = [{one for report in of_node for one in report.last_changes} for of_node in deletes]
    assert last[0] == last[1]


def test_segments_that_are_read_together_have_the_reports_that_they_have_alone(location: StoreLocation) -> None:
    tasks = tasks_of(location, stored(location))
    alone = [hash_stream(task) for task in tasks]
    assert [report.problem for report in alone] == [None] * COUNT
    together = hash_run(tasks)
    assert_same(together, alone)
    # They were read together, and one row is deleted that no segment writes.
    assert [report.deletes is not None for report in together] == [True] + [False] * (COUNT - 1)
    deletes = together[0].deletes
    assert deletes is not None
    assert len(expected_rows([deletes]).hashes) == 1
    assert sorted(at for _, at in deletes.last_changes) == [at_commit(number) for number in range(1, COUNT + 1)]


def test_the_driver_keeps_the_rows_of_segments_that_it_has_read_together(location: StoreLocation) -> None:
    segments, held = stored(location), HeldObjects(location)
    hash_run(tasks_of(held, segments))
    for number, segment in enumerate(segments, start=1):
        rows = held.rows[segment.key]
        assert rows.part()["lsn"].to_pylist()[-2:] == [at_commit(number), at_commit(number) + 30]
        assert len(rows.part()) == segment.changes + segment.events
        assert rows.part(segment.changes)["op"].to_pylist() == [ord("C"), ord("M")]


def test_of_segments_that_are_read_together_only_the_damaged_one_is_reported(location: StoreLocation) -> None:
    segments = stored(location)
    flip_byte(Path(location.url.removeprefix("file://")) / segments[2].key)
    reports = hash_run(tasks_of(location, segments))
    assert [report.problem is None for report in reports] == [number != 2 for number in range(COUNT)]


def test_a_number_of_rows_that_another_segment_has_is_a_problem(location: StoreLocation) -> None:
    segments = stored(location)
    segments[0], segments[1] = replace(segments[0], changes=2), replace(segments[1], changes=0)
    reports = hash_run(tasks_of(location, segments))
    assert [report.problem is None for report in reports] == [False, False] + [True] * (COUNT - 2)


def test_a_change_is_not_excused_by_the_end_of_its_transaction_in_the_next_segment(location: StoreLocation) -> None:
    reports = hash_run(tasks_of(location, stored(location, moved=4)))
    assert [report.problem is None for report in reports] == [True, True, False, True, True, True]
    problem = reports[2].problem
    assert problem is not None
    assert f"changes at {Lsn(at_commit(4))}, where no transaction ends" in problem["message"]


def test_events_that_share_a_row_group_with_changes_are_damage_in_a_run_too(location: StoreLocation) -> None:
    segments = stored(location)
    store, third = location.open(), segments[2]
    fields = {name: getattr(third, name) for name in ("key", *DECLARED)}
    metadata = SegmentMetadata(**fields, definitions=(), first_changes={})
    rows = [change(at_commit(3), b"3"), commit(at_commit(3)) | {"changes": 1}, marker(at_commit(3) + 30)]
    body = segment_bytes(metadata, table(rows), table([]))
    store.delete(third.key)
    store.create(third.key, body)
    segments[2] = replace(third, size=len(body), digest=digest(body), events_at=None, events_digest="")
    reports = hash_run(tasks_of(location, segments))
    assert [report.problem is None for report in reports] == [number != 2 for number in range(COUNT)]
    problem = reports[2].problem
    assert problem is not None
    assert "it contains 0 events instead of 2" in problem["message"]


@pytest.mark.parametrize("place", [0, 1])
def test_the_transactions_of_a_run_end_in_the_segments_of_their_changes(location: StoreLocation, place: int) -> None:
    first, second, *_ = stored(location)
    transactions = SegmentTransactions(first, Lsn(0), None, FORMS, (second,))
    at = at_commit(second.number)
    rows = [change(at, b"1"), commit(at_commit(first.number)) | {"changes": 0}, commit(at) | {"changes": 1}]
    transactions.add(table(rows), np.array([place, 0, 1]))
    if place == 1:
        transactions.end()
        return
    with pytest.raises(RowsInvalidError, match="where no transaction ends"):
        transactions.end()


def test_an_event_is_in_the_range_of_its_own_segment(location: StoreLocation) -> None:
    first, second, *_ = stored(location)
    transactions = SegmentTransactions(first, Lsn(0), None, FORMS, (second,))
    with pytest.raises(RowsInvalidError, match="but it holds the WAL from"):
        transactions.add(table([commit(at_commit(second.number)) | {"changes": 0}]), np.array([0]))


def test_files_that_declare_much_are_read_one_after_the_other(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tasks_of(location, stored(location))
    alone = [hash_stream(task) for task in tasks]
    monkeypatch.setattr(sources, "RUN_BYTES_MAX", 0)
    reports = hash_run(tasks)
    assert_same(reports, alone)
    assert all(report.deletes is not None for report in reports)


def test_runs_are_of_small_segments_in_their_order(location: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = stored(location)
    spanning = replace(others[0], open=OpenTransaction(Lsn(1), 0, 0))
    large = replace(others[2], size=2 << 20)
    segments = [first, spanning, others[1], large, others[3], others[4]]

    def runs(runs_min: int) -> list[list[int]]:
        found = runs_of(segments, lambda one: one, lambda one: one.node, runs_min)
        return [[one.number for one in run] for run in found]

    assert runs(1) == [[1], [2], [3], [4], [5, 6]]
    segments = [first, *others]
    assert runs(1) == [[1, 2, 3, 4, 5, 6]]
    assert runs(3) == [[1, 2], [3, 4], [5, 6]]
    assert runs(100) == [[1], [2], [3], [4], [5], [6]]
    monkeypatch.setattr(sources, "RUN_SEGMENTS_MAX", 4)
    assert runs(1) == [[1, 2, 3, 4], [5, 6]]
