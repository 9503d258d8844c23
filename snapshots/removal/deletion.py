"""The `delete` command: plan the removal of a whole snapshot, and carry it out.

The plan shows what would be lost, and raises an error unless the snapshot may be deleted. removing.py does the removal.
A deletion that was interrupted after it stored its tombstone is resumed from the tombstone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.snapshots.operations.ended_operations import list_ended, read_batches
from cutline.snapshots.operations.leases import Lease, check_not_in_use, open_leases
from cutline.snapshots.operations.open_operations import document_names
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.operation_records import DELETE, DONE
from cutline.snapshots.records.pins import StoredPin, pins_in_force
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_name,
    find_place,
    listed_numbers,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import is_copy, read_identity
from cutline.snapshots.records.tombstones import Mark, is_deleted, read_mark, tombstone_key
from cutline.snapshots.removal.node_cleanup import hold_fleet, slots_left_behind, slots_of
from cutline.snapshots.removal.pinning import pinned_error
from cutline.snapshots.removal.removing import (
    Removal,
    RemovalResult,
    RemovalRun,
    mark_of,
    objects_of,
    open_removals,
    remove_recorded,
)
from cutline.snapshots.removal.survey import SizeTotal, SurveyedSnapshot, first_restorable, survey_snapshot
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError
from cutline.storage.store import ObjectStore


class LastSnapshotError(RefusedError):
    """The snapshot is the last restorable snapshot in the store."""


class SnapshotUnreadableError(RefusedError):
    """The snapshot can't be read, so the restore points that would be lost are unknown."""


class DeletionPlan(Struct, frozen=True):
    """The plan for a deletion.

    `surveyed` is None if the plan resumes an earlier deletion, whose mark is `mark`. `others` are the snapshots that
    remain. `is_of_copy`: the store is a copy, so no node has slots or publications for it. `left_behind` maps nodes of
    the chain to their servers that fleet.toml no longer names. `is_last_restorable`: none of the others can be
    restored, but this snapshot can. `pins` are the pins in force.
    """

    mark: Mark
    surveyed: SurveyedSnapshot | None
    others: tuple[str, ...]
    left_behind: Mapping[str, str]
    leases: tuple[Lease, ...] = ()
    is_last_restorable: bool = False
    pins: tuple[StoredPin, ...] = ()
    is_of_copy: bool = False

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier deletion has already stored its mark."""
        return self.surveyed is None

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that nodes may still have; if the chain has ended, the slot in the mark was already dropped."""
        return self.mark.slots if self.surveyed is None or self.surveyed.is_continuable else ()

    @property
    def drops_publications(self) -> bool:
        """Whether the publications will be dropped too, because no other snapshot needs them."""
        return not self.others and not self.is_of_copy


def plan_deletion(store: ObjectStore, fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan the deletion of the snapshot; raise unless it may be deleted."""
    others = tuple(snapshot_name for snapshot_name in snapshot_names(store) if snapshot_name != name)
    leases = tuple(lease for lease in open_leases(store, name) if lease.is_running(utc_now()))
    if _has_tombstone(store, name, force=force):
        mark = unfinished_mark(store, fleet, name)
        return DeletionPlan(
            mark, None, others, slots_left_behind(store, fleet, mark), leases, is_of_copy=is_copy(store)
        )
    surveyed = _survey(store, name, force=force)
    matters = surveyed.restorable > 0 or bool(surveyed.unreadable)
    is_only = matters and first_restorable(store, reversed(others)) is None
    pins = pins_in_force(store, name, utc_now())
    if not force:
        _check_deletable(surveyed, others, is_only=is_only)
        if pins:
            raise pinned_error(name, pins[0])
    mark, is_last = tombstone_of(store, fleet, surveyed), is_only and surveyed.restorable > 0
    left_behind = slots_left_behind(store, fleet, mark)
    return DeletionPlan(mark, surveyed, others, left_behind, leases, is_last, pins, is_copy(store))


def _survey(store: ObjectStore, name: str, *, force: bool) -> SurveyedSnapshot:
    """Survey the snapshot; raise SnapshotMissingError if it is missing.

    With `force`, a record that it existed is enough.
    """
    try:
        exists = find_place(store, name, 0).commit is not None or bool(listed_numbers(store, name))
    except ManifestError:
        exists = True
    if exists:
        return survey_snapshot(store, name)
    if force and (_was_committed(store, name) or (is_copy(store) and objects_of(store, name))):
        # The slots of the snapshot will be found in the records. A copy that did not finish has no commit yet.
        return SurveyedSnapshot(name, None, "", "", 0, SizeTotal.of(objects_of(store, name)), SizeTotal())
    raise SnapshotMissingError(
        f"there is no snapshot {name}", hint="see: snapshot list", details={"snapshot": name, "increment": 0}
    )


def _was_committed(store: ObjectStore, name: str) -> bool:
    documents = document_names(store)
    batches = read_batches(store, documents, list_ended(documents, has_intent=True))
    done = (ended for batch in batches for ended in batch if ended.outcome is not None and ended.outcome.state == DONE)
    return any((ended.kind, ended.snapshot) == ("create", name) for ended in done)


def _check_deletable(surveyed: SurveyedSnapshot, others: tuple[str, ...], *, is_only: bool) -> None:
    """Raise unless the snapshot may be deleted without --force; `is_only`: no other snapshot can be restored."""
    name = surveyed.name
    warning = ["after that, nothing can be restored any more"]
    if surveyed.unreadable:
        raise SnapshotUnreadableError(
            f"can't tell which restore points of snapshot {name} would be lost: {surveyed.unreadable}",
            hint=[
                "put the object back from a copy of the store, or delete the snapshot anyway:"
                f" snapshot delete {name} --force",
                *(warning if is_only else []),
            ],
            details={"snapshot": name, "problem": surveyed.unreadable},
        )
    if surveyed.restorable and is_only:
        raise LastSnapshotError(
            f"snapshot {name} is the last restorable snapshot",
            hint=[
                "take another snapshot first: snapshot create NAME   or delete this one anyway:"
                f" snapshot delete {name} --force",
                *warning,
            ],
            details={"snapshot": name, "others": list(others)},
        )


def tombstone_of(store: ObjectStore, fleet: Fleet, surveyed: SurveyedSnapshot) -> Mark:
    """Return the snapshot's tombstone, without the id of the operation that deletes it."""
    held = slots_of(store, fleet, surveyed)
    return mark_of(DELETE, surveyed, held, surveyed.points, surveyed.objects)


def unfinished_mark(store: ObjectStore, fleet: Fleet, name: str) -> Mark:
    """Return the tombstone of an unfinished deletion; if it can't be read, make it from the records of operations.

    Its counts are for the remaining objects.
    """
    left = objects_of(store, name)
    try:
        mark = read_mark(store, tombstone_key(name))
    except ManifestError:
        survey = SurveyedSnapshot(name, None, "", "", 0, SizeTotal.of(left), SizeTotal())
        return tombstone_of(store, fleet, survey)
    return structs.replace(mark, objects=len(left), bytes=sum(listed.size for listed in left))


def _has_tombstone(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot has a tombstone; raise ManifestError if it can't be read, unless `force` is set."""
    try:
        return is_deleted(store, name)
    except ManifestError:
        if not force:
            raise
        # The unreadable object stays, so the name can't be used again. The rest of the snapshot is deleted.
        return True


def is_finished(store: ObjectStore, name: str, *, force: bool) -> bool:
    """Whether the snapshot was deleted and nothing is left to do; raises ManifestError like `_has_tombstone`."""
    return (
        _has_tombstone(store, name, force=force)
        and not open_removals(store, name)
        and not any(store.exists(key) for key in store.list(f"snapshots/{name}"))
    )


def list_unfinished_deletions(store: ObjectStore) -> tuple[list[str], dict[str, str]]:
    """Return the deleted snapshots that may have left something behind in the store or on the nodes.

    Also return the snapshots whose tombstone can't be read, with the reasons; prune does not touch them.
    """
    deleted = {child.removesuffix(".json") for child in store.list_children("deleted")}
    unfinished = {*store.list_children("snapshots"), *(removal.snapshot for removal in open_removals(store))}
    names: list[str] = []
    unreadable: dict[str, str] = {}
    for name in sorted(deleted & unfinished):
        try:
            if is_deleted(store, name):
                names.append(name)
        except ManifestError as error:
            unreadable[name] = error.message
    return names, unreadable


class DeletionResult(Struct, frozen=True):
    """The result of a deletion; `removed` is None if nothing was left to do."""

    mark: Mark
    removed: RemovalResult | None


def preview_deletion(fleet: Fleet, name: str, *, force: bool) -> DeletionPlan:
    """Plan a deletion, contacting only the store; raises the errors of `delete`."""
    store = fleet.store.open()
    read_identity(store, fleet)
    return plan_deletion(store, fleet, check_name(name), force=force)


def delete_snapshot(
    fleet: Fleet, name: str, progress: Progress, announce: Callable[[DeletionPlan], None], *, force: bool
) -> DeletionResult:
    """Delete the snapshot, or resume an unfinished deletion; calls `announce` with the plan before removing anything.

    Raises SnapshotMissingError, LastSnapshotError, SnapshotUnreadableError, PinnedError, SnapshotInUseError.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    if is_finished(store, check_name(name), force=force):
        return DeletionResult(unfinished_mark(store, fleet, name), None)
    with hold_fleet(fleet, store, identity, (DELETE, name), progress) as nodes:
        return delete_locked(RemovalRun(fleet, store, nodes, progress, force), name, announce)


def delete_locked(run: RemovalRun, name: str, announce: Callable[[DeletionPlan], None]) -> DeletionResult:
    """Like `delete_snapshot`, but for a `run` that already holds the fleet's lock."""
    store = run.store
    run.progress.step("read snapshots")
    plan = plan_deletion(store, run.fleet, name, force=run.force)
    check_not_in_use(store, name)
    announce(plan)
    operation = new_operation(DELETE, name, 0, plan.mark.nodes)
    removal = snapshot_removal(plan.mark, operation.id, force=run.force)
    return DeletionResult(plan.mark, remove_recorded(store, operation, removal, run.nodes, run.progress))


def snapshot_removal(mark: Mark, operation: str, *, force: bool = False) -> Removal:
    """Return the removal of a whole snapshot by `operation`."""
    return Removal(DELETE, structs.replace(mark, operation=operation), objects_of, force)
