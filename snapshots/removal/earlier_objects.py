"""Remove what lies before the newest merge of a chain: its earlier restore points are given up.

A mark is stored first. From then on, the chain begins at the merge for every command, and earlier increments are
refused. Then the objects go that only earlier states need: rows of base copies, and segments. The documents of the
commits stay, because the later ones name them by their digests, and they are small; so do DDL, server globals and large
objects. If a removal dies, a repetition or gc removes the rest.

Needs no lock: no create needs what is removed, and a restore that began earlier has a lease (operations/leases.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from cutline.fleet.progress import Progress
from cutline.snapshots.operations.leases import check_not_in_use
from cutline.snapshots.operations.object_lists import read_chain_lists, read_merge_lists
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import ObjectList, listed_objects
from cutline.snapshots.records.documents import Kind, ParsedKey, parse_key, seal
from cutline.snapshots.records.merge_records import (
    Begin,
    Merge,
    begin_key,
    first_increment,
    newest_merge,
    read_merges,
)
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import read_as_committed
from cutline.snapshots.removal.deletion import remove_objects
from cutline.snapshots.removal.survey import SizeTotal
from cutline.storage.errors import RefusedError
from cutline.storage.store import Listed, ObjectExistsError, ObjectStore
from cutline.storage.storing import create_or_find

FOLDERS = ("base", "lists", "wal")


class NotMergedError(RefusedError):
    """The snapshot has no merge, so every state needs what lies before it."""


# Not slotted: a cached property needs a dictionary.
@dataclass(frozen=True)
class EarlierObjects:
    """Tells the objects that only states before increment `first` need. `chain` begins at the merge of `first`.

    `operations` are those of the commits up to `first` and of earlier merges, and `merged` the keys of the objects that
    later merges list.
    """

    chain: Chain
    first: int
    operations: frozenset[str]
    merged: frozenset[str] = frozenset()

    @classmethod
    def of(cls, store: ObjectStore, snapshot: str, first: int | None = None) -> EarlierObjects | None:
        """Return the objects before the merge at increment `first` (None: the newest merge); None without a merge.

        Raises the errors of read_chain.
        """
        merge = newest_merge(store, snapshot, first)
        if merge is None:
            return None
        chain = read_chain_lists(store, read_from_merge(store, snapshot))
        if chain.full.increment > merge.increment:
            chain = read_chain_lists(store, read_from_merge(store, snapshot, merge.increment))
        earlier = read_as_committed(store, snapshot, merge.increment)
        merges = list(read_merges(store, snapshot))
        operations = [one.operation for one in merges if one.increment < merge.increment]
        merged = {
            key
            for one in merges
            if one.increment > merge.increment
            for key in _keys_of(one, read_merge_lists(store, one))
        }
        return cls(
            chain,
            merge.increment,
            frozenset([*(commit.operation for commit in earlier.commits), *operations]),
            frozenset(merged),
        )

    @cached_property
    def kept(self) -> frozenset[str]:
        """The keys of all objects that the chain needs."""
        listed = {entry.key for commit in self.chain.commits for entry in commit.named_and_listed}
        return frozenset(listed | self.merged | {one.key for one in self.chain.applied.originals.values()})

    @property
    def archives(self) -> Mapping[str, str]:
        """The operation that began the archive of each node, at the merge."""
        return self.chain.beginning.archives if self.chain.beginning else {}

    @cached_property
    def first_segments(self) -> Mapping[str, int]:
        """The number of the first segment that the chain needs in the archive of each node at the merge."""
        return {node: segments[0].number for node, segments in self.chain.full.segments.items() if segments}

    def has(self, key: str, parsed: ParsedKey) -> bool:
        """Whether only earlier states need the object."""
        if key in self.kept:
            return False
        if parsed.kind is Kind.SEGMENT:
            if self.archives.get(parsed.node) == parsed.owner:
                return parsed.number < self.first_segments.get(parsed.node, 0)
            # The archive ended when an increment copied the node again.
            return parsed.owner == self.chain.full.chain or parsed.owner in self.operations
        return parsed.kind in (Kind.BASE, Kind.LIST) and parsed.owner in self.operations


@dataclass(frozen=True, slots=True)
class DropPlan:
    """What is removed: the increments `points` (0 is the full snapshot), and `objects`."""

    snapshot: str
    first: int
    chain: str
    merge: str
    points: tuple[int, ...]
    objects: tuple[Listed, ...]

    @property
    def total(self) -> SizeTotal:
        """The number and the bytes of the objects."""
        return SizeTotal.of(self.objects)


def plan_drop(store: ObjectStore, snapshot: str, needed: int | None = None) -> DropPlan:
    """Find what lies before the newest merge, or before the newest that increment `needed` and later ones don't need.

    Raises NotMergedError, and the errors of read_chain.
    """
    earlier, known = EarlierObjects.of(store, snapshot, needed), first_increment(store, snapshot)
    if earlier is None or earlier.chain.beginning is None:
        raise NotMergedError(
            f"snapshot {snapshot} has no merge, so every restore point needs its full snapshot",
            hint=f"merge it first: snapshot merge {snapshot}",
            details={"snapshot": snapshot},
        )
    listed = [entry for folder in FOLDERS for entry in store.inventory(f"snapshots/{snapshot}/{folder}")]
    return DropPlan(
        snapshot,
        earlier.first,
        earlier.chain.full.chain,
        earlier.chain.beginning.merge.digest,
        tuple(range(known, earlier.first)),
        tuple(entry for entry in listed if _is_earlier(earlier, snapshot, entry.key)),
    )


def _keys_of(merge: Merge, lists: Iterable[ObjectList]) -> Iterator[str]:
    yield from (entry.key for entry in merge.entries)
    yield from (segment.key for segments in merge.segments.values() for segment in segments)
    yield from (stored.key for one in lists for stored in listed_objects(one))


def _is_earlier(earlier: EarlierObjects, snapshot: str, key: str) -> bool:
    parsed = parse_key(snapshot, key)
    return parsed is not None and earlier.has(key, parsed)


def drop_earlier_objects(store: ObjectStore, plan: DropPlan, operation: str, progress: Progress) -> dict[str, str]:
    """Store the mark and remove the objects; return, by key, the store's reasons for refusals.

    Raises SnapshotInUseError if a restore, repair or merge reads the snapshot; a repetition then removes the objects.
    """
    mark = Begin(
        snapshot=plan.snapshot,
        chain=plan.chain,
        increment=plan.first,
        merge=plan.merge,
        operation=operation,
        made_at=current_time(),
    )
    check_not_in_use(store, plan.snapshot)
    if first_increment(store, plan.snapshot) < plan.first:
        # Another process may have stored it: only its key counts.
        with suppress(ObjectExistsError):
            create_or_find(store, begin_key(plan.snapshot, plan.first), seal(mark))
    # A restore that began in the meantime has stored its lease by now, or finds the mark.
    check_not_in_use(store, plan.snapshot)
    return remove_objects(store, _keys(plan.objects), progress)


def _keys(objects: Iterable[Listed]) -> list[str]:
    return [entry.key for entry in objects]
