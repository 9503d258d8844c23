"""Remove what lies before the newest merge of a chain: its earlier restore points are given up.

The intent is stored, then the pins are read, and then a mark is stored (pinning.py). From then on, the chain begins at
the merge for every command, and earlier increments are refused. Then the objects go that only earlier states need: rows
of base copies, and segments. The documents of the commits stay, because the later ones name them by their digests, and
they are small; so do DDL, server globals and large objects. If a removal dies, a repetition or gc removes the rest.

Needs no lock: no create needs what is removed, and a restore that began earlier has a lease (operations/leases.py).
Until the lease of its own intent expires, no other command settles it. If it has been settled nevertheless, because the
process was suspended, it ends before its mark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

from msgspec import Struct, field, structs

from cutline.fleet.progress import Progress, Reading
from cutline.snapshots.operations.leases import check_not_in_use, lease_expiry, read_lease
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists, read_merge_lists
from cutline.snapshots.operations.operation import (
    OutcomeDetails,
    begin,
    code_of,
    current_time,
    new_operation,
    reason_of,
    record_outcome,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import LostList, ObjectList, listed_objects, parts_of_entries
from cutline.snapshots.records.documents import Kind, ParsedKey, parse_key, seal
from cutline.snapshots.records.merge_records import Begin, Merge, begin_key, first_increment, newest_merge, read_merges
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import PRUNE, Intent, read_outcome
from cutline.snapshots.records.proven_chains import increments_pruned_error, read_as_committed
from cutline.snapshots.records.tombstones import check_not_deleted, is_only_full
from cutline.snapshots.removal.node_cleanup import overdue_error
from cutline.snapshots.removal.pinning import BeingRemovedError, check_none_pinned
from cutline.snapshots.removal.removing import leave_unfinished, open_removals, remove_objects
from cutline.snapshots.removal.survey import SizeTotal, find_lack_from
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.storage.store import Listed, ObjectExistsError, ObjectStore
from cutline.storage.storing import StoreAnswersLostError, create_or_find
from cutline.wal.segments.archive import last_number

FOLDERS = ("base", "lists", "wal")


class NotMergedError(RefusedError):
    """The snapshot has no merge, so every state needs what lies before it."""


class DamagedMergeError(RefusedError):
    """The chain can't be restored from its merge on, so what lies before it may still be needed."""


# Not slotted: a cached property needs a dictionary.
class EarlierObjects(Struct, frozen=True, dict=True):
    """Tells the objects that only states before increment `first` need. `chain` begins at the merge of `first`.

    `operations` are those of the commits up to `first` and of earlier merges, `merged` the keys of the objects that
    later merges list, and `repaired` those of the objects with which repairs replaced objects of earlier states.
    """

    chain: Chain
    first: int
    operations: frozenset[str]
    merged: frozenset[str] = frozenset()
    repaired: frozenset[str] = frozenset()

    @classmethod
    def of(cls, store: ObjectStore, snapshot: str, first: int | None = None) -> EarlierObjects | None:
        """Return the objects before the merge at increment `first` (None: the newest merge); None without a merge.

        Raises the errors of read_chain, and ObjectDamagedError if an object list of the chain is lost.
        """
        merge = newest_merge(store, snapshot, first)
        if merge is None:
            return None
        chain = read_chain_lists(store, read_from_merge(store, snapshot))
        if chain.full.increment > merge.increment:
            chain = read_chain_lists(store, read_from_merge(store, snapshot, merge.increment))
        for entry in (entry for commit in chain.commits for entry in commit.object_lists):
            # What it lists is needed, and not known.
            if isinstance(entry, LostList):
                raise lost_list_error(entry)
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
            _repaired_before(chain, merge),
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

    @cached_property
    def continued(self) -> frozenset[str]:
        """The operations that began archives before the merge which became part of the chain after it."""
        renewals = (renewal for one in self.chain.increments for renewal in one.renewed.values())
        return frozenset(renewal.began_by for renewal in renewals if renewal.began_by)

    def has(self, key: str, parsed: ParsedKey) -> bool:
        """Whether only earlier states need the object."""
        if key in self.kept:
            return False
        if (copying := self.chain.copying.get(parsed.node)) is not None and copying.operation == parsed.owner:
            # The next increments go on with it (snapshots/create/background_copies.py).
            return False
        if parsed.kind is Kind.SEGMENT:
            if key in self.repaired:
                return True
            if parsed.owner in self.continued:
                return False
            if self.archives.get(parsed.node) == parsed.owner:
                return parsed.number < self.first_segments.get(parsed.node, 0)
            # The archive ended when an increment copied the node again.
            return parsed.owner == self.chain.full.chain or parsed.owner in self.operations
        is_of_earlier = parsed.owner in self.operations or key in self.repaired
        return parsed.kind in (Kind.BASE, Kind.LIST) and is_of_earlier


class DropPlan(Struct, frozen=True):
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
    """Find the objects before the newest merge; with `needed`, before the newest merge up to that increment.

    Raises NotMergedError, PinnedError, DamagedMergeError, and the errors of read_chain.
    """
    earlier, known = EarlierObjects.of(store, snapshot, needed), first_increment(store, snapshot)
    if earlier is None or earlier.chain.beginning is None:
        raise NotMergedError(
            f"snapshot {snapshot} has no merge, so every restore point needs its full snapshot",
            hint=f"merge it first: snapshot merge {snapshot}",
            details={"snapshot": snapshot},
        )
    points = range(known, earlier.first)
    check_none_pinned(store, snapshot, points)
    if points and (lack := find_lack_from(store, snapshot, earlier.first)):
        raise DamagedMergeError(
            f"the chain of {snapshot} can't begin at increment {earlier.first}: {lack}",
            hint=f"nothing was removed; to see what is damaged: snapshot check {snapshot}   to repair it:"
            f" snapshot repair {snapshot}",
            details={"snapshot": snapshot, "increment": earlier.first},
        )
    listed = [entry for folder in FOLDERS for entry in store.inventory(f"snapshots/{snapshot}/{folder}")]
    return DropPlan(
        snapshot,
        earlier.first,
        earlier.chain.full.chain,
        earlier.chain.beginning.merge.digest,
        tuple(points),
        tuple(entry for entry in listed if _is_earlier(earlier, snapshot, entry.key)),
    )


def preview_drop(store: ObjectStore, chain: Chain) -> DropPlan:
    """Find what a merge at the chain's last increment would let go: at most these objects, because it carries some.

    Raises the errors of read_chain.
    """
    name, last = chain.name, chain.last.increment
    earlier = read_as_committed(store, name, last)
    merges = list(read_merges(store, name))
    operations = {commit.operation for commit in earlier.commits}
    operations |= {one.operation for one in merges if one.increment < last}
    archives = {node: chain.archive(node) for node in chain.parts}
    later = {key for one in merges if one.increment > last for key in _keys_of(one, read_merge_lists(store, one))}

    def is_earlier(key: str) -> bool:
        parsed = parse_key(name, key)
        if parsed is None or parsed.owner not in operations or key in later:
            return False
        if parsed.kind is Kind.SEGMENT and parsed.owner == archives.get(parsed.node):
            return parsed.number <= last_number(chain.newest_segments(parsed.node))
        return parsed.kind in (Kind.SEGMENT, Kind.BASE, Kind.LIST)

    listed = [entry for folder in FOLDERS for entry in store.inventory(f"snapshots/{name}/{folder}")]
    points = range(first_increment(store, name), last)
    objects = tuple(entry for entry in listed if is_earlier(entry.key))
    return DropPlan(name, last, chain.full.chain, "", tuple(points), objects)


def _repaired_before(chain: Chain, merge: Merge) -> frozenset[str]:
    """Return the keys of the objects that replaced objects of states before the merge.

    The repairs are those that were read with the chain: it is known which of their objects it needs, and a later repair
    is not among them.
    """
    replacements = (one for repair in chain.applied.repairs for one in repair.replacements)
    return frozenset(
        entry.key
        for one in replacements
        if one.increment <= merge.increment and one.merge != merge.digest
        for entry in one.new
    )


def _keys_of(merge: Merge, lists: Iterable[ObjectList]) -> Iterator[str]:
    yield from (entry.key for entry in parts_of_entries(merge.entries))
    yield from (segment.key for segments in merge.segments.values() for segment in segments)
    yield from (key for one in lists for stored in listed_objects(one) for key in stored.keys)


def _is_earlier(earlier: EarlierObjects, snapshot: str, key: str) -> bool:
    parsed = parse_key(snapshot, key)
    return parsed is not None and earlier.has(key, parsed)


class DropResult(Struct, frozen=True):
    """What was removed, and by key the store's reasons for refusals. `operation` is "" if there was nothing to do."""

    plan: DropPlan
    operation: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> SizeTotal:
        """The number and the bytes of the removed objects."""
        return SizeTotal.of(entry for entry in self.plan.objects if entry.key not in self.refused)


def drop_earlier_objects(store: ObjectStore, plan: DropPlan, progress: Progress) -> DropResult:
    """Store the mark and remove the objects, as an operation of its own. Safe to repeat.

    Raises SnapshotInUseError if a restore, repair or merge reads the snapshot, and PinnedError if a restore point was
    pinned after the plan was made. Once the mark is stored, a repetition removes the objects.
    """
    check_not_in_use(store, plan.snapshot)
    if not (plan.points or plan.objects):
        _record_done(store, plan, SizeTotal())
        return DropResult(plan)
    intent = structs.replace(new_operation(PRUNE, plan.snapshot, plan.first, ()), expires_at=lease_expiry())
    begin(store, intent)
    try:
        progress.tell(Reading(0, operation=intent.id))
        if first_increment(store, plan.snapshot) < plan.first:
            _check_not_removed(store, intent)
            check_none_pinned(store, plan.snapshot, plan.points)
            _check_not_settled(store, intent)
            _put_mark(store, plan, intent.id)
        # A restore that began in the meantime has stored its lease by now, or finds the mark.
        check_not_in_use(store, plan.snapshot)
        refused = remove_objects(store, _keys(plan.objects), progress)
    except BaseException as error:
        progress.ending()
        with suppress(SnapshotError):
            # If the store's answer was lost when the mark was put, the mark may still arrive.
            is_unknown = isinstance(error, StoreAnswersLostError)
            if not is_unknown and first_increment(store, plan.snapshot) < plan.first:
                record_outcome(store, intent, "failed", reason_of(error), OutcomeDetails(code_of(error)))
        raise
    result = DropResult(plan, intent.id, refused)
    if not refused:
        _record_done(store, plan, result.total)
    else:
        leave_unfinished(store, intent, refused)
    return result


def _put_mark(store: ObjectStore, plan: DropPlan, operation: str) -> None:
    mark = Begin(
        snapshot=plan.snapshot,
        chain=plan.chain,
        increment=plan.first,
        merge=plan.merge,
        operation=operation,
        made_at=current_time(),
    )
    # Another process may have stored it: only its key counts.
    with suppress(ObjectExistsError):
        create_or_find(store, begin_key(plan.snapshot, plan.first), seal(mark))


def _check_not_removed(store: ObjectStore, intent: Intent) -> None:
    """Raise unless all increments stay: if a deletion or a prune of increments may not have seen the intent.

    Both store their intents first, and then look for the other's, so one of them always sees the other.
    """
    check_not_deleted(store, intent.snapshot)
    if is_only_full(store, intent.snapshot):
        raise increments_pruned_error(intent.snapshot)
    for one in open_removals(store, intent.snapshot):
        if not one.is_giving_up:
            raise BeingRemovedError(
                f"operation {one.id} may be removing snapshot {intent.snapshot} or its increments; nothing was removed",
                hint="repeat the command when the operation has ended; see: snapshot status",
                details={"snapshot": intent.snapshot, "operation": one.id},
            )


def _check_not_settled(store: ObjectStore, intent: Intent) -> None:
    """Raise OverdueError if a pin may not have seen the intent, because the intent was settled."""
    if read_outcome(store, intent.id) is not None or not read_lease(store, intent).is_running(utc_now()):
        raise overdue_error(intent)


def _record_done(store: ObjectStore, plan: DropPlan, total: SizeTotal) -> None:
    """Record the outcome of all operations that were to give up what lies before the beginning of the chain."""
    for one in open_removals(store, plan.snapshot):
        if one.is_giving_up and one.increment <= plan.first:
            details = OutcomeDetails(0, {"objects": total.objects, "bytes": total.size_bytes})
            record_outcome(store, one, "done", details=details)


def _keys(objects: Iterable[Listed]) -> list[str]:
    return [entry.key for entry in objects]
