"""The `prune` command: remove snapshots, or the increments of a snapshot, that no retention rule keeps.

The plan is made under the fleet's lock from the current state of the store and the checks recorded there.
snapshots/removal/removing.py does the removals, oldest snapshot first. Unfinished removals of earlier commands are
completed as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from datetime import datetime

from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet, Retention
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.fleet.units import size_text
from cutline.snapshots.operations.ended_operations import REMOVAL_READ_MAX, NewestChecks, read_checks, standing_check
from cutline.snapshots.operations.leases import Lease, SnapshotInUseError, in_use_error, open_leases
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.operations.removed_chains import naming_removed
from cutline.snapshots.operations.second_stores import read_uncopied
from cutline.snapshots.records.operation_records import DELETE, PRUNE
from cutline.snapshots.records.pins import StoredPin, pins_in_force, read_pins
from cutline.snapshots.records.proven_chains import read_commit, snapshot_names
from cutline.snapshots.records.repair_records import read_repairs
from cutline.snapshots.records.store_identity import is_copy, read_identity
from cutline.snapshots.records.tombstones import Mark, only_full_key, read_mark
from cutline.snapshots.removal.deletion import list_unfinished_deletions, plan_deletion, snapshot_removal, tombstone_of
from cutline.snapshots.removal.earlier_objects import DropPlan, DropResult, drop_earlier_objects, plan_drop
from cutline.snapshots.removal.node_cleanup import ChainSlots, hold_fleet, slots_left_behind, slots_of
from cutline.snapshots.removal.removing import (
    Removal,
    RemovalResult,
    RemovalRun,
    mark_of,
    open_removals,
    remove_recorded,
)
from cutline.snapshots.removal.retention import (
    HeldSnapshot,
    RetentionFate,
    RetentionVerdict,
    apply_retention,
    list_kept_instead,
)
from cutline.snapshots.removal.survey import (
    CHAIN_FOLDERS,
    SurveyedSnapshot,
    find_lack_from,
    of_increments,
    survey_snapshots,
)
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError
from cutline.storage.store import Listed, ObjectStore

NAMES_SHOWN_MAX = 10


class PruneStep(Struct, frozen=True):
    """One removal. `is_resumed` is set if an earlier command has already stored the mark.

    `slots` are the slots that nodes may still have; if the chain has ended, the slot in the mark was already dropped.
    `left_behind` maps nodes of the chain to their servers that fleet.toml no longer names.
    """

    kind: str
    mark: Mark
    slots: tuple[str, ...]
    is_resumed: bool = False
    left_behind: Mapping[str, str] = field(default_factory=dict)


class PrunePlan(Struct, frozen=True):
    """The verdict on every snapshot, newest first, and the resulting removals, oldest first.

    `drops` are the merged chains of which the beginning is given up. `rules` are those that were applied, `is_default`
    if neither fleet.toml nor the command set any. `problems` maps names of damaged snapshots to descriptions. `held`
    maps names to the snapshots as input to the rules. `kept_instead` are the snapshots that would lose something if
    checks had found no conflicts in newer snapshots. `unread` are operations that may be checks, but whose outcome
    can't be read or has an end time in the future. `ahead` are the snapshots with a cut in the future. `damaged_merges`
    says why chains can't begin at a merge. `unreduced` are the chains for which nodes keep WAL although only their
    beginning is wanted. `used_bytes` is the size of all objects of snapshots before the removals. `in_use` maps names
    of snapshots with removals to the lease of an operation that is reading them: a prune leaves them out. `uncopied`
    says which second stores lack restore points of `drops`.
    """

    rules: Retention
    verdicts: tuple[RetentionVerdict, ...]
    steps: tuple[PruneStep, ...]
    problems: dict[str, str]
    held: dict[str, HeldSnapshot]
    kept_instead: tuple[str, ...]
    unread: tuple[str, ...]
    is_default: bool = False
    used_bytes: int = 0
    ahead: tuple[str, ...] = ()
    drops: tuple[DropPlan, ...] = ()
    damaged_merges: Mapping[str, str] = field(default_factory=dict)
    unreduced: tuple[str, ...] = ()
    in_use: Mapping[str, Lease] = field(default_factory=dict)
    uncopied: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.steps or self.drops)

    @property
    def bytes(self) -> int:
        """The number of bytes that the plan frees."""
        return sum(step.mark.bytes for step in self.steps) + sum(drop.total.size_bytes for drop in self.drops)

    @property
    def objects(self) -> int:
        """The number of objects that the plan deletes."""
        return sum(step.mark.objects for step in self.steps) + sum(drop.total.objects for drop in self.drops)

    @property
    def left_bytes(self) -> int:
        """The size of all objects of snapshots after the removals."""
        return max(self.used_bytes - self.bytes, 0)

    @property
    def excess_bytes(self) -> int:
        """By how much the snapshots that stay exceed the quota; 0 if they don't, or if there is none."""
        quota = self.rules.quota_bytes
        return 0 if quota is None else max(self.left_bytes - quota, 0)

    @property
    def quota_problem(self) -> str:
        """What exceeds the quota; "" if nothing does. Prune deletes nothing because of the quota."""
        if not self.excess_bytes or self.rules.quota_bytes is None:
            return ""
        return (
            f"the snapshots that stay take {size_text(self.left_bytes)}, {size_text(self.excess_bytes)} more than the"
            f" quota of {size_text(self.rules.quota_bytes)}"
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings that conflicts or wrong clocks changed the plan, or that unreadable records may make it wrong.

        A chain that the rules would end, but that prune can't reduce, is among them.
        """
        warnings: list[str] = []
        restorable = [verdict.name for verdict in self.verdicts if self.held[verdict.name].is_restorable]
        conflicts = [name for name in restorable if self.held[name].has_conflicts]
        names = list_some(conflicts, NAMES_SHOWN_MAX)
        if conflicts and conflicts == restorable:
            warnings.append(
                f"checks found conflicts in every snapshot that can be restored ({names}), so no older snapshot is kept"
                " instead: only age and number decide"
            )
        elif self.kept_instead:
            warnings.append(
                f"checks found conflicts in {names}, so these are kept instead:"
                f" {list_some(self.kept_instead, NAMES_SHOWN_MAX)}; prune will remove them once there are enough newer"
                " snapshots without conflicts"
            )
        if self.unread:
            warnings.append(
                "check records that can't be read or that end in the future (their conflicts count, other results"
                f" don't): {list_some(self.unread, NAMES_SHOWN_MAX)}; see: snapshot history"
            )
        warnings += [
            f"nothing of {name} is given up, because the chain can't begin at its merge: {lack}; see: snapshot check"
            f" {name}"
            for name, lack in self.damaged_merges.items()
        ]
        warnings += [
            f"nodes keep WAL for {name}, of which the rules want only the beginning: the full snapshot of this"
            " merged chain was given up, so prune can't reduce the chain to it; to end the chain and keep its restore"
            f" points: snapshot end {name}"
            for name in self.unreduced
        ]
        warnings += self.uncopied
        if self.ahead:
            warnings.append(
                "snapshots with a cut in the future are kept and not counted:"
                f" {list_some(self.ahead, NAMES_SHOWN_MAX)}; correct the clock or, if the time of the cut is wrong,"
                " delete the snapshot by its name"
            )
        return warnings


class PruneResult(Struct, frozen=True):
    """The result of a prune: the steps of the plan that were done, with a RemovalResult for each, and its drops.

    `left` are the errors about snapshots of the plan that were left out, because an operation is reading them.
    """

    plan: PrunePlan
    steps: tuple[PruneStep, ...]
    removed: tuple[RemovalResult, ...]
    dropped: tuple[DropResult, ...] = ()
    left: tuple[SnapshotInUseError, ...] = ()


def preview_prune(fleet: Fleet, rules: Retention, *, force: bool) -> PrunePlan:
    """Plan a prune, contacting only the store."""
    store = fleet.store.open()
    read_identity(store, fleet)
    return plan_prune(store, fleet, rules, force=force)


def prune_store(
    fleet: Fleet,
    rules: Retention,
    progress: Progress,
    announce: Callable[[PrunePlan], None],
    *,
    force: bool,
    ended: Callable[[RemovalResult | DropResult], None] = lambda _: None,
) -> PruneResult:
    """Remove everything that no rule keeps; calls `announce` with the plan first, and `ended` with each result.

    Snapshots that an operation is reading are left out; if nothing else is to be removed, raises SnapshotInUseError.
    Raises PinnedError if a restore point was pinned after the plan was made.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    goes_by_age = rules.within_seconds is not None or _has_pins_that_expire(store)
    with hold_fleet(fleet, store, identity, (PRUNE, ""), progress, goes_by_age=goes_by_age) as nodes:
        return prune_locked(RemovalRun(fleet, store, nodes, progress, force), rules, announce, ended)


def prune_locked(
    run: RemovalRun,
    rules: Retention,
    announce: Callable[[PrunePlan], None],
    ended: Callable[[RemovalResult | DropResult], None] = lambda _: None,
) -> PruneResult:
    """Like `prune_store`, but for a `run` that already holds the fleet's lock."""
    store = run.store
    run.progress.step("read snapshots")
    plan = plan_prune(store, run.fleet, rules, force=run.force)
    left = [in_use_error(lease) for lease in plan.in_use.values()]
    steps = [step for step in plan.steps if step.mark.snapshot not in plan.in_use]
    drops = [drop for drop in plan.drops if drop.snapshot not in plan.in_use]
    if left and not (steps or drops):
        raise left[0]
    announce(plan)
    removed: list[tuple[PruneStep, RemovalResult]] = []
    for step in steps:
        operation = new_operation(step.kind, step.mark.snapshot, 0, step.mark.nodes)
        removal = (snapshot_removal if step.kind == DELETE else increments_removal)(step.mark, operation.id)
        # An operation may have begun to read the snapshot since the plan was made; the next prune then continues.
        try:
            removed.append((step, remove_recorded(store, operation, removal, run.nodes, run.progress)))
        except SnapshotInUseError as error:
            left.append(error)
        else:
            ended(removed[-1][1])
    dropped: list[DropResult] = []
    for drop in drops:
        try:
            dropped.append(drop_earlier_objects(store, drop, run.progress))
        except SnapshotInUseError as error:
            left.append(error)
        else:
            ended(dropped[-1])
    done, results = [step for step, _ in removed], [result for _, result in removed]
    return PruneResult(plan, tuple(done), tuple(results), tuple(dropped), tuple(left))


def plan_prune(store: ObjectStore, fleet: Fleet, rules: Retention, *, force: bool) -> PrunePlan:
    """Plan the removals according to the rules, from the current state of the store."""
    judged = judge_store(store, rules, force=force)
    surveys, verdicts = judged.surveys, judged.verdicts
    deleted, unreadable = list_unfinished_deletions(store)
    left = [plan_deletion(store, fleet, name, force=True).mark for name in deleted]
    steps = [PruneStep(DELETE, mark, mark.slots, is_resumed=True) for mark in left]
    being_pruned = {removal.snapshot for removal in open_removals(store) if removal.kind == PRUNE}
    for verdict in reversed(verdicts):
        surveyed = surveys[verdict.name]
        if verdict.fate is RetentionFate.DELETE:
            mark = tombstone_of(store, fleet, surveyed)
            steps.append(PruneStep(DELETE, mark, mark.slots if surveyed.is_continuable else ()))
        elif surveyed.is_only_full and (verdict.name in being_pruned or surveyed.of_increments.objects):
            mark = _unfinished_mark(store, surveyed)
            steps.append(PruneStep(PRUNE, mark, mark.slots, is_resumed=True))
        elif verdict.fate is RetentionFate.ONLY_FULL and not surveyed.first:
            mark = _only_full_mark(surveyed, slots_of(store, fleet, surveyed))
            steps.append(PruneStep(PRUNE, mark, mark.slots if surveyed.is_continuable else ()))
    steps = [replace(step, left_behind=slots_left_behind(store, fleet, step.mark)) for step in steps]
    problems = unreadable | {name: snapshot.problem for name, snapshot in surveys.items() if snapshot.problem}
    drops = _plan_drops(store, judged)
    used = sum(snapshot.objects.size_bytes for snapshot in surveys.values()) + sum(mark.bytes for mark in left)
    return PrunePlan(
        rules.or_default,
        tuple(verdicts),
        tuple(steps),
        problems,
        judged.held,
        judged.kept_instead,
        judged.unread,
        is_default=not rules.rules,
        used_bytes=used,
        ahead=tuple(name for name, one in judged.held.items() if one.is_whole and one.is_ahead(judged.now)),
        drops=drops,
        damaged_merges=judged.damaged_merges,
        # No node keeps WAL for a copy of a store.
        unreduced=() if is_copy(store) else tuple(verdict.name for verdict in verdicts if verdict.is_unreduced),
        in_use=_running_leases(store, {step.mark.snapshot for step in steps} | {drop.snapshot for drop in drops}),
        uncopied=tuple(read_uncopied(store, len(fleet.copies), {drop.snapshot: drop.points for drop in drops})),
    )


def _running_leases(store: ObjectStore, names: Set[str]) -> dict[str, Lease]:
    """Return a lease of an operation that is reading each of these snapshots, by snapshot."""
    now = utc_now()
    leases = open_leases(store, *names) if names else ()
    return {lease.operation.snapshot: lease for lease in leases if lease.is_running(now)}


def _plan_drops(store: ObjectStore, judged: JudgedStore) -> tuple[DropPlan, ...]:
    """Plan what is given up of merged chains, oldest snapshot first; also finish what has been begun before."""
    begun = {removal.snapshot for removal in open_removals(store) if removal.is_giving_up}
    drops: list[DropPlan] = []
    for verdict in reversed(judged.verdicts):
        surveyed = judged.surveys[verdict.name]
        if verdict.begins is not None:
            drops.append(plan_drop(store, verdict.name, verdict.begins))
        elif verdict.name in begun and surveyed.first and verdict.fate is RetentionFate.KEEP:
            # Earlier restore points are refused already, whatever was lost since. If the chain can't be read, it is not
            # known what it needs.
            with suppress(RefusedError):
                drops.append(plan_drop(store, verdict.name, surveyed.first))
    return tuple(drops)


class JudgedStore(Struct, frozen=True):
    """The verdict of the rules on every snapshot, newest first, and what they are based on (see PrunePlan).

    `verdicts` say which restore points of each snapshot are wanted for their own sake, and by which rules or pins, and
    at which merge a chain can begin; `damaged_merges` says by snapshot why it can't.
    """

    now: datetime
    surveys: dict[str, SurveyedSnapshot]
    held: dict[str, HeldSnapshot]
    verdicts: tuple[RetentionVerdict, ...]
    kept_instead: tuple[str, ...]
    unread: tuple[str, ...]
    damaged_merges: Mapping[str, str]


def judge_store(store: ObjectStore, rules: Retention, *, force: bool) -> JudgedStore:
    """Apply the rules, or the default rules, to the current state of the store. Changes nothing."""
    surveys = {surveyed.name: surveyed for surveyed in survey_snapshots(store, snapshot_names(store))}
    checks, now = read_checks(store, document_names(store), count_max=REMOVAL_READ_MAX), utc_now()
    held = _held_snapshots(surveys, checks, {name: pins_in_force(store, name, now) for name in surveys})
    verdicts = apply_retention(list(held.values()), rules, now, takes_last=force)
    begins = {verdict.name: verdict.begins for verdict in verdicts if verdict.begins is not None}
    damaged = {name: lack for name, begin in begins.items() if (lack := find_lack_from(store, name, begin))}
    if damaged:
        held |= {name: replace(held[name], merges=()) for name in damaged}
        verdicts = apply_retention(list(held.values()), rules, now, takes_last=force)
    kept_instead = list_kept_instead(list(held.values()), rules, now, takes_last=force)
    return JudgedStore(now, surveys, held, tuple(verdicts), tuple(kept_instead), tuple(sorted(checks.unread)), damaged)


def _has_pins_that_expire(store: ObjectStore) -> bool:
    """Whether a pin has an end, so that a wrong clock could end it too early."""
    return any(pin.until is not None for name in snapshot_names(store) for pin in read_pins(store, name))


def _held_snapshots(
    surveys: Mapping[str, SurveyedSnapshot], checks: NewestChecks, pins: Mapping[str, tuple[StoredPin, ...]]
) -> dict[str, HeldSnapshot]:
    """Return the snapshots as input to the rules, each with its standing check and its pins."""
    by_snapshot = checks.by_snapshot
    standing = {name: standing_check(by_snapshot.get(name, ()), snapshot.count) for name, snapshot in surveys.items()}
    return {
        name: HeldSnapshot(
            name,
            snapshot.moments,
            snapshot.is_whole,
            snapshot.is_only_cut,
            standing[name],
            snapshot.is_continuable,
            _pins_by_increment(snapshot, pins[name]),
            snapshot.first,
            snapshot.merges,
        )
        for name, snapshot in surveys.items()
    }


def _pins_by_increment(snapshot: SurveyedSnapshot, pins: Iterable[StoredPin]) -> dict[int, str]:
    """Describe the pins by the increments that they pin; a pin that can't be read pins the first and the newest."""
    found: dict[int, str] = {}
    for pin in pins:
        unread = (snapshot.first, max(snapshot.count - 1, snapshot.first))
        for increment in unread if pin.increment is None else (pin.increment,):
            found.setdefault(increment, pin.text)
    return found


def increments_removal(mark: Mark, operation: str) -> Removal:
    """Return the removal of a snapshot's increments by `operation`."""
    return Removal(PRUNE, structs.replace(mark, operation=operation), increments_of)


def increments_of(store: ObjectStore, snapshot: str) -> list[Listed]:
    """Return the objects in a chain that its full snapshot does not need, whether or not an increment lists them."""
    # If the lock was lost, another command may have deleted the snapshot.
    with naming_removed(store, snapshot, begins_at=0):
        is_of_increments = of_increments(read_commit(store, snapshot, 0), read_repairs(store, snapshot))
    listed = [entry for part in CHAIN_FOLDERS for entry in store.inventory(f"snapshots/{snapshot}/{part}")]
    return [entry for entry in listed if is_of_increments(entry.key)]


def _only_full_mark(surveyed: SurveyedSnapshot, held: ChainSlots) -> Mark:
    if surveyed.chain is None:
        raise RuntimeError("only a readable snapshot is pruned")
    return mark_of(PRUNE, surveyed, held, surveyed.points[1:], surveyed.of_increments)


def _unfinished_mark(store: ObjectStore, surveyed: SurveyedSnapshot) -> Mark:
    """Return the mark that an unfinished prune left, with the counts of the remaining objects."""
    total, mark = surveyed.of_increments, read_mark(store, only_full_key(surveyed.name))
    return structs.replace(mark, objects=total.objects, bytes=total.size_bytes)
