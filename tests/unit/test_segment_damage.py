"""Every changed byte of a segment is found, and a commit's wrong counts."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

import cutline.wal.segments.segments as module
from cutline.fleet.record import fields_of, from_json
from cutline.storage.encryption.encrypted_store import EncryptedStore, StoreKey
from cutline.storage.local import LocalStore
from cutline.wal.segments.archive import ArchiveError, Segment, SegmentDamagedError, segment_key
from cutline.wal.segments.damage import ObjectDamagedError
from cutline.wal.segments.segments import create_segment, list_unlisted, read_events, read_metadata
from tests.unit.made_segments import HELD, event, memory, small_segment, store_with, table


def test_an_object_that_is_not_a_segment_is_named() -> None:
    _, body = small_segment(memory())
    foreign = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), foreign)
    damaged = [b"", b"PAR1", body[:-1], body[: len(body) // 2], body + b"x", foreign.getvalue().to_pybytes()]
    for bad in damaged:
        store = memory()
        store.create(segment_key("wal", 1), bad)
        with pytest.raises(SegmentDamagedError, match=f"^node s1: segment {segment_key('wal', 1)}, .* is damaged"):
            read_metadata(store, "s1", segment_key("wal", 1), 1)


def test_a_segment_of_a_newer_version_is_not_taken_for_damaged() -> None:
    segment, body = small_segment(memory())
    store = memory()
    store.create(segment.key, body.replace(b"cutline/segment/4", b"cutline/segment/9"))
    with pytest.raises(ArchiveError, match=r"has the format cutline/segment/9$") as error:
        read_metadata(store, "s1", segment.key, 1)
    assert not isinstance(error.value, SegmentDamagedError)
    assert "use that version" in error.value.hint


def test_a_segment_larger_than_any_is_not_read(tmp_path: Path) -> None:
    store, key = LocalStore(tmp_path), segment_key("wal", 1)
    store.create(key, b"PAR1")
    with (tmp_path / key).open("r+b") as file:
        # A sparse file: it takes no room here, but its reader would need all of it.
        file.truncate(1 << 40)
    for shown in (store, EncryptedStore(store, lambda: StoreKey(bytes(32)))):
        with pytest.raises(ArchiveError, match="larger than any segment"):
            list(list_unlisted(shown, "s1", "wal", 0))


def test_no_byte_of_a_segment_that_no_commit_lists_can_change_unnoticed() -> None:
    segment, body = small_segment(memory())
    for place in range(len(body)):
        store = memory()
        store.create(segment.key, body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :])
        with pytest.raises(ArchiveError, match=segment.key):
            read_metadata(store, "s1", segment.key, 1)


def test_a_segment_under_another_key_is_refused() -> None:
    _, body = small_segment(memory())
    for key in (segment_key("wal", 2), segment_key("another", 1)):
        store = memory()
        store.create(key, body)
        with pytest.raises(ArchiveError, match=key):
            read_metadata(store, "s1", key, 1)


def test_rows_that_look_like_a_seal_are_not_taken_for_it() -> None:
    rows = [event(1, "U") | {"row": f'"seal": "{digit * 64}"}}'.encode()} for digit in "0f"]
    store = memory()
    created = create_segment(store, "wal", 1, HELD, (table(rows), table([event(2)])), continued=None)
    assert read_metadata(store, "s1", created.segment.key, 1) == created


@pytest.mark.parametrize("whole_max", [0, 1 << 30])
def test_no_byte_that_events_are_read_from_can_change_unnoticed(
    monkeypatch: pytest.MonkeyPatch, whole_max: int
) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES_MAX", whole_max)
    segment, body = small_segment(memory())
    assert segment.events_at
    for place in range(0 if whole_max else segment.events_at, len(body)):
        flipped = body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :]
        with pytest.raises(ObjectDamagedError, match=segment.key) as error:
            read_events(store_with(segment, flipped), segment)
        assert (error.value.kind, error.value.node) == ("digest", "n1")
    for cut in (b"", body[:-1], body[: len(body) // 2], body + b"x", body * 2):
        with pytest.raises(ObjectDamagedError) as error:
            read_events(store_with(segment, cut), segment)
        assert error.value.kind == "size"
    with pytest.raises(ObjectDamagedError) as error:
        read_events(memory(), segment)
    assert error.value.kind == "missing"


@pytest.mark.parametrize("whole_max", [0, 1 << 30])
def test_wrong_counts_in_a_commit_are_found(monkeypatch: pytest.MonkeyPatch, whole_max: int) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES_MAX", whole_max)
    store = memory()
    segment, _ = small_segment(store)
    for wrong in ({"events": 2}, {"changes": 0}, {"changes": 2}):
        with pytest.raises(ObjectDamagedError) as error:
            read_events(store, replace(segment, **wrong))
        assert error.value.kind in ("rows", "unreadable")


def test_a_segment_of_an_early_commit_without_events_digest_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_WHOLE_BYTES_MAX", 0)
    store = memory()
    segment, body = small_segment(store)
    entry = {name: value for name, value in fields_of(segment).items() if not name.startswith("events_")}
    older = from_json(json.dumps(entry), Segment)
    assert older == replace(segment, events_at=None, events_digest="")
    assert read_events(store, older)["lsn"].to_pylist() == [2]
    with pytest.raises(ObjectDamagedError, match="its contents differ from those"):
        read_events(store_with(segment, b"X" + body[1:]), older)
