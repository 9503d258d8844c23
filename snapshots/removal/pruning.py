"""`prune`: whatever no rule of retention keeps is taken away, whole snapshots or the increments of one.

The plan is made under the fleet's lock, from what the store has then. What is taken away and in which order is
snapshots/removal/removal.py's; the oldest goes first. What an earlier command has begun to take away is finished too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from msgspec import structs

from fleet.config import Fleet, Retention
from fleet.label import own_label
from fleet.progress import Progress
from snapshots.operations.leases import check_not_in_use
from snapshots.operations.operation import new_operation, now_text
from snapshots.records.commits import read_commit, snapshot_names
from snapshots.records.documents import ManifestError
from snapshots.records.store_identity import read_identity
from snapshots.records.tombstones import ONLY_FULL, Mark, only_full_key, read_mark
from snapshots.removal.deletion import (
    Deleting,
    hold_fleet,
    list_unfinished_deletions,
    plan_deletion,
    removal_of,
    tombstone_of,
)
from snapshots.removal.removal import DELETE, PRUNE, Removal, RemovalResult, open_removals, remove_recorded
from snapshots.removal.retention import HeldSnapshot, RetentionFate, RetentionVerdict, apply_retention, check_rules
from snapshots.removal.survey import SurveyedSnapshot, survey_snapshots
from storage.store import Listed, ObjectStore
from wal.slots.slots import slot_name


@dataclass(frozen=True, slots=True)
class PruneStep:
    """One thing to take away. `begun`: an earlier command has put its mark already."""

    kind: str
    mark: Mark
    begun: bool = False


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What becomes of every snapshot, the newest first, and the steps to it, the oldest first.

    `problems` says what is wrong with those that are damaged.
    """

    rules: Retention
    verdicts: tuple[RetentionVerdict, ...]
    steps: tuple[PruneStep, ...]
    problems: dict[str, str]

    @property
    def bytes(self) -> int:
        """What is freed."""
        return sum(step.mark.bytes for step in self.steps)

    @property
    def objects(self) -> int:
        """How many objects go."""
        return sum(step.mark.objects for step in self.steps)


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was done: a Removed for every step of the plan."""

    plan: PrunePlan
    removed: tuple[RemovalResult, ...]


def preview_prune(fleet: Fleet, rules: Retention, *, force: bool) -> PrunePlan:
    """What `prune` would do, contacting only the store. Raises NoRetentionError."""
    check_rules(rules)
    store = fleet.store.open()
    read_identity(store, fleet)
    return plan_prune(store, fleet, rules, force=force)


def prune_store(
    fleet: Fleet, rules: Retention, progress: Progress, announce: Callable[[PrunePlan], None], *, force: bool
) -> PruneResult:
    """Take away what no rule keeps; `announce` is told the plan before. Raises NoRetentionError, SnapshotInUseError."""
    check_rules(rules)
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    with hold_fleet(fleet, store, identity.fleet_id, (PRUNE, ""), progress) as on_nodes:
        return prune_locked(Deleting(fleet, store, on_nodes, progress, force), rules, announce)


def prune_locked(deleting: Deleting, rules: Retention, announce: Callable[[PrunePlan], None]) -> PruneResult:
    """The same by whoever holds the fleet's lock."""
    store = deleting.store
    plan = plan_prune(store, deleting.fleet, rules, force=deleting.force)
    for step in plan.steps:
        check_not_in_use(store, step.mark.snapshot)
    announce(plan)
    removed: list[RemovalResult] = []
    for step in plan.steps:
        operation = new_operation(step.kind, step.mark.snapshot, 0, step.mark.nodes)
        removal = (removal_of if step.kind == DELETE else only_full_of)(step.mark, operation.id)
        removed.append(remove_recorded(store, operation, removal, deleting.on_nodes, deleting.progress))
    return PruneResult(plan, tuple(removed))


def plan_prune(store: ObjectStore, fleet: Fleet, rules: Retention, *, force: bool) -> PrunePlan:
    """What the rules take away of the store now."""
    standings = {one.name: one for one in survey_snapshots(store, snapshot_names(store))}
    held = [HeldSnapshot(one.name, one.moments, one.is_whole) for one in standings.values()]
    verdicts = apply_retention(held, rules, datetime.now(UTC), takes_last=force)
    steps = [
        PruneStep(DELETE, plan_deletion(store, fleet, name, force=True).mark, begun=True)
        for name in list_unfinished_deletions(store)
    ]
    being_pruned = {one.snapshot for one in open_removals(store) if one.kind == PRUNE}
    for verdict in reversed(verdicts):
        standing = standings[verdict.name]
        if verdict.fate is RetentionFate.DELETE:
            steps.append(PruneStep(DELETE, tombstone_of(store, fleet, standing)))
        elif standing.is_only_full and (verdict.name in being_pruned or _beyond_full(standing)):
            steps.append(PruneStep(PRUNE, _only_full_mark_of(store, standing), begun=True))
        elif verdict.fate is RetentionFate.ONLY_FULL:
            steps.append(PruneStep(PRUNE, _only_full_mark(standing)))
    problems = {name: one.problem for name, one in standings.items() if one.problem}
    return PrunePlan(rules, tuple(verdicts), tuple(steps), problems)


def only_full_of(mark: Mark, operation: str) -> Removal:
    """The removal of a chain's increments by an operation."""
    return Removal(PRUNE, structs.replace(mark, operation=operation), increments_of)


def increments_of(store: ObjectStore, snapshot: str) -> list[Listed]:
    """The objects of a chain that its full snapshot does not need: its increments, listed by them or not."""
    kept = read_commit(store, snapshot, 0).object_sizes
    folders = (f"snapshots/{snapshot}/increments", f"snapshots/{snapshot}/wal")
    return [one for folder in folders for one in store.inventory(folder) if one.key not in kept]


def _beyond_full(standing: SurveyedSnapshot) -> list[Listed]:
    """The same of what is known of the snapshot already."""
    kept = standing.chain.full.object_sizes if standing.chain else {}
    folders = tuple(f"snapshots/{standing.name}/{part}/" for part in ("increments", "wal"))
    return [one for one in standing.objects if one.key.startswith(folders) and one.key not in kept] if kept else []


def _only_full_mark(standing: SurveyedSnapshot) -> Mark:
    if standing.chain is None:
        raise RuntimeError("only what can be read is pruned")
    chain, going = standing.chain, _beyond_full(standing)
    return Mark(
        ONLY_FULL, standing.name, "", now_text(), own_label(PRUNE, standing.name), chain.full.chain,
        (slot_name(chain.full.chain),), tuple(identity.node for identity in chain.nodes), standing.points[1:],
        len(going), sum(one.size for one in going),
    )  # fmt: skip


def _only_full_mark_of(store: ObjectStore, standing: SurveyedSnapshot) -> Mark:
    """The mark of a pruning that was begun; what is left of it is counted anew."""
    going = _beyond_full(standing)
    try:
        mark = read_mark(store, only_full_key(standing.name))
    except ManifestError:
        mark = _only_full_mark(standing)
    return structs.replace(mark, objects=len(going), bytes=sum(one.size for one in going))
