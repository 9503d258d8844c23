"""What the task that hashes a segment says of one that whoever can write to the store has made."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from msgspec.structs import replace

import wal.segments.segments
from check.streams import StreamReport, StreamTask, hash_stream
from columns.arrow_streams import from_stream
from fleet.lsn import Lsn
from snapshots.fold.conversions import Conversion
from snapshots.fold.schema_at_cut import SchemaMapping
from snapshots.fold.sources import SegmentSource, Source
from storage.location import StoreLocation
from tests.unit.made_segments import HELD, event, table
from wal.segments.archive import Segment
from wal.segments.segments import create_segment

GROUP, LINE = 7, b"1\tone\n"


def stored_segment(location: StoreLocation) -> Segment:
    """A segment of a change and an event."""
    change = event(110, "I") | {"group": GROUP, "partition": 0, "key": b"1", "row": LINE}
    return create_segment(location.open(), "wal", 1, HELD, (table([change]), table([event(120)]))).segment


def hashed(location: StoreLocation, segment: Segment, mapping: SchemaMapping | None = None) -> StreamReport:
    source = Source(segment.key, "n1", 0, segment.size, segment.digest, segment=segment)
    one = SegmentSource(source, segment, Lsn(200), frozenset(), {}, mapping)
    return hash_stream(StreamTask(one, Lsn(0), location, with_events=True))


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
    monkeypatch.setattr(wal.segments.segments, "READ_WHOLE_BYTES_MAX", 0)
    segment = stored_segment(location)
    assert hashed(location, segment).problem is None
    problem = hashed(location, replace(segment, **wrong)).problem
    assert problem is not None
    assert problem["details"]["kind"] == kind
