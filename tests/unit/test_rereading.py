"""Objects are listed and read again: what is missing, replaced or damaged, in pieces that a time limit can end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec import structs

import cutline.check.rereading as rereading
from cutline.check.read_times import LastReads, PlaceRange, milliseconds_of
from cutline.check.report import Findings, SnapshotReport
from cutline.check.rereading import Deadline, Rereading, pieces_of
from cutline.check.stored_entries import StoredEntries, compare_listing
from cutline.fleet.progress import Silent
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import ListedObjects, LostList, ReadList, StoredObject, compress_content
from cutline.snapshots.records.documents import seal, unseal
from cutline.snapshots.records.operation_records import PLACES
from cutline.storage.digest import digest
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.storage.store import Inventory, Listed, ObjectStore
from tests.unit.made_commits import full_commit, increment_commit

ALL = [PlaceRange(0, PLACES)]
NO_SPARK = cast("Any", None)


def stored(store: ObjectStore, key: str, node: str = "a") -> StoredObject:
    body = f"the content of {key}".encode()
    store.create(key, body)
    return StoredObject(key, "base", node, len(body), digest(body), {1: 1})


def made_chain(store: ObjectStore, own: int = 5, listed: int = 20) -> Chain:
    """A full snapshot with objects in its commit and in a list, and an increment with one object."""
    objects = tuple(stored(store, f"snapshots/daily/base/a/op-0/part-{number:03}.parquet") for number in range(listed))
    content, _ = unseal("", seal(ListedObjects("daily", "op-0", objects)))
    total = sum(one.size for one in objects)
    body = seal(ListedObjects("daily", "op-0", objects))
    key = "snapshots/daily/lists/a/op-0/base-000000.json"
    store.create(key, body)
    object_list = ReadList(
        key, "base", "a", len(body), digest(body), listed, total, {1: listed}, content=compress_content(content)
    )
    full = structs.replace(
        full_commit(),
        segments={},
        copied=tuple(stored(store, f"snapshots/daily/base/b/op-0/part-{number}.parquet", "b") for number in range(own)),
        lists=(object_list,),
    )
    rows = (stored(store, "snapshots/daily/rows/a/op-1/rows.sql.zst"),)
    return Chain(full, (structs.replace(increment_commit(1), segments={}, extension_rows=rows),))


@pytest.fixture
def location(tmp_path: Path) -> StoreLocation:
    return StoreLocation(f"file://{tmp_path}/store")


def listed(location: StoreLocation, chain: Chain) -> tuple[StoredEntries, Findings]:
    entries, missing = compare_listing(location.open(), chain, 1)
    return entries, Findings(SnapshotReport("daily", 1, conflicts=missing))


def read(
    location: StoreLocation, chain: Chain, ranges: list[PlaceRange], seconds_max: float | None = None, at: int = 500
) -> Rereading:
    entries, findings = listed(location, chain)
    deadline = Deadline(seconds_max)
    found = Rereading(NO_SPARK, location, findings, Silent(), deadline, LastReads.of_full(1, 100))
    found.read(entries, pieces_of(entries, 1, ranges, deadline.batch_bytes), at)
    return found


def conflicts(findings: Findings) -> list[tuple[str, str | None, str | None]]:
    return sorted((one.kind, one.node, one.object) for one in findings.report.conflicts)


def test_every_object_of_the_commits_is_listed_with_its_increment(location: StoreLocation) -> None:
    chain = made_chain(location.open())
    entries, findings = listed(location, chain)
    keys = [entry.key for entry in entries.entries(np.arange(len(entries.sizes)))]
    assert sorted(keys) == sorted(location.open().list("snapshots"))
    assert keys == [key for commit in chain.commits for key in commit.object_sizes]
    assert entries.increments.tolist() == [0] * 26 + [1]
    assert entries.sizes.sum() == sum(size for commit in chain.commits for size in commit.object_sizes.values())
    assert (np.abs(entries.stored_at - milliseconds_of(datetime.now(UTC))) < 60_000).all()
    assert conflicts(findings) == []
    assert [entry.key for entry in entries.entries(np.array([26, 0, 7]))] == [keys[0], keys[7], keys[26]]


def test_missing_objects_and_other_sizes_are_found_by_a_listing(location: StoreLocation) -> None:
    store = location.open()
    chain = made_chain(store)
    gone, longer = "snapshots/daily/base/a/op-0/part-003.parquet", "snapshots/daily/base/b/op-0/part-2.parquet"
    store.delete(gone)
    store.delete(longer)
    store.create(longer, b"x" * 500)
    assert conflicts(listed(location, chain)[1]) == [("missing", "a", gone), ("size", "b", longer)]
    for key in store.list("snapshots"):
        store.delete(key)
    assert len(conflicts(listed(location, chain)[1])) == 27
    # Those of new increments will be read.
    assert len(compare_listing(store, chain, 0)[1]) == 26


def test_the_objects_of_a_lost_list_are_left_out(location: StoreLocation) -> None:
    chain = made_chain(location.open())
    (object_list,) = chain.full.lists
    given = {name: getattr(object_list, name) for name in object_list.__struct_fields__ if name != "content"}
    full = structs.replace(chain.full, lists=(LostList(**given, damage="digest", detail="altered"),))
    entries, findings = listed(location, Chain(full, chain.increments))
    assert entries.increments.tolist() == [0] * 6 + [1]
    assert conflicts(findings) == []


def test_a_listing_that_is_out_of_date_is_no_conflict(location: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = made_chain(location.open())
    monkeypatch.setattr(LocalStore, "inventory", lambda *_: [])
    entries, findings = listed(location, chain)
    assert conflicts(findings) == []
    assert not entries.stored_at.any()


def test_objects_that_were_stored_after_they_were_read_are_other_objects(
    location: StoreLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = made_chain(location.open())
    replaced, began = "snapshots/daily/base/a/op-0/part-003.parquet", datetime(2026, 11, 20, tzinfo=UTC)
    inventory = LocalStore.inventory

    def at(seconds: int) -> None:
        def with_times(self: LocalStore, prefix: str, after: str = "") -> Inventory:
            moments = {replaced: began + timedelta(seconds=seconds)}
            return [Listed(one.key, one.size, moments.get(one.key, began)) for one in inventory(self, prefix, after)]

        monkeypatch.setattr(LocalStore, "inventory", with_times)

    times = LastReads.of_full(1, milliseconds_of(began))
    # The clocks of the store and of the machine that read it may differ by five minutes.
    for seconds, count in ((299, 0), (301, 1)):
        at(seconds)
        entries, _ = listed(location, chain)
        flags = entries.were_replaced(times, 1)
        assert flags.sum() == count
        assert [one.key for one in entries.entries(np.flatnonzero(flags))] == [replaced] * count


@pytest.mark.parametrize("bytes_max", [None, 100, 1])
def test_pieces_divide_the_objects_of_the_ranges(location: StoreLocation, bytes_max: int | None) -> None:
    entries, _ = listed(location, made_chain(location.open()))
    middle = PLACES // 2
    pieces = pieces_of(entries, 0, [PlaceRange(middle, PLACES), PlaceRange(0, middle)], bytes_max)
    assert sorted(np.concatenate([piece.numbers for piece in pieces]).tolist()) == list(range(26))
    assert [piece.places.high for piece in pieces[:-1] if piece.places.high != PLACES] == [
        piece.places.low for piece in pieces[1:] if piece.places.low
    ]
    assert (pieces[0].places.low, pieces[-1].places.high) == (middle, middle)
    for piece in pieces:
        places = entries.places[piece.numbers]
        assert ((places >= piece.places.low) & (places < piece.places.high)).all()
        assert piece.size_bytes == entries.sizes[piece.numbers].sum()
        assert bytes_max is None or piece.size_bytes <= bytes_max or len(piece.numbers) == 1
    if bytes_max == 1:
        assert [len(piece.numbers) for piece in pieces] == [1] * 26


def test_a_range_without_objects_is_read_at_once(location: StoreLocation) -> None:
    entries, _ = listed(location, made_chain(location.open(), own=0, listed=1))
    (used, *_) = np.sort(entries.places).tolist()
    (piece,) = pieces_of(entries, 1, [PlaceRange(0, used)], None)
    assert (piece.places, piece.numbers.tolist(), piece.size_bytes) == (PlaceRange(0, used), [], 0)


def test_objects_with_the_same_place_stay_together() -> None:
    chain = Chain(full_commit())
    hashes = (np.array([5, 5, 5, 9], np.int64) << 32) + np.arange(4)
    entries = StoredEntries(chain, hashes, np.full(4, 10), np.zeros(4, np.int64), np.zeros(4, np.int64))
    pieces = pieces_of(entries, 0, ALL, 10)
    assert [(piece.places, piece.numbers.tolist()) for piece in pieces] == [
        (PlaceRange(0, 9), [0, 1, 2]), (PlaceRange(9, PLACES), [3]),
    ]  # fmt: skip


def test_what_was_reread_without_damage_counts_as_read_now(location: StoreLocation) -> None:
    chain = made_chain(location.open())
    entries, _ = listed(location, chain)
    half = PlaceRange(0, PLACES // 2)
    found = read(location, chain, [half])
    expected = int((entries.places < half.high).sum())
    assert (found.objects, conflicts(found.findings)) == (expected, [])
    last_read = found.times.last_read(entries.places, entries.increments)
    assert (last_read == np.where(entries.places < half.high, 500, 100)).all()


@contextmanager
def damaged(location: StoreLocation, key: str) -> Iterator[Path]:
    path = Path(location.url.removeprefix("file://")) / key
    body = path.read_bytes()
    yield path
    path.write_bytes(body)


def test_damage_of_any_kind_is_found_by_rereading_and_named(location: StoreLocation) -> None:
    chain = made_chain(location.open())
    key = "snapshots/daily/base/b/op-0/part-2.parquet"
    with damaged(location, key) as path:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        found = read(location, chain, ALL)
        assert conflicts(found.findings) == [("digest", "b", key)]
        assert found.findings.damaged == {"b"}
        # The piece does not count as read.
        assert found.times == LastReads.of_full(1, 100)
    entries, findings = listed(location, chain)
    with damaged(location, key) as path:
        path.unlink()
        gone = Rereading(NO_SPARK, location, findings, Silent(), Deadline(None), LastReads.of_full(1, 100))
        gone.read(entries, pieces_of(entries, 1, ALL, None), 500)
        assert conflicts(findings) == [("missing", "b", key)]


def test_a_time_limit_ends_between_two_pieces(location: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "BATCH_BYTES", 100)
    chain = made_chain(location.open())
    entries, _ = listed(location, chain)
    found = read(location, chain, ALL, seconds_max=0.0)
    assert (found.objects, found.left_objects, found.left_bytes) == (0, 27, entries.sizes.sum())
    assert found.times == LastReads.of_full(1, 100)
    looked: list[float] = []

    def monotonic() -> float:
        looked.append(0.0)
        return float(len(looked))

    # The clock is read when the limit begins, and before each piece.
    monkeypatch.setattr(rereading.time, "monotonic", monotonic)
    found = read(location, chain, ALL, seconds_max=3.0)
    assert 0 < found.objects < 27
    assert found.left_objects == 27 - found.objects
    assert (found.times.last_read(entries.places, entries.increments) == 500).sum() == found.objects


def test_a_store_that_does_not_answer_is_no_damage(location: StoreLocation, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutline.storage.store import StoreUnreachableError

    chain = made_chain(location.open())

    def silent(self: LocalStore, key: str) -> str:
        raise StoreUnreachableError(url=self.url, reason=f"no answer about {key}")

    monkeypatch.setattr(LocalStore, "digest", silent)
    with pytest.raises(StoreUnreachableError):
        read(location, chain, ALL)
