from __future__ import annotations

import json
from collections import Counter
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import cutline.wal.segments.segments as module
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import fields_of, from_json
from cutline.storage.encryption.fleet_encryption import DataKey
from cutline.storage.memory import InMemoryStore
from cutline.storage.open import open_store
from cutline.storage.store import ObjectExistsError
from cutline.storage.stored_form import stored_form
from cutline.wal.segments.archive import (
    ArchiveError,
    Definition,
    OpenTransaction,
    Segment,
    SegmentRange,
    archive_prefix,
    check_contiguous,
    segment_key,
)
from cutline.wal.segments.segments import (
    SEGMENT_SCHEMA,
    check_rows,
    create_segment,
    list_unlisted,
    read_events,
    read_metadata,
)
from tests.unit.made_changes import FULL, KEYED
from tests.unit.made_segments import HELD, event, memory, table

PLACES = st.integers(0, 2**63 - 1).map(Lsn)
OPEN = st.none() | st.builds(OpenTransaction, PLACES, st.integers(-1, 2**40), st.integers(0, 2**40))
RANGES = st.builds(
    SegmentRange,
    node=st.text(min_size=1),
    operation=st.text(min_size=1),
    after=PLACES,
    through=PLACES,
    open=OPEN,
)
COUNTS = st.integers(0, 2**40)
SEGMENTS = st.builds(
    Segment, key=st.text(), number=st.integers(1, 10**12), size=COUNTS, digest=st.text(), events_at=COUNTS,
    events_digest=st.text(), changes=COUNTS, events=COUNTS, partials=COUNTS, truncates=COUNTS,
    node=st.text(min_size=1), operation=st.text(min_size=1), after=PLACES, through=PLACES, open=OPEN,
)  # fmt: skip
ROWS = st.builds(
    dict,
    lsn=PLACES.map(int), end_lsn=PLACES.map(int), seq=PLACES,
    xid=st.integers(0, 2**32), global_id=st.none() | st.text(),
    op=st.sampled_from([ord(letter) for letter in "IUuDT"]), group=st.integers(1, 2**31 - 1),
    partition=st.integers(-1, 1023), key=st.binary(), row=st.binary(),
)  # fmt: skip
EVENTS = ROWS.map(lambda row: row | {"op": ord("C"), "group": 0})


@given(RANGES)
def test_a_range_round_trips_through_json(held: SegmentRange) -> None:
    assert from_json(json.dumps(fields_of(held)), SegmentRange) == held


@given(SEGMENTS)
def test_a_segment_round_trips_through_a_commit(segment: Segment) -> None:
    assert from_json(json.dumps(fields_of(segment)), Segment) == segment


@given(RANGES, st.lists(ROWS, max_size=8), st.lists(EVENTS, max_size=4))
def test_a_segment_round_trips_through_the_store(
    held: SegmentRange, changes: list[dict[str, object]], events: list[dict[str, object]]
) -> None:
    store = memory()
    archived = create_segment(store, "wal", 7, held, (table(changes), table(events)), continued=None)
    created, numbers = archived.segment, Counter(row["lsn"] for row in changes)
    found = (created.node, created.operation, created.after, created.through)
    assert found == (held.node, held.operation, held.after, held.through)
    opened = held.open and OpenTransaction(held.open.lsn, held.open.seq, numbers[int(held.open.lsn)])
    assert created.open == opened
    assert (created.changes, created.events) == (len(changes), len(events))
    assert created.partials == sum(row["op"] == ord("u") for row in changes)
    assert created.truncates == sum(row["op"] == ord("T") for row in changes)
    assert created.key == segment_key("wal", 7) == "wal/00000000000000000007.parquet"
    assert read_metadata(store, "s1", created.key, 7) == archived
    counted = [row | {"changes": numbers[row["lsn"]]} for row in events]
    assert read_events(store, created).to_pylist() == counted
    stored = pq.read_table(pa.BufferReader(store.read(created.key))).to_pylist()
    assert stored == [row | {"changes": None} for row in changes] + counted


def test_the_changes_of_a_transaction_are_counted_across_segments() -> None:
    """Only the events that end the changes of a transaction have their number."""
    store = memory()
    begun = SegmentRange("n1", "op", Lsn(100), Lsn(150), OpenTransaction(Lsn(160), 5, 0))
    parts = [event(160, "U")] * 3, [event(120), event(130, "M")]
    first = create_segment(store, "wal", 1, begun, (table(parts[0]), table(parts[1])), continued=None)
    assert first.segment.open == OpenTransaction(Lsn(160), 5, 3)
    assert [row["changes"] for row in read_events(store, first.segment).to_pylist()] == [0, None]
    middle = replace(begun, after=Lsn(150), open=OpenTransaction(Lsn(160), 7, 0))
    second = create_segment(
        store, "wal", 2, middle, (table([event(160, "U")]), table([])), continued=first.segment.open
    )
    assert second.segment.open == OpenTransaction(Lsn(160), 7, 4)
    end = replace(begun, after=Lsn(150), through=Lsn(200), open=None)
    part = {"global_id": "transfer"}
    ends = [event(160, "P") | part, event(165, "K") | part, event(170)]
    tables = table([event(160, "D") | part, event(170, "T")]), table(ends)
    third = create_segment(store, "wal", 3, end, tables, continued=second.segment.open)
    assert third.segment.open is None
    assert [row["changes"] for row in read_events(store, third.segment).to_pylist()] == [5, None, 1]


@pytest.mark.parametrize("whole_max", [0, 1 << 30])
@pytest.mark.parametrize("sizes", [(0, 0), (0, 5), (5, 0), (4, 4), (10, 3), (9, 9)])
def test_events_are_read_alone_from_their_own_row_groups(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], whole_max: int
) -> None:
    monkeypatch.setattr(module, "ROWS_PER_ROW_GROUP", 4)
    monkeypatch.setattr(module, "READ_WHOLE_BYTES_MAX", whole_max)
    changes = table([event(number, "U") for number in range(sizes[0])])
    events = table([event(number) for number in range(sizes[1])])
    store = memory()
    segment = create_segment(store, "wal", 1, HELD, (changes, events), continued=None).segment
    assert read_events(store, segment).drop_columns("changes").to_pylist() == events.drop_columns("changes").to_pylist()
    file = pq.ParquetFile(pa.BufferReader(store.read(segment.key)))
    for number in range(file.num_row_groups):
        ops = set(file.read_row_group(number)["op"].to_pylist())
        assert ops in ({ord("U")}, {ord("C")})


class CountingStore(InMemoryStore):
    """A store that counts the bytes that are read from it."""

    read_bytes = 0

    def read(self, key: str) -> bytes:
        body = super().read(key)
        type(self).read_bytes += len(body)
        return body

    def read_range(self, key: str, start: int, length: int) -> bytes:
        body = InMemoryStore.read(self, key)[start : start + length]
        type(self).read_bytes += len(body)
        return body


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_reading_the_events_of_a_large_segment_reads_few_bytes(
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_encrypted: bool,
) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES_MAX", 1000)
    # Keys that do not compress; Arrow reads the last 64 KiB for the footer.
    rows = [event(number, "U") | {"key": sha256(b"%d" % number).digest()} for number in range(20_000)]
    raw = CountingStore("memory://counting")
    store = DataKey(bytes(range(32))).over(raw) if is_encrypted else raw
    segment = create_segment(store, "wal", 1, HELD, (table(rows), table([event(5)])), continued=None).segment
    CountingStore.read_bytes = 0
    assert read_events(store, segment)["lsn"].to_pylist() == [5]
    assert CountingStore.read_bytes < segment.size / 3
    tail = raw.read(segment.key)[-CountingStore.read_bytes :]
    damaged = DataKey(bytes(range(32))).over(InMemoryStore("memory://damaged")) if is_encrypted else memory()
    stored_form(damaged).raw.create(segment.key, bytes(raw.size(segment.key) - len(tail)) + tail)
    assert read_events(damaged, segment)["lsn"].to_pylist() == [5]
    assert read_metadata(store, "s1", segment.key, 1).segment == segment


def test_a_segment_number_can_be_used_only_once() -> None:
    store = open_store("memory://segments-once", {})
    tables = (table([]), table([]))
    create_segment(store, "wal", 1, HELD, tables, continued=None)
    with pytest.raises(ObjectExistsError):
        create_segment(store, "wal", 1, replace(HELD, operation="other"), tables, continued=None)
    assert read_metadata(store, "s1", segment_key("wal", 1), 1).segment.operation == "op"


def archive(*ranges: tuple[int, int], node: str = "n1") -> list[Segment]:
    return [
        Segment(
            key=f"k{number}", number=number, size=1, digest="", changes=0, events=0, partials=0, truncates=0,
            node=node, operation="op", after=Lsn(after), through=Lsn(through), open=None,
        )
        for number, (after, through) in enumerate(ranges, start=1)
    ]  # fmt: skip


def test_an_archive_without_a_hole_is_contiguous() -> None:
    check_contiguous("n1", Lsn(100), [])
    # A transaction that spans several segments: their ranges stay empty until it ends.
    check_contiguous("n1", Lsn(100), archive((100, 200), (200, 200), (200, 300)))


@pytest.mark.parametrize(
    "segments",
    [
        archive((101, 200)),
        archive((100, 200), (201, 300)),
        archive((100, 200), (199, 300)),
        archive((100, 200), (200, 300), (300, 400))[::2],
        archive((100, 200), (200, 300))[1:],
        archive((100, 200), node="n2"),
        archive((100, 200)) * 2,
    ],
)
def test_a_hole_is_found(segments: list[Segment]) -> None:
    with pytest.raises(ArchiveError, match="node n1: the archive has a gap"):
        check_contiguous("n1", Lsn(100), segments)


def test_a_segment_has_the_definitions_under_which_it_was_begun() -> None:
    definitions = (
        Definition(16_400, KEYED, copied_from=Lsn(1 << 40)),
        Definition(16_401, FULL),
        Definition(9, KEYED, is_gone=True),
    )
    rows = [event(lsn, "U") | {"group": group} for lsn, group in ((900, 5), (700, 5), (800, 5), (600, 7))]
    store = memory()
    create_segment(store, "wal", 1, HELD, (table(rows), table([])), definitions, continued=None)
    create_segment(store, "wal", 2, HELD, (table([]), table([])), continued=None)
    found = list(list_unlisted(store, "s1", "wal", 0))
    assert [one.definitions for one in found] == [definitions, ()]
    assert [one.first_changes for one in found] == [{5: 700}, {}]
    assert [one.segment.number for one in list_unlisted(store, "s1", "wal", 1)] == [2]
    # Commits record this themselves.
    assert not {"definitions", "first_changes"} & fields_of(found[0].segment).keys()


def test_the_archive_of_a_node_has_its_own_folder_in_every_chain() -> None:
    assert archive_prefix("nightly", "n1", "c1") == "snapshots/nightly/wal/n1/c1"


GOOD = [{"op": ord(op), "group": 1, "global_id": None} for op in "IUuDT"]
GOOD += [{"op": ord(op), "group": 0, "global_id": None} for op in "CM"]
GOOD += [{"op": ord(op), "group": 0, "global_id": "g"} for op in "PKR"]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"op": ord("U"), "group": 0}, "a change without a group"),
        ({"op": ord("D"), "group": -1}, "a change without a group"),
        ({"op": ord("C"), "group": 3}, "an event with a group"),
        ({"op": ord("P"), "group": 0}, "without a global id"),
        ({"op": ord("K"), "group": 0}, "without a global id"),
        ({"op": ord("x"), "group": 1}, "neither a change nor an event"),
    ],
)
def test_rows_that_no_drain_writes_are_no_rows(bad: dict[str, object], why: str) -> None:
    schema = pa.schema([SEGMENT_SCHEMA.field(name) for name in ("op", "group", "global_id")])
    check_rows(pa.Table.from_pylist(GOOD, schema))
    check_rows(pa.Table.from_pylist([], schema))
    with pytest.raises(ValueError, match=why):
        check_rows(pa.Table.from_pylist([*GOOD, {"global_id": None, **bad}], schema))
