"""What the task that hashes a segment says of one that whoever can write to the store has made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pyarrow as pa
import pytest
from msgspec.structs import replace

import cutline.check.segment_hashes
import cutline.wal.segments.segments
from cutline.check.copies import Copies
from cutline.check.last_changes import LastTask
from cutline.check.new_part import NewPart
from cutline.check.report import Findings, SnapshotReport
from cutline.check.segment_hashes import StreamReport, StreamTask, hash_stream
from cutline.check.streams import continued_from, find_ended, hash_streams
from cutline.check.table_forms import TableForms
from cutline.columns.row_batches import from_stream
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Silent
from cutline.nodes.groups import Column, Group
from cutline.snapshots.fold.changes import ChangeForm
from cutline.snapshots.fold.schema_at_cut import Conversion, SchemaMapping
from cutline.snapshots.fold.sources import SegmentSource, Source
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DefinitionChanges
from cutline.spark.task_processes import InDriver
from cutline.storage.digest import digest
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.wal.segments.archive import (
    Definition,
    OpenTransaction,
    Segment,
    SegmentRange,
    archive_prefix,
    has_place_of,
    segment_key,
)
from cutline.wal.segments.damage import HeldObjects
from cutline.wal.segments.segments import create_segment
from tests.unit.made_commits import full_commit, identity, increment_commit
from tests.unit.made_segments import HELD, event, table

if TYPE_CHECKING:
    from cutline.spark.spark_jobs import SparkSource

GROUP, LINE = 7, b"1\tone\n"


def stored_segment(location: StoreLocation) -> Segment:
    """A segment of a change and an event."""
    change = event(120, "U") | {"group": GROUP, "partition": 0, "key": b"1", "row": LINE}
    return create_segment(
        location.open(), "wal", 1, HELD, (table([change]), table([event(120)])), continued=None
    ).segment


def definition(width: int = 2) -> Group:
    """That of the one table, which has text columns and one partition."""
    columns = tuple(Column(f"c{number}", "text", 25, -1, number) for number in range(width))
    return Group(GROUP, "public", "t", "default", 1, columns)


def forms(width: int = 2) -> InDriver:
    return InDriver(TableForms.of([definition(width)]))


def hashed(location: StoreLocation, segment: Segment, mapping: SchemaMapping | None = None) -> StreamReport:
    source = Source(segment.key, "n1", 0, segment.size, segment.digest, segment=segment)
    one = SegmentSource(source, segment, Lsn(200), frozenset(), {}, mapping)
    return hash_stream(StreamTask(one, Lsn(0), location, forms(), with_events=True))


def chain_of(*nodes: str) -> Chain:
    """A chain of one shard, whose slots were created before all WAL."""
    primary, *standbys = nodes
    copies = (identity(primary), *(identity(node, primary) for node in standbys))
    return Chain(replace(full_commit(), baseline=copies, base=dict.fromkeys(nodes, Lsn(0)), segments={}))


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    return StoreLocation(f"file://{tmp_path}")


def test_the_events_are_reported_as_they_are_stored(location: StoreLocation) -> None:
    report = hashed(location, stored_segment(location))
    assert report.problem is None
    assert report.events is not None
    events: pa.Table = from_stream(report.events)
    assert events["lsn"].to_pylist() == [120]
    assert report.changes == 1


def test_what_no_other_copy_has_is_checked_but_not_hashed(location: StoreLocation) -> None:
    segment = stored_segment(location)
    source = Source(segment.key, "n1", 0, segment.size, segment.digest, segment=segment)
    one = SegmentSource(source, segment, Lsn(200), frozenset(), {})
    last = LastTask(
        one, ChangeForm(frozenset(), hashed=True, for_reports=True, has_stand_ins=False, alone=frozenset({0})), 1000
    )
    report = hash_stream(StreamTask(one, Lsn(0), location, forms(), last, is_compared=False))
    assert report.sums is not None
    assert report.sums.as_dict() == {}
    assert report.last is not None
    assert from_stream(report.last).select(["key", "entry"]).to_pylist() == [{"key": b"1", "entry": 0}]
    refused = hash_stream(StreamTask(one, Lsn(0), location, forms(width=3), last, is_compared=False))
    assert refused.problem is not None


def test_whatever_is_wanted_of_a_segment_is_found_in_one_read(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, read = stored_segment(location), list[str]()
    read_range = LocalStore.read_range

    def noting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        read.append(key)
        return read_range(self, key, start, length)

    monkeypatch.setattr(LocalStore, "read_range", noting)
    source = Source(segment.key, "n1", 0, segment.size, segment.digest, segment=segment)
    one = SegmentSource(source, segment, Lsn(200), frozenset(), {})
    last = LastTask(one, ChangeForm(frozenset(), hashed=True, for_reports=True, has_stand_ins=False), 1000)
    report = hash_stream(StreamTask(one, Lsn(0), location, forms(), last, with_events=True))
    assert report.last is not None
    assert report.events is not None
    assert (len(from_stream(report.last)), len(from_stream(report.events))) == (1, 1)
    assert read == [segment.key]


@pytest.mark.parametrize(
    ("checked_to", "decided", "counted"),
    [(0, (), [1, 1]), (121, (), []), (120, (), [1, 1]), (121, (120,), [1, 1]), (121, (119,), [])],
)
def test_what_an_earlier_check_has_compared_is_not_hashed_again(
    location: StoreLocation, checked_to: int, decided: tuple[int, ...], counted: list[int]
) -> None:
    segment = stored_segment(location)
    source = Source(segment.key, "n1", 0, segment.size, segment.digest, segment=segment)
    one = SegmentSource(source, segment, Lsn(200), frozenset(), {})
    task = StreamTask(one, Lsn(0), location, forms(), checked_to=Lsn(checked_to), decided=frozenset(map(Lsn, decided)))
    report = hash_stream(task)
    assert report.sums is not None
    # The change and the event at 120, in the groups of the table and of events.
    assert [count for count, *_ in report.sums.as_dict().values()] == counted
    assert report.changes == 1


@pytest.mark.parametrize(("width", "is_damaged"), [(2, False), (3, True)])
def test_a_line_that_does_not_fit_its_definition_is_damage(
    location: StoreLocation, width: int, *, is_damaged: bool
) -> None:
    mapping = SchemaMapping(frozenset(), {GROUP: Conversion(8, width, tuple(reversed(range(width))))})
    report = hashed(location, stored_segment(location), mapping)
    assert (report.problem is not None) == is_damaged
    if report.problem is not None:
        assert (report.problem["details"]["kind"], report.problem["details"]["node"]) == ("rows", "n1")


@pytest.mark.parametrize(
    ("wrong", "kind"), [({"events_digest": "0" * 64}, "digest"), ({"events_at": 0}, "digest"), ({"events": 2}, "rows")]
)
def test_what_the_commit_says_of_events_is_compared_although_they_were_read_with_the_rest(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object], kind: str
) -> None:
    monkeypatch.setattr(cutline.wal.segments.segments, "READ_WHOLE_BYTES_MAX", 0)
    segment = stored_segment(location)
    assert hashed(location, segment).problem is None
    problem = hashed(location, replace(segment, **wrong)).problem
    assert problem is not None
    assert problem["details"]["kind"] == kind


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"events_digest": "0" * 64}, "its contents differ from those that were committed"),
        ({"events_at": 3}, "its contents differ from those that were committed"),
    ],
)
def test_what_the_commit_says_of_the_events_of_a_small_segment_is_compared(
    location: StoreLocation, wrong: dict[str, object], what: str
) -> None:
    """A create reads the whole object, and only later versions may read its end alone."""
    problem = hashed(location, replace(stored_segment(location), **wrong)).problem
    assert problem is not None
    assert what in problem["message"]


def test_events_that_begin_before_the_place_in_the_commit_are_damage(location: StoreLocation) -> None:
    """As somebody seals it: the end of the object from there on has the digest in the commit."""
    segment = stored_segment(location)
    place = segment.size - 100
    end = digest(location.open().read_range(segment.key, place, segment.size))
    problem = hashed(location, replace(segment, events_at=place, events_digest=end)).problem
    assert problem is not None
    assert f"before byte {place} of its commit" in problem["message"]


def test_a_definition_of_a_segment_is_that_of_the_commit(location: StoreLocation) -> None:
    change = event(120, "U") | {"group": GROUP, "partition": 0, "key": b"1", "row": LINE}
    group = Group(GROUP, "public", "t", "default", 1, tuple(Column(f"c{n}", "text", 25, -1, n) for n in range(2)))

    def problem_with(own: Group) -> object:
        store = location.open()
        tables = (table([change]), table([event(120)]))
        segment = create_segment(store, "wal", 1, HELD, tables, (Definition(5, own),), continued=None).segment
        report = hashed(location, segment)
        store.delete(segment.key)
        return report.problem and report.problem["message"]

    assert problem_with(group) is None
    assert problem_with(replace(group, number=GROUP + 1, table="other")) is None
    message = problem_with(replace(group, partitions=2))
    assert "its definition of group 7, public.t, is not the commit's" in str(message)


def test_a_transaction_that_a_segment_begins_ends_in_the_next(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is a two-phase one: of those that were rolled back since, PostgreSQL may leave out the rest."""

    def conflicts(end_lsn: int, global_id: str | None = None) -> list[str]:
        change = event(160, "U") | {"group": GROUP, "partition": 0, "key": b"1", "row": LINE, "global_id": global_id}
        opened = SegmentRange("n1", "op", Lsn(100), Lsn(150), OpenTransaction(Lsn(160), 0, 0))
        rest = SegmentRange("n1", "op", Lsn(150), Lsn(200))
        store = location.open()
        first = create_segment(store, "wal", 1, opened, (table([change]), table([event(120)])), continued=None).segment
        tables = table([]), table([event(end_lsn)])
        second = create_segment(store, "wal", 2, rest, tables, continued=first.open).segment

        def sources(_part: NewPart, number: int, node: str, _among: list[str]) -> list[SegmentSource]:
            return [
                SegmentSource(
                    Source(one.key, node, number, one.size, one.digest, segment=one), one, Lsn(200), frozenset(), {}
                )
                for one in (first, second)
            ]

        monkeypatch.setattr(NewPart, "segment_sources", sources)
        monkeypatch.setattr(Chain, "segments", lambda *_: (first, second))
        monkeypatch.setattr(Copies, "since", lambda *_: Lsn(0))
        monkeypatch.setattr(Chain, "definitions", lambda *_: {GROUP: definition()})
        copies = Copies(("n1",), {"n1": "n1"}, chain_of("n1"))
        findings = Findings(SnapshotReport("daily", 0))
        hash_streams(cast("SparkSource", None), copies, HeldObjects(location), findings, Silent())
        for segment in (first, second):
            store.delete(segment.key)
        return [conflict.detail for conflict in findings.report.conflicts]

    assert conflicts(160) == []
    (conflict,) = conflicts(170)
    assert "it lacks the end of the transaction at 0/A0, which begins in segment 1" in conflict
    assert conflicts(170, "global") == []


def test_positions_of_copies_are_asked_for_once_a_node(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, asked = stored_segment(location), list[str]()

    def segments(_part: NewPart, number: int, node: str, _among: list[str]) -> list[SegmentSource]:
        source = Source(segment.key, node, number, segment.size, segment.digest, segment=segment)
        return [SegmentSource(source, segment, Lsn(200), frozenset(), {})] * 3

    def since(_copies: Copies, node: str) -> Lsn:
        asked.append(node)
        return Lsn(0)

    monkeypatch.setattr(NewPart, "segment_sources", segments)
    monkeypatch.setattr(Copies, "since", since)
    monkeypatch.setattr(Chain, "definitions", lambda *_: {GROUP: definition()})
    copies = Copies(("n1", "n2"), {"n1": "n1", "n2": "n1"}, chain_of("n1", "n2"))
    findings = Findings(SnapshotReport("daily", 0))
    found = hash_streams(cast("SparkSource", None), copies, HeldObjects(location), findings, Silent())
    assert asked == ["n1", "n2"]
    assert {node: count for (node, group), (count, *_) in found.sums.as_dict().items() if group == GROUP} == {
        0: 3,
        1: 3,
    }


def test_a_segment_has_no_changes_under_a_definition_that_ended_before_it() -> None:
    """A drain knows the definitions of the commit before, and so may write changes under one that its commit ends."""
    full, first, second = full_commit(), increment_commit(1), increment_commit(2)
    changed = replace(first, definition_changes=DefinitionChanges(gone={"a": (GROUP,)}))
    chain = Chain(full, (changed, second))
    assert find_ended(Chain(full, (first, second)), "b") == {}
    assert find_ended(chain, "b") == {3: frozenset({GROUP})}


def test_changes_count_from_the_first_under_a_definition_that_continues_another() -> None:
    """Those of a table that was copied again count from the copy, which may be later."""
    changes = DefinitionChanges(successions={"a": {7: GROUP}}, begun={"a": {7: Lsn(90), 8: Lsn(95)}, "b": {7: Lsn(92)}})
    chain = Chain(full_commit(), (replace(increment_commit(1), definition_changes=changes),))
    assert [continued_from(chain, node) for node in ("a", "b")] == [{7: 90}, {7: 92}]


def test_the_groups_of_changes_are_those_under_which_they_are_stored(location: StoreLocation) -> None:
    mapping = SchemaMapping(frozenset(), {GROUP: Conversion(8, 2, (0, 1))})
    assert hashed(location, stored_segment(location), mapping).groups == {GROUP}


@pytest.mark.parametrize(
    ("wrong", "kind", "what"),
    [
        ({"key": "wal/00000000000000000002.parquet"}, "rows", "in its metadata, but wal/"),
        ({"seal": "1" * 64}, "digest", "the seal in its metadata is not the digest of its content"),
    ],
)
def test_key_and_seal_of_a_segment_are_its_own(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], kind: str, what: str
) -> None:
    segment, hashes = stored_segment(location), cutline.check.segment_hashes
    declared = hashes.declared_metadata
    monkeypatch.setattr(hashes, "declared_metadata", lambda file: replace(declared(file), **wrong))
    problem = hashed(location, segment).problem
    assert problem is not None
    assert problem["details"]["kind"] == kind
    assert what in problem["message"]


def test_a_repair_stores_a_segment_under_its_own_operation() -> None:
    first = segment_key(archive_prefix("daily", "a", "op-0"), 7)
    assert has_place_of(first, segment_key(archive_prefix("daily", "a", "op-9"), 7))
    for other in (("daily", "b", 7), ("weekly", "a", 7), ("daily", "a", 8)):
        assert not has_place_of(first, segment_key(archive_prefix(*other[:2], "op-0"), other[2]))
