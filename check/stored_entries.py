"""The entries of a chain's commits, compared with the store: which objects are there, how long, and since when.

No object is read. The driver holds about 40 bytes per object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import islice
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from cutline.check.read_times import LastReads, hashes_of, milliseconds_of, places_of
from cutline.check.report import Conflict, Skipped, SnapshotReport
from cutline.columns.bytes_column import Flags, Ints
from cutline.fleet.units import size_text
from cutline.snapshots.operations.committing import sizes_of
from cutline.snapshots.operations.ended_operations import AHEAD_SECONDS_MAX
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import LostList, NamedObject, listed_objects, parts_of_entries
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment

Entry: TypeAlias = Segment | NamedObject
# Objects are looked up by key so many at a time.
LOOKED_UP_AT_ONCE = 100_000
AHEAD_MILLISECONDS = timedelta(seconds=AHEAD_SECONDS_MAX) // timedelta(milliseconds=1)


def entries_in_order(chain: Chain, wanted: Ints | None = None) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the entries of all commits in lists, each with its increment; `wanted` are ascending numbers of entries.

    Only one list is expanded at a time, and only if it has wanted entries. The objects of a LostList are omitted.
    """
    first = 0

    def chosen(entries: Sequence[Entry]) -> list[Entry]:
        if wanted is None:
            return list(entries)
        low, high = np.searchsorted(wanted, [first, first + len(entries)])
        return [entries[number - first] for number in wanted[low:high].tolist()]

    for commit in chain.commits:
        if some := chosen(commit.named):
            yield commit.increment, some
        first += len(commit.named)
        for object_list in commit.object_lists:
            count = 0 if isinstance(object_list, LostList) else object_list.parts
            has_wanted = wanted is None or np.diff(np.searchsorted(wanted, [first, first + count])).any()
            if has_wanted and (some := chosen([*parts_of_entries(listed_objects(object_list))])):
                yield commit.increment, some
            first += count


class StoredEntries(Struct, frozen=True):
    """All entries of a chain's commits, in their order: hash of the key, size, increment, and when it was stored.

    `stored_at` is in milliseconds since 1970 by the store's clock; 0 if it is unknown.
    """

    chain: Chain
    hashes: Ints
    sizes: Ints
    increments: Ints
    stored_at: Ints

    @property
    def places(self) -> Ints:
        """The entries' places."""
        return places_of(self.hashes)

    def were_replaced(self, times: LastReads, increment: int) -> Flags:
        """Flag the entries up to the increment that were stored after they were last read, however clocks differ."""
        flags = self.increments <= increment
        last_read = times.last_read(self.places[flags], self.increments[flags])
        flags[flags] = self.stored_at[flags] > last_read + AHEAD_MILLISECONDS
        return flags

    def entries(self, numbers: Ints) -> Iterator[Entry]:
        """Yield the entries with these numbers, in ascending order."""
        for _, some in entries_in_order(self.chain, np.sort(numbers)):
            yield from some


def compare_listing(store: ObjectStore, chain: Chain, up_to: int) -> tuple[StoredEntries, list[Conflict]]:
    """Compare a listing of the store with the chain's commits; return the entries of all commits.

    Also returns a conflict for each object of the commits up to increment `up_to` that is missing or has another size.
    """
    hashes, sizes, increments = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    folders: set[str] = set()
    for listed_by, entries in entries_in_order(chain):
        hashes.append(hashes_of([entry.key for entry in entries]))
        sizes.append(np.array([entry.size for entry in entries], np.int64))
        increments.append(np.full(len(entries), listed_by, np.int64))
        folders.update(entry.key.rpartition("/")[0] for entry in entries)
    expected, expected_sizes = np.concatenate(hashes), np.concatenate(sizes)
    listed = _list_folders(store, sorted(folders))
    at = np.searchsorted(listed.hashes, expected)
    is_right = (listed.hashes[at] == expected) & (listed.sizes[at] == expected_sizes)
    stored_at = np.where(is_right, listed.times[at], 0)
    found = StoredEntries(chain, expected, expected_sizes, np.concatenate(increments), stored_at)
    wrong = np.flatnonzero(~is_right & (found.increments <= up_to))
    conflicts: list[Conflict] = []
    for low in range(0, len(wrong), LOOKED_UP_AT_ONCE):
        conflicts += _look_up(store, list(found.entries(wrong[low : low + LOOKED_UP_AT_ONCE])))
    return found, conflicts


class _Listing(Struct, frozen=True):
    """The hashes of the keys of listed objects, ascending, with sizes and times; the last is none, of size -1."""

    hashes: Ints
    sizes: Ints
    times: Ints


def _list_folders(store: ObjectStore, folders: Iterable[str]) -> _Listing:
    hashes, sizes, times = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for folder in folders:
        listed = store.inventory(folder)
        hashes.append(hashes_of([entry.key for entry in listed]))
        sizes.append(np.array([entry.size for entry in listed], np.int64))
        times.append(np.array([milliseconds_of(entry.created_at) for entry in listed], np.int64))
    unsorted = np.concatenate(hashes)
    order = np.argsort(unsorted, kind="stable")
    # A search for a hash that is greater than all of them ends at the last entry.
    none = (np.iinfo(np.int64).max, -1, 0)
    columns = (unsorted, np.concatenate(sizes), np.concatenate(times))
    return _Listing(*(np.append(column[order], value) for column, value in zip(columns, none, strict=True)))


def _look_up(store: ObjectStore, entries: Sequence[Entry]) -> Iterator[Conflict]:
    """Yield a conflict for each entry whose object is missing or has another size. A listing may be out of date."""
    stored_sizes = sizes_of(store, (entry.key for entry in entries))
    for entry in entries:
        size = stored_sizes[entry.key]
        if size is None:
            detail = f"object {entry.key} is missing from the store"
            yield Conflict("missing", detail, node=entry.node, object=entry.key)
        elif size != entry.size:
            detail = f"object {entry.key} is {size} bytes long instead of {entry.size}"
            yield Conflict("size", detail, node=entry.node, object=entry.key)


def check_listing(store: ObjectStore, chain: Chain, report: SnapshotReport) -> None:
    """Check that every object in the chain exists with the right size; report conflicts and the parts not checked."""
    objects = (entry for commit in chain.commits for entry in commit.named_and_listed)
    count = size_bytes = 0
    while some := list(islice(objects, LOOKED_UP_AT_ONCE)):
        conflicts = list(_look_up(store, some))
        report.conflicts += conflicts
        report.compared.objects += len(some) - len(conflicts)
        count, size_bytes = count + len(some), size_bytes + sum(entry.size for entry in some)
    why = "--metadata-only"
    contents = f"object contents ({size_text(size_bytes)} in {count:,} objects)"
    report.skipped += [
        Skipped(what, why)
        for what in (contents, "comparison of copies", "comparison of global transactions between shards")
    ]
