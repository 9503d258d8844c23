"""Survey a snapshot: its restore points, the space it takes, and its problems.

The survey reads only commits, lists of objects and listings; only `check` reads the objects themselves. It does not
raise for a damaged snapshot, because retention must judge damaged snapshots too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime

from msgspec import Struct, field

from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, LostList
from cutline.snapshots.records.documents import ManifestError, parse_key
from cutline.snapshots.records.end_marks import ChainMarks, read_marks
from cutline.snapshots.records.merge_records import first_increment, read_merges
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import cut_time, listed_numbers, read_chain
from cutline.snapshots.records.repair_records import Repair
from cutline.snapshots.records.tombstones import RestorePoint
from cutline.storage.errors import RefusedError
from cutline.storage.store import Inventory, Listed, ObjectMissingError, ObjectStore
from cutline.wal.segments.archive import ArchiveError


class SizeTotal(Struct):
    """A number of objects and their total size."""

    objects: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, listed: Iterable[Listed]) -> SizeTotal:
        """Return the total of objects in a listing."""
        total = cls()
        for one in listed:
            total.add(one.size)
        return total

    def add(self, size_bytes: int) -> None:
        """Add an object."""
        self.objects += 1
        self.size_bytes += size_bytes


# The folders that contain objects of a chain's increments.
COPY_FOLDERS = ("base", "schema", "lists", "copies")
CHAIN_FOLDERS = ("increments", "wal", *COPY_FOLDERS)


def of_increments(full: Commit, repairs: Iterable[Repair]) -> Callable[[str], bool]:
    """Return a predicate on keys: whether the object belongs to increments rather than to the full snapshot.

    The objects with which `repairs` have replaced objects of the full snapshot belong to it, as the damaged objects do.
    """
    needed = {entry.key for entry in full.named}
    for replacement in (one for repair in repairs for one in repair.replacements):
        # A merge may list objects of the full snapshot, too.
        is_of_full = replacement.merge and any((one.list or one.key) in needed for one in replacement.replaced)
        if is_of_full or replacement.increment == 0:
            needed.update(entry.key for entry in (*replacement.new, *replacement.replaced))
    folders, copies = (
        tuple(f"snapshots/{full.snapshot}/{part}/" for part in parts) for parts in (CHAIN_FOLDERS, COPY_FOLDERS)
    )

    def is_of_increments(key: str) -> bool:
        if not key.startswith(copies) or key in needed:
            return key.startswith(folders) and key not in needed
        parsed = parse_key(full.snapshot, key)
        return parsed is not None and parsed.owner != full.operation

    return is_of_increments


class SurveyedSnapshot(Struct, frozen=True):
    """A snapshot according to commits and listings.

    `chain` is the longest readable part of the chain, starting with the full snapshot; None if that can't be read.
    `unreadable` is the reason why the rest can't be read, and `marks` show how the chain ended, if known. `restorable`
    counts the commits, from the full snapshot on, that can be restored and lack nothing; `lack` names a missing object
    of the next commit. Both texts are "" if there is nothing to report. `objects` counts all objects in the snapshot's
    folder, whether or not a commit lists them, and `of_increments` those that the full snapshot does not need. `first`
    is the increment at which the chain begins for good, if that is a merge; otherwise 0. `merges` are the increments of
    all merges; empty if one of them can't be read.
    """

    name: str
    chain: Chain | None
    unreadable: str
    lack: str
    restorable: int
    objects: SizeTotal
    of_increments: SizeTotal
    marks: ChainMarks = field(default_factory=ChainMarks)
    first: int = 0
    merges: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """The number of restore points that were made, up to the last that can be read."""
        return self.chain.last.increment + 1 if self.chain else 0

    @property
    def is_only_full(self) -> bool:
        """Whether the increments were pruned."""
        return self.marks.is_only_full

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing or unreadable."""
        return not self.problem

    @property
    def problem(self) -> str:
        """The problem with the snapshot; "" if there is none."""
        return self.unreadable or self.lack or self.marks.problem

    @property
    def is_only_cut(self) -> bool:
        """Whether the snapshot is a restore point without rows (`--only-cut`)."""
        return self.chain is not None and self.chain.full.only_cut

    @property
    def is_continuable(self) -> bool:
        """Whether an increment can follow, so that nodes keep WAL in the chain's slot; True if unknown."""
        return not (self.is_only_cut or self.is_only_full or self.marks.ended)

    @property
    def points(self) -> tuple[RestorePoint, ...]:
        """The restore points that can be read."""
        commits = self.chain.commits if self.chain else ()
        return tuple(RestorePoint(commit.increment, commit.created_at, commit.cut.made_at) for commit in commits)

    @property
    def moments(self) -> tuple[datetime, ...]:
        """The times at which the cuts of the restore points were made."""
        return tuple(map(cut_time, self.chain.commits)) if self.chain else ()


def survey_snapshots(store: ObjectStore, names: Iterable[str]) -> list[SurveyedSnapshot]:
    """Survey the snapshots in the given order, holding only one listing in memory at a time."""
    return [survey_snapshot(store, name) for name in names]


def survey_snapshot(store: ObjectStore, name: str) -> SurveyedSnapshot:
    """Survey one snapshot."""
    objects = store.inventory(f"snapshots/{name}")
    total = SizeTotal.of(objects)
    first = first_increment(store, name)
    chain, unreadable = _read_newest(store, name, first)
    if chain is None:
        return SurveyedSnapshot(name, None, unreadable, "", 0, total, SizeTotal())
    marks = read_marks(store, name, chain.full.chain)
    is_of_increments = of_increments(chain.stored_full, chain.applied.repairs)
    to_prune = SizeTotal.of(stored_object for stored_object in objects if is_of_increments(stored_object.key))
    try:
        restorable, lack = _count_restorable(read_chain_lists(store, chain), objects)
    except ManifestError as error:
        restorable, lack = 0, error.message
    if chain.full.only_cut:
        restorable = 0
    return SurveyedSnapshot(
        name, chain, unreadable, lack, restorable, total, to_prune, marks, first, _merges(store, name)
    )


def _merges(store: ObjectStore, name: str) -> tuple[int, ...]:
    with suppress(ManifestError):
        return tuple(merge.increment for merge in read_merges(store, name))
    return ()


def find_lack_from(store: ObjectStore, name: str, increment: int) -> str:
    """Return what a chain that begins with its merge at `increment` lacks; "" if it can be restored from there on."""
    try:
        chain = read_chain_lists(store, read_from_merge(store, name, merge_max=increment))
        return _count_restorable(chain, store.inventory(f"snapshots/{name}"))[1]
    except (ManifestError, RefusedError, ObjectMissingError) as error:
        return error.message


def first_restorable(store: ObjectStore, names: Iterable[str]) -> str | None:
    """Return the first of the snapshots that has a restorable point; None if there is none."""
    return next((name for name in names if survey_snapshot(store, name).restorable), None)


def _read_newest(store: ObjectStore, name: str, first: int) -> tuple[Chain | None, str]:
    """Read the longest readable part of the chain; also return the reason why the rest can't be read."""

    def read(last: int | None) -> Chain:
        # Once what lies before a merge is given up, it may be gone. Later merges hide the restore points before them.
        return read_from_merge(store, name, last, first) if first else read_chain(store, name, last)

    try:
        return read(None), ""
    except (ManifestError, RefusedError, ObjectMissingError) as error:
        problem = error.message

    def is_broken(number: int) -> bool:
        try:
            read(number)
        except (ManifestError, RefusedError, ObjectMissingError):
            return True
        return False

    # A chain has no gaps, so it is no longer than the listing, even if names have higher numbers.
    numbers = range(first, len(listed_numbers(store, name, first=1)) + 1)
    readable = bisect_left(numbers, x=True, key=is_broken)
    return (read(numbers[readable - 1]) if readable else None), problem


def _count_restorable(chain: Chain, objects: Inventory) -> tuple[int, str]:
    """Count the restore points, starting with the first, that lack nothing; also return a defect of the next."""
    sizes = {stored_object.key: stored_object.size for stored_object in objects}
    for number, commit in enumerate(chain.commits):
        lost = [object_list for object_list in commit.object_lists if isinstance(object_list, LostList)]
        if lost:
            return number, f"object {lost[0].key}: {lost[0].detail}"
        for key, size in commit.object_sizes.items():
            if key not in sizes:
                return number, f"object {key} is missing from the store"
            if sizes[key] != size:
                return number, f"object {key} is {sizes[key]} bytes long instead of {size}"
        try:
            chain.up_to(commit.increment).check_archive()
        except ArchiveError as error:
            return number, error.message
    return len(chain.commits), ""
