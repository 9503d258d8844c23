"""Run a planned repair: store the new objects, and then the repair document that makes them count.

1. Store the intent, which also is a lease: no delete or prune removes the snapshot meanwhile.
2. Put back missing objects, which needs no document: the commit already lists them.
3. Store the new objects, under keys of this operation. Until the document exists, nothing reads them.
4. Store the repair document by a conditional put. From here on, every reader uses the new objects.
5. Store the outcome.

A repair that dies before its document changes nothing; gc removes its objects once its lease has expired and a void has
taken the document's place.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum

from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import Progress
from cutline.snapshots.operations.committing import check_stored, put_repair
from cutline.snapshots.operations.leases import HeldLease, hold_lease
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.operations.open_operations import read_open_intents
from cutline.snapshots.operations.operation import current_time, new_operation
from cutline.snapshots.operations.removed_chains import check_not_removed
from cutline.snapshots.operations.settling import settle_in_store
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import ObjectList, StoredObject, dead_digest, parts_of_entries
from cutline.snapshots.records.documents import ManifestError, unseal
from cutline.snapshots.records.merge_records import first_increment
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.operation_records import REPAIR, Intent
from cutline.snapshots.records.proven_chains import check_name
from cutline.snapshots.records.repair_records import (
    INTACT,
    Repair,
    ReplacedObject,
    Replacement,
    check_repair,
    next_repair_number,
)
from cutline.snapshots.records.repaired_chain import apply_repairs
from cutline.snapshots.records.store_identity import read_identity
from cutline.snapshots.records.tombstones import check_not_deleted, is_only_full
from cutline.snapshots.repair.base_rows import rebuild_base
from cutline.snapshots.repair.planning import LocatedEntry, Method, MissingCommit, RepairPlan, RepairStep, Unrepairable
from cutline.snapshots.repair.rebuilt_segments import NotRebuildableError, rebuild_segment
from cutline.snapshots.repair.second_store import SecondStore, store_again
from cutline.snapshots.repair.work import Work
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import RefusedError, SnapshotError, StoppedError, UnreachableError
from cutline.storage.store import ObjectMissingError, ObjectStore, WritingRefusedError
from cutline.storage.stored_form import UndecryptableError, stored_form
from cutline.storage.storing import create_or_find
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError, read_listed


class RepairCrashPoint(StrEnum):
    """The effects of a repair after which a process may die, in order."""

    INTENT_STORED = "intent stored"
    OBJECTS_STORED = "new objects stored"
    COMMITTED = "repair stored"


class RepairOutdatedError(RefusedError):
    """The snapshot was repaired since the repair was planned."""


class RepairUnrecordedError(UnreachableError):
    """The store can't record the repair now, for example because its disk is full.

    Without the record, nothing would protect the new objects from gc.
    """


class RepairForbiddenError(RefusedError):
    """The credentials, or the store itself, don't allow the repair to be recorded."""


class RepairReport(Struct):
    """The result of a repair.

    `number` is the number of the repair document, None if none was needed. `put_back` lists the keys of objects and
    commits that are in the store again, and `replaced` the replacements. `unrepaired` are damaged objects that remain.
    """

    plan: RepairPlan
    operation: str
    number: int | None = None
    put_back: list[str] = field(default_factory=list)
    replaced: list[Replacement] = field(default_factory=list)
    unrepaired: list[Unrepairable] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def objects(self) -> int:
        """The number of objects that were stored."""
        return len(self.put_back) + sum(len(one.new) for one in self.replaced)


def settle_repairs(fleet: Fleet, name: str, progress: Progress) -> None:
    """Settle dead repairs of the snapshot, which otherwise keep the number of their document for themselves."""
    store = fleet.store.open()
    read_identity(store, fleet)
    for intent in read_open_intents(store, skips_unreadable=True):
        if (intent.kind, intent.snapshot) == (REPAIR, name):
            settle_in_store(store, intent, progress)


def run_repair(fleet: Fleet, plan: RepairPlan, spark: SparkSource, progress: Progress) -> RepairReport:
    """Carry out the plan.

    Raises RepairOutdatedError if another repair was stored since it was made, RepairSupersededError if one is stored
    meanwhile, CommitIndeterminateError if it is not known whether the repair was stored; SnapshotDeletedError. Raises
    RepairUnrecordedError or RepairForbiddenError, with the store's error, if the repair can't be recorded. An interrupt
    is raised as a StoppedError.
    """
    began, store = time.monotonic(), fleet.store.open()
    name = check_name(plan.request.name)
    increment = plan.chain.last.increment if plan.chain else 0
    nodes = tuple(sorted({step.node for step in plan.steps}))
    intent = new_operation(REPAIR, name, increment, nodes)
    if plan.chain is not None:
        intent = structs.replace(intent, repair=plan.number)
    report = RepairReport(plan, intent.operation, unrepaired=list(plan.unrepairable))
    held = HeldLease(is_stored=False)
    try:
        # Without a chain, a commit is put back, and nothing of the chain is read.
        begins_at = plan.chain.full.increment if plan.chain else first_increment(store, name)
        with hold_lease(store, intent, progress, begins_at) as held:
            if held.problem is not None:
                raise _unrecorded_error(name, held.problem) from held.problem
            _carry_out(Work(fleet.store, spark, progress), plan, intent, report, held)
    except KeyboardInterrupt as interrupt:
        raise _stopped_error(name, report, held) from interrupt
    report.seconds = time.monotonic() - began
    return report


def _carry_out(work: Work, plan: RepairPlan, intent: Intent, report: RepairReport, held: HeldLease) -> None:
    """Carry out the plan under the lease; add the results to the report."""
    store, progress = work.location.open(), work.progress
    progress.reached(RepairCrashPoint.INTENT_STORED)
    if plan.chain is None:
        _put_back_commits(store, plan, report, progress)
    else:
        chain = _read_again(store, plan, plan.chain)
        _build(work, chain, intent, plan, report)
        progress.reached(RepairCrashPoint.OBJECTS_STORED)
        if report.replaced:
            repair = _new_repair(chain, intent, plan.number, report.replaced)
            _check(store, chain, repair)
            check_not_deleted(store, plan.request.name)
            held.is_committing = True
            put_repair(store, repair)
            # After a suspension, others may have removed the snapshot after it was looked for. If the store does not
            # answer, the repair is stored all the same.
            with suppress(UnreachableError):
                check_not_removed(store, chain.name, chain.last.increment, chain.last.increment)
            report.number = repair.number
            progress.reached(RepairCrashPoint.COMMITTED)
    held.is_done = True
    held.volumes = {"objects": report.objects, "bytes": sum(new.size for one in report.replaced for new in one.new)}


def _stopped_error(name: str, report: RepairReport, held: HeldLease) -> StoppedError:
    """Return the error for an interrupted repair: its effects, as far as they are known, and the next command."""
    details: dict[str, object] = {"snapshot": name, "operation": report.operation, "put_back": report.put_back}
    count = len(report.put_back)
    back = f"; {count:,} missing {'object is' if count == 1 else 'objects are'} back" if count else ""
    again = "to repair the rest, repeat the command" if back else "to repair it, repeat the command"
    if held.is_committing:
        unknown = f"it is not known whether the repair of {name} was stored"
        return StoppedError(f"{unknown}{back}", hint="once the store answers, repeat the command", details=details)
    if held.is_done and report.plan.chain is not None:
        replaced = sum(len(one.replaced) for one in report.replaced)
        objects = "object" if replaced == 1 else "objects"
        done = f"the repair of {name} is complete, with {replaced:,} {objects} replaced{back}"
        return StoppedError(done, hint=f"to compare its copies: snapshot check {name}", details=details)
    left = "; new objects that it stored remain, unused, until gc removes them: snapshot gc"
    stores_new = held.is_stored and report.plan.chain is not None
    nothing = f"no damaged object of {name} was replaced" if back else f"nothing in {name} was repaired"
    return StoppedError(f"{nothing}{back}", hint=f"{again}{left if stores_new else ''}", details=details)


def _unrecorded_error(name: str, problem: SnapshotError) -> SnapshotError:
    """Return the error for a repair without a record, with message, hint and details of the store's error."""
    is_forbidden = isinstance(problem, WritingRefusedError | RefusedError)
    kind = RepairForbiddenError if is_forbidden else RepairUnrecordedError
    return kind(
        f"the repair of {name} could not be recorded, and nothing was changed: {problem.message}",
        hint=problem.hint.split("\n"),
        details={**problem.details, "snapshot": name},
    )


def _read_again(store: ObjectStore, plan: RepairPlan, planned: Chain) -> Chain:
    """Read the chain under the lease; raise RepairOutdatedError if it was repaired since the plan was made."""
    chain = read_chain_lists(store, read_from_merge(store, planned.name))
    if (
        chain.applied.repairs == planned.applied.repairs
        and next_repair_number(store, planned.name) == plan.number
        and chain.commits[: len(planned.commits)] == planned.commits
    ):
        return chain
    raise _outdated_error(planned.name, f"snapshot {planned.name} has changed")


def _outdated_error(name: str, what: str) -> RepairOutdatedError:
    return RepairOutdatedError(
        f"{what} since the repair was planned; nothing was changed",
        hint=f"to see the new plan: snapshot repair {name} --dry-run",
        details={"snapshot": name},
    )


def _put_back_commits(store: ObjectStore, plan: RepairPlan, report: RepairReport, progress: Progress) -> None:
    progress.step("put back commit files", total=len(plan.commits), unit="objects")
    if plan.other is None:
        raise RuntimeError("commits are read from another store")
    check_not_deleted(store, plan.request.name)
    fulls = {commit.key for commit in plan.commits if not commit.increment}
    if is_only_full(store, plan.request.name) and len(fulls) < len(plan.commits):
        raise _outdated_error(plan.request.name, f"the increments of {plan.request.name} were pruned")
    # The full snapshot's commit comes first, so that the chain is never longer than what is there.
    for at, commit in enumerate(plan.commits):
        stored = _read_commit(store, plan.other, commit)
        if stored is None:
            why = f"in {plan.other.url}, {commit.key} is no longer the commit that was planned"
            report.unrepaired += [Unrepairable(left.key, why) for left in plan.commits[at:]]
            return
        create_or_find(stored_form(store).raw, commit.key, stored)
        report.put_back.append(commit.key)
        progress.advance(1)


def _read_commit(store: ObjectStore, other: SecondStore, commit: MissingCommit) -> bytes | None:
    """Return the stored bytes of a commit in the other store; None unless they are those of the planned commit.

    Nothing could replace a commit file that was put back with other bytes, such as those of a truncated answer.
    """
    try:
        stored = other.raw.read_range(commit.key, 0, other.raw.size(commit.key))
        _, digest = unseal(commit.key, stored_form(store).decode(commit.key, stored))
    except (ObjectMissingError, UndecryptableError, ManifestError):
        return None
    return stored if digest == commit.digest else None


def _build(work: Work, chain: Chain, intent: Intent, plan: RepairPlan, report: RepairReport) -> None:
    """Put back missing objects, and store the new objects; add the results to the report."""
    work.progress.step("repair", total=len(plan.steps), unit="steps")
    for step in plan.steps:
        reasons: list[str] = []
        for copy in (step.copy, *step.further):
            try:
                if step.method is Method.PUT_BACK:
                    report.put_back += _put_back(work, plan.other, step)
                else:
                    one = _replace(work, chain, intent, plan.other, replace(step, copy=copy))
                    report.replaced.append(_of_merge(chain, one))
                break
            except NotRebuildableError as error:
                reasons.append(str(error))
        else:
            report.unrepaired += [Unrepairable(damage.key, "; ".join(reasons)) for damage in step.damages]
        work.progress.advance(1)


def _of_merge(chain: Chain, replacement: Replacement) -> Replacement:
    """Return the replacement with the merge that lists the replaced objects, if the chain begins with one."""
    if chain.beginning is None or replacement.increment > chain.full.increment:
        return replacement
    return structs.replace(replacement, merge=chain.beginning.merge.digest)


def _put_back(work: Work, other: SecondStore | None, step: RepairStep) -> list[str]:
    store, damaged = work.location.open(), [damage.key for damage in step.damages]
    parts = [part for part in parts_of_entries([step.located[0].entry]) if part.key in damaged]
    for part in parts:
        create_or_find(stored_form(store).raw, part.key, _read_other(store, other, part))
    return [part.key for part in parts]


def _read_other(store: ObjectStore, other: SecondStore | None, entry: StoredObject | ObjectList | Segment) -> bytes:
    if other is None:
        raise RuntimeError("the objects of this step are in another store")
    try:
        return other.read(store, entry)
    except ObjectDamagedError as error:
        raise NotRebuildableError(f"in {other.url}, {error.detail}") from error


def _replace(work: Work, chain: Chain, intent: Intent, other: SecondStore | None, step: RepairStep) -> Replacement:
    if step.method is Method.REBUILD_ROWS:
        return rebuild_base(chain, step.unit, intent.operation, work)
    store, damage = work.location.open(), step.damage_of_entries
    if step.method is Method.REBUILD_SEGMENT:
        segments = [one.entry for one in step.located if isinstance(one.entry, Segment)]
        try:
            new = [rebuild_segment(store, chain, old, step.copy, intent.operation) for old in segments]
        except ObjectDamagedError as error:
            raise NotRebuildableError(f"neither copy can be trusted: {error.message}") from error
        return _replacement(chain, step, damage, new)
    damaged = {one.key for one in step.damages}
    entries: list[StoredObject | ObjectList | Segment] = []
    for one in step.located:
        parts: list[StoredObject | ObjectList | Segment] = []
        for part in parts_of_entries([one.entry]):
            stored = _read_other(store, other, part) if part.key in damaged else _read_own(store, part)
            parts.append(store_again(store, chain.name, intent.operation, part, stored))
        entries.append(_joined(one.entry, parts))
    return _replacement(chain, step, damage, entries)


def _joined(
    old: StoredObject | ObjectList | Segment, parts: Sequence[StoredObject | ObjectList | Segment]
) -> StoredObject | ObjectList | Segment:
    """Return the entry of an object that was stored again: its parts are those of the `old` entry."""
    first = parts[0]
    if not isinstance(first, StoredObject) or not isinstance(old, StoredObject) or old.dead is None:
        return first
    dead = parts[1]
    return structs.replace(first, dead=structs.replace(old.dead, key=dead.key, digest=dead.digest))


def _read_own(store: ObjectStore, entry: StoredObject | ObjectList | Segment) -> bytes:
    form = stored_form(store)
    try:
        return read_listed(form.raw, entry.node, entry.key, (form.stored_size(entry.size), entry.digest))
    except ObjectDamagedError as error:
        raise NotRebuildableError(f"another object has to be repaired first: {error.message}") from error


def _replacement(
    chain: Chain,
    step: RepairStep,
    damage: dict[str, str],
    new: Iterable[StoredObject | ObjectList | Segment],
) -> Replacement:
    new = list(new)
    return Replacement(
        increment=step.increment,
        commit=next(commit.digest for commit in chain.commits if commit.increment == step.increment),
        node=step.node,
        copy=step.copy,
        replaced=tuple(_replaced(one, damage.get(one.entry.key, INTACT)) for one in step.located),
        objects=tuple(entry for entry in new if isinstance(entry, StoredObject)),
        lists=tuple(
            ObjectList(**{name: getattr(entry, name) for name in ObjectList.__struct_fields__})
            for entry in new
            if isinstance(entry, ObjectList)
        ),
        segments=tuple(entry for entry in new if isinstance(entry, Segment)),
    )


def _replaced(one: LocatedEntry, damage: str) -> ReplacedObject:
    return ReplacedObject(one.entry.key, one.entry.digest, damage, one.list, dead_digest(one.entry))


def _new_repair(chain: Chain, intent: Intent, number: int, replaced: Iterable[Replacement]) -> Repair:
    earlier = chain.applied.repairs
    return Repair(
        snapshot=chain.name,
        number=number,
        operation=intent.operation,
        chain=chain.full.chain,
        made_at=current_time(),
        by=own_label(REPAIR, chain.name),
        previous=earlier[-1].digest if earlier else "",
        replacements=tuple(replaced),
    )


def _check(store: ObjectStore, chain: Chain, repair: Repair) -> None:
    """Raise an error unless every command will accept the repair and the store has its objects."""
    check_repair(repair)
    apply_repairs(chain, (repair,))
    check_stored(store, {new.key: new.size for one in repair.replacements for new in one.new})
