"""Run a merge: store a new base of every copy, prove it, and store the document with which the chain then begins.

1. Store the intent, which also is a lease: no delete or prune removes the snapshot meanwhile.
2. Store the base of each node under keys of this operation, and then a list of its objects in the operation's folder.
3. Read the base back, and compare its partition hashes with those of the chain folded to the increment. What has no
   hashes there, such as DDL and the rows of copies that the increment leaves out, is read and compared with its digest.
4. Store the merge by a conditional put. From here on, every reader of the increment or a later one begins there.
5. Store the outcome.

A merge that dies before its document changes nothing. If it is repeated, it continues the same operation: a node whose
list is stored is not written again. Otherwise gc removes its objects, once its lease has expired and a void has taken
the document's place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum

from msgspec import Struct, UnsetType, structs

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import is_gone, own_label
from cutline.fleet.progress import Progress
from cutline.snapshots.fold.amounts import amount_of_copies
from cutline.snapshots.merge.rewriting import copy_objects, write_base
from cutline.snapshots.operations.committing import check_stored, put_merge
from cutline.snapshots.operations.leases import HeldLease, hold_lease, in_use_error, read_lease
from cutline.snapshots.operations.object_damage import (
    Damage,
    VerifyTask,
    find_listed_damage,
    list_objects,
    verify_object,
)
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists, store_lists_above
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import current_time, new_operation
from cutline.snapshots.operations.removed_chains import check_not_removed, naming_removed
from cutline.snapshots.operations.settling import settle_in_store
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    EXTENSION_ROWS,
    GLOBALS,
    Increment,
    LostList,
    StoredObject,
    listed_objects,
    parts_of_entries,
    split_entries,
)
from cutline.snapshots.records.documents import ManifestError, read_sealed, seal
from cutline.snapshots.records.merge_records import (
    COUNTS,
    Merge,
    MergedCopy,
    MergePart,
    check_merge,
    find_merge,
    merge_numbers,
)
from cutline.snapshots.records.merged_chain import begin_with, merged_copy, needed_segments, read_from_merge
from cutline.snapshots.records.operation_records import MERGE, Intent, operation_key
from cutline.snapshots.records.proven_chains import check_has_rows, check_name, check_not_pruned, read_part_at
from cutline.snapshots.records.repaired_chain import with_repairs
from cutline.snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from cutline.snapshots.records.tombstones import check_not_deleted
from cutline.snapshots.repair.work import Work
from cutline.spark.needs import ExecutorNeeds
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError, SnapshotError, StoppedError, UnreachableError, UsageError
from cutline.storage.store import ObjectExistsError, ObjectMissingError, ObjectStore, WritingRefusedError
from cutline.storage.storing import create_or_find
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError

# A merge lists up to this many objects of each node itself.
OWN_OBJECTS_MAX = 100


class MergeCrashPoint(StrEnum):
    """The effects of a merge after which a process may die, in order."""

    INTENT_STORED = "intent stored"
    NODE_STORED = "base of a node stored"
    PROVEN = "base proven"
    COMMITTED = "merge stored"


class MergeUnrecordedError(UnreachableError):
    """The store can't record the merge now, for example because its disk is full.

    Without the record, nothing would protect the new objects from gc.
    """


class MergeForbiddenError(RefusedError):
    """The credentials, or the store itself, don't allow the merge to be recorded."""


class NothingToMergeError(RefusedError):
    """The snapshot has no increment, or only a full snapshot was asked for."""


class MergePlan(Struct, frozen=True):
    """What a merge will do: `chain` is folded to its last increment. `existing` is the merge that is there already.

    `later` is the increment of the next merge, with which later increments begin; None if there is none.
    """

    chain: Chain
    existing: Merge | None
    later: int | None = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes for which a base is made."""
        return self.chain.present

    @property
    def increment(self) -> int:
        """The increment at which the chain will begin."""
        return self.chain.last.increment


class MergeReport(Struct):
    """The result of a merge. `seconds` includes the proof; `read_bytes` are those of the chain's objects."""

    plan: MergePlan
    merge: Merge
    operation: str
    is_new: bool
    seconds: float = 0.0


class Proof(Struct, frozen=True):
    """The partition hashes of a chain and of its merge are equal: how many, and a digest of them."""

    partitions: int
    digest: str


# Compares a chain with the merged chain that is to replace it; raises an error if they are not equal.
Proves = Callable[[Chain, Chain, Work], Proof]


def plan_merge(fleet: Fleet, name: str, increment: int | None, progress: Progress) -> MergePlan:
    """Read the chain up to `increment` (None: the newest); raise NothingToMergeError, and the errors of read_chain."""
    progress.step("read the chain")
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    check_not_deleted(store, check_name(name))
    check_not_pruned(store, name)
    if increment == 0:
        raise UsageError("--to 0 is the full snapshot, which is a base already", hint="name an increment: --to N")
    with naming_removed(store, name, increment or 0):
        return _plan(store, identity, name, increment)


def _plan(store: ObjectStore, identity: StoreIdentity, name: str, increment: int | None) -> MergePlan:
    chain = read_from_merge(store, name, increment)
    check_of_fleet(chain, identity)
    check_has_rows(chain, f"there is nothing to merge: snapshot show {name}")
    if not chain.last.increment:
        raise NothingToMergeError(
            f"snapshot {name} has no increments",
            hint=f"take one: snapshot create {name} --incremental",
            details={"snapshot": name},
        )
    if isinstance(chain.last, Increment) and chain.last.history is None:
        raise NothingToMergeError(
            f"increment {chain.last.increment} of {name} was taken by an early version, which recorded no history",
            hint=f"take an increment, and merge it: snapshot create {name} --incremental",
            details={"snapshot": name, "increment": chain.last.increment},
        )
    chain = read_chain_lists(store, chain)
    for entry in (entry for commit in chain.commits for entry in commit.object_lists):
        if isinstance(entry, LostList):
            raise lost_list_error(entry)
    chain.check_archive()
    number = chain.last.increment
    return MergePlan(chain, find_merge(store, name, number).merge, _find_later(store, name, number))


def _find_later(store: ObjectStore, name: str, increment: int) -> int | None:
    for number in merge_numbers(store, name):
        # One that can't be read is named by the commands that need it.
        with suppress(ManifestError):
            if number > increment and find_merge(store, name, number).merge is not None:
                return number
    return None


def run_merge(fleet: Fleet, plan: MergePlan, spark: SparkSource, progress: Progress, proves: Proves) -> MergeReport:
    """Carry out the plan.

    Raises ObjectDamagedError if an object of the chain or of the new base can't be read, the error of `proves` if the
    new base is not equal to the chain, MergeSupersededError if another merge was stored meanwhile,
    CommitIndeterminateError if it is not known whether the merge was stored; SnapshotInUseError if another merge of the
    snapshot is running. In all of these cases but the indeterminate one, the chain is as it was. Raises
    MergeUnrecordedError or MergeForbiddenError, with the store's error, if the merge can't be recorded. An interrupt is
    raised as a StoppedError.
    """
    began, store, name = time.monotonic(), fleet.store.open(), plan.chain.name
    if plan.existing is not None:
        return MergeReport(plan, plan.existing, plan.existing.operation, is_new=False)
    # Executors that can't take part are found before anything is stored.
    spark.begin(ExecutorNeeds(fleet.store), progress, amount_of_copies(plan.chain, plan.nodes))
    intent, is_resumed = _intent_of(store, plan, progress)
    work = Work(fleet.store, spark, progress)
    held = HeldLease(is_stored=False)
    try:
        with hold_lease(store, intent, progress, plan.chain.full.increment, is_resumed=is_resumed) as held:
            if held.problem is not None:
                raise _unrecorded_error(name, held.problem) from held.problem
            progress.reached(MergeCrashPoint.INTENT_STORED)
            merge = _carry_out(work, plan, intent, held, proves, began)
    except KeyboardInterrupt as interrupt:
        raise _stopped_error(plan, intent, held) from interrupt
    return MergeReport(plan, merge, intent.operation, is_new=True, seconds=time.monotonic() - began)


def _intent_of(store: ObjectStore, plan: MergePlan, progress: Progress) -> tuple[Intent, bool]:
    """Return the intent, and whether it is that of a merge that died and is continued.

    Settles other dead merges of the snapshot. Raises SnapshotInUseError if a merge is running.
    """
    name, increment = plan.chain.name, plan.increment
    turn = find_merge(store, name, increment).turn
    resumed: Intent | None = None
    for intent in read_open_intents(store, skips_unreadable=True):
        if (intent.kind, intent.snapshot) != (MERGE, name):
            continue
        lease = read_lease(store, intent)
        is_known_dead = not isinstance(intent.process, UnsetType) and is_gone(intent.process)
        if lease.is_running(utc_now()) and not is_known_dead:
            raise in_use_error(lease)
        if (intent.increment, intent.turn) == (increment, turn) and resumed is None:
            resumed = intent
        else:
            settle_in_store(store, intent, progress)
    if resumed is not None:
        progress.note(f"operation {resumed.operation}, which has died, is continued")
        return resumed, True
    return structs.replace(new_operation(MERGE, name, increment, plan.nodes), turn=turn), False


def _carry_out(work: Work, plan: MergePlan, intent: Intent, held: HeldLease, proves: Proves, began: float) -> Merge:
    """Carry out the plan under the lease; return the merge."""
    store, progress, chain = work.location.open(), work.progress, plan.chain
    progress.step("write base", total=len(plan.nodes), unit="nodes")
    parts: list[MergePart] = []
    for number, node in enumerate(plan.nodes):
        parts.append(_base_of(store, chain, node, number, intent.operation, work))
        progress.reached(MergeCrashPoint.NODE_STORED, node=node)
        progress.advance(1)
    parts += [_carried_copy(store, chain, node, intent.operation, work) for node in chain.absent]
    merge = _new_merge(chain, intent, parts)
    merged = _read_back(store, merge)
    _check_unproven(chain, merged, work)
    proof = proves(chain, merged, work)
    progress.reached(MergeCrashPoint.PROVEN)
    merge = structs.replace(merge, proof=proof.digest, seconds=round(time.monotonic() - began, 3))
    check_stored(store, {entry.key: entry.size for entry in parts_of_entries(merge.entries)})
    check_not_deleted(store, chain.name)
    check_not_pruned(store, chain.name)
    held.is_committing = True
    put_merge(store, merge, intent.turn)
    # After a suspension, others may have removed the snapshot after it was looked for. If the store does not answer,
    # the merge is stored all the same.
    with suppress(UnreachableError):
        check_not_removed(store, chain.name, merge.increment, merge.increment)
    held.is_done = True
    held.volumes = {name: merge.counts[name] for name in ("rows", "objects", "bytes")}
    progress.reached(MergeCrashPoint.COMMITTED)
    return merge


def _base_of(store: ObjectStore, chain: Chain, node: str, number: int, operation: str, work: Work) -> MergePart:
    """Return the base of a node: that which this operation has stored before it died, or a new one."""
    key = operation_key(operation, f"merged-{number:06d}")
    with suppress(ObjectMissingError, ManifestError):
        part: MergePart = read_sealed(store, key, MergePart)
        if (part.operation, part.node, part.folded) == (operation, node, chain.digest):
            return part
    base = write_base(chain, node, operation, work)
    counts = _count(base.objects) | _count_carried(base.carried)
    if chain.shard_of(node) != node:
        counts["rows"] = 0
    part = _new_part(store, chain, node, operation, base.objects, counts)
    # A part that can't be replaced is only not used again.
    with suppress(ObjectExistsError):
        create_or_find(store, key, seal(part))
    return part


def _count(objects: Sequence[StoredObject]) -> dict[str, int]:
    return {
        "rows": sum(sum(one.rows.values()) for one in objects),
        "objects": sum(len(one.parts) for one in objects),
        "bytes": sum(one.stored_bytes for one in objects),
    }


def _count_carried(objects: Sequence[StoredObject]) -> dict[str, int]:
    return {"carried_objects": len(objects), "carried_bytes": sum(one.size for one in objects)}


def _new_part(
    store: ObjectStore,
    chain: Chain,
    node: str,
    operation: str,
    objects: Sequence[StoredObject],
    counts: Mapping[str, int],
) -> MergePart:
    own, lists = split_entries(store_lists_above(store, chain.name, operation, objects, OWN_OBJECTS_MAX))
    return MergePart(operation=operation, node=node, folded=chain.digest, objects=own, lists=lists, counts=dict(counts))


def _carried_copy(store: ObjectStore, chain: Chain, node: str, operation: str, work: Work) -> MergePart:
    """Return the base of a copy that the increment leaves out: all of its objects, unless the copy has ended.

    Those that it shares with its primary's copy are stored again: in a merge, every copy has objects of its own.
    """
    objects: list[StoredObject] = []
    if not chain.absent[node].has_ended:
        objects = [stored for entry in chain.base_entries(node) for stored in listed_objects(entry)]
    carried = [stored for stored in objects if stored.node == node]
    objects = carried + copy_objects(
        [stored for stored in objects if stored.node != node], chain.name, node, operation, work
    )
    counts = _count(objects) | {"rows": 0} | _count_carried(carried)
    return _new_part(store, chain, node, operation, objects, counts)


def _new_merge(chain: Chain, intent: Intent, parts: Sequence[MergePart]) -> Merge:
    copies = {node: _copy_of(chain, node) for node in chain.parts}
    segments: dict[str, tuple[Segment, ...]] = {}
    for node, copy in copies.items():
        archive = tuple(map(chain.original, chain.segments(node)))
        has_ended = node in chain.absent and chain.absent[node].has_ended
        in_doubt = [part.lsn for part in chain.last.cut.of(chain.shard_of(node)).in_doubt if part.is_prepared]
        segments[node] = needed_segments(archive, copy, () if has_ended else in_doubt)
    commit = chain.beginning.commit if chain.beginning and not chain.increments else chain.last
    return Merge(
        snapshot=chain.name,
        increment=chain.last.increment,
        operation=intent.operation,
        chain=chain.full.chain,
        made_at=current_time(),
        seconds=0.0,
        by=own_label(MERGE, chain.name),
        commit=commit.digest,
        full=chain.stored_full.digest,
        counts={name: sum(part.counts.get(name, 0) for part in parts) for name in COUNTS},
        copies=copies,
        objects=tuple(stored for part in parts for stored in part.objects),
        lists=tuple(entry for part in parts for entry in part.lists),
        segments=segments,
        proof="",
    )


def _copy_of(chain: Chain, node: str) -> MergedCopy:
    if node not in chain.absent:
        return merged_copy(chain, node)
    if chain.absent[node].has_ended:
        # Nothing of it is read any more: the merge has no rows of it, and only the last segment of its archive.
        return MergedCopy(base=chain.bases[node], counted_from=chain.absent[node].last.through)
    counted_from, pending = chain.counted_from(node)
    return MergedCopy(
        base=chain.bases[node],
        counted_from=counted_from,
        pending=tuple(sorted(pending)),
        rolled_back=tuple(sorted(chain.excluded(node) - {one.lsn for one in chain.undecided(node)})),
    )


def _read_back(store: ObjectStore, merge: Merge) -> Chain:
    """Return the chain that begins with the merge, as readers will see it."""
    check_merge(merge)
    chain = begin_with(read_part_at(store, merge.snapshot, merge.increment), merge)
    return read_chain_lists(store, with_repairs(store, chain))


def _check_unproven(chain: Chain, merged: Chain, work: Work) -> None:
    """Read what the proof does not compare: DDL, and the rows of copies that the increment leaves out.

    Of their segments and of large objects, only the sizes are compared; server globals and rows of extensions may be
    missing, because the next commit stores them again. Raises ObjectDamagedError, and any error of the store.
    """
    store = work.location.open()
    entries = {one.key: one for one in list_objects(merged, merged.all_nodes)}
    for damage in find_listed_damage(store, merged, merged.all_nodes).values():
        entry = entries[damage.key].stored
        if isinstance(entry, Segment) or entry.kind not in (GLOBALS, EXTENSION_ROWS):
            raise _damaged_error(damage)
    to_read = [
        one
        for one in entries.values()
        if not isinstance(one.stored, Segment)
        and (one.stored.kind == DDL or (one.stored.kind == BASE and one.node in chain.absent))
    ]

    def tasks(_: object) -> list[VerifyTask]:
        return [VerifyTask(one, work.location) for one in to_read]

    is_local = work.is_local(sum(one.stored.size for one in to_read))
    for report in work.run(verify_object, tasks, None, lambda task: task.chain_object.stored.size, is_local=is_local):
        if report.damage is not None:
            raise _damaged_error(report.damage)


def _damaged_error(damage: Damage) -> ObjectDamagedError:
    return ObjectDamagedError(key=damage.key, kind=damage.kind, node=damage.node, detail=damage.detail)


def _stopped_error(plan: MergePlan, intent: Intent, held: HeldLease) -> StoppedError:
    """Return the error for an interrupted merge: its effects, as far as they are known, and the next command."""
    name, again = plan.chain.name, f"snapshot merge {plan.chain.name} --to {plan.increment}"
    details: dict[str, object] = {"snapshot": name, "operation": intent.operation}
    if held.is_done:
        done = f"{name} begins at increment {plan.increment} now: the merge is complete"
        return StoppedError(done, hint=f"to check it: snapshot check {name}", details=details)
    if held.is_committing:
        unknown = f"it is not known whether the merge of {name} was stored"
        return StoppedError(unknown, hint=f"once the store answers, repeat the command: {again}", details=details)
    return StoppedError(
        f"nothing in {name} was merged",
        hint=f"to continue it: {again}   (objects that it has stored are not used; to remove them: snapshot gc)",
        details=details,
    )


def _unrecorded_error(name: str, problem: SnapshotError) -> SnapshotError:
    """Return the error for a merge without a record, with message, hint and details of the store's error."""
    is_forbidden = isinstance(problem, WritingRefusedError | RefusedError)
    kind = MergeForbiddenError if is_forbidden else MergeUnrecordedError
    return kind(
        f"the merge of {name} could not be recorded, and nothing was changed: {problem.message}",
        hint=problem.hint.split("\n"),
        details={**problem.details, "snapshot": name},
    )
