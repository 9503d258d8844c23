"""`snapshot delete`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.confirmation import ConfirmationMissingError, Yes, require_confirmation
from cutline.cli.output.failure import DONE, REFUSED, UNREACHABLE
from cutline.cli.output.given_up import undeleted_lines
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.pinned import pin_document
from cutline.cli.output.results import answer, emit
from cutline.cli.output.tables import quantity_text, size_text
from cutline.fleet.own_process import read_label
from cutline.fleet.record import to_builtins
from cutline.snapshots.records.pins import pinned_text
from cutline.snapshots.records.proven_chains import check_name
from cutline.snapshots.records.tombstones import Mark
from cutline.snapshots.removal.deletion import DeletionPlan, DeletionResult, delete_snapshot, preview_deletion
from cutline.snapshots.removal.removing import RemovalResult
from cutline.storage.errors import RefusedError, SnapshotError

SCHEMA = "cutline/delete/1"
LAST_RESTORABLE = "warning: this is the last restorable snapshot: afterwards nothing can be restored"
# A chain that gets increments every five minutes has thousands of restore points.
POINTS_MAX, POINTS_AT_ENDS = 20, 3
NEXT_INIT = "before the next full snapshot, publish the tables again: snapshot init   then: snapshot create NAME"


@or_in_background
def delete(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_snapshots,
            help="The full name of the snapshot; templates are not accepted.",
        ),
    ],
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete it even if it is pinned, is the last snapshot that can be restored, or is unreadable.",
        ),
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a snapshot and all its increments permanently.

    The name can't be used again. To finish a deletion that was interrupted, repeat the command.
    """
    try:
        confirmation = require_confirmation(context, "delete", yes=yes or dry_run)
    except ConfirmationMissingError:
        _check_refusal(context, name, force=force)
        raise
    fleet = command_context(context).load_fleet()
    check_name(name)
    if dry_run:
        plan = preview_deletion(fleet, name, force=force)
        answer(context, plan_document(plan), [*plan_lines(plan), "nothing was changed"])
        return
    if not confirmation.is_given:
        plan = preview_deletion(fleet, name, force=force)
        is_empty = plan.is_resumed and not plan.mark.objects
        confirmation.ask(plan_lines(plan), "" if is_empty else f"permanently delete {name}?", losses=losses_of(plan))

    with with_hooks(context, fleet, "delete", name):
        with activity(context, fleet, "delete") as shown:
            deletion = delete_snapshot(
                fleet, name, shown, lambda plan: confirmation.announce(plan_lines(plan), losses_of(plan)), force=force
            )
        code = code_of(deletion.removed) if deletion.removed else DONE
        emit(context, document_of(deletion), lines_of(deletion), code=code)
        if code:
            raise typer.Exit(code)


def _check_refusal(context: typer.Context, name: str, *, force: bool) -> None:
    """Raise the refusal that the command would meet with --yes, as far as the store alone shows it."""
    try:
        preview_deletion(command_context(context).load_fleet(), name, force=force)
    except RefusedError:
        raise
    except SnapshotError:
        # The missing --yes is reported instead.
        return


def code_of(removed: RemovalResult) -> int:
    """Return the exit code of a removal."""
    if removed.slots_left:
        return UNREACHABLE
    return DONE if removed.is_done else REFUSED


def document_of(deletion: DeletionResult) -> dict[str, Any]:
    """Return the command's JSON output. `state` is deleted, unfinished, or already-deleted."""
    state = "already-deleted"
    if deletion.removed:
        state = "deleted" if deletion.removed.is_done else "unfinished"
    return {
        "schema": SCHEMA,
        "dry_run": False,
        "snapshot": deletion.mark.snapshot,
        "state": state,
        **mark_document(deletion.mark if deletion.removed is None else deletion.removed.mark),
        **removed_document(deletion.removed),
    }


def plan_document(plan: DeletionPlan) -> dict[str, Any]:
    """Return the JSON output of `--dry-run`. `state` is planned, or unfinished if the deletion had already started."""
    return {
        "schema": SCHEMA,
        "dry_run": True,
        "snapshot": plan.mark.snapshot,
        "state": "unfinished" if plan.is_resumed else "planned",
        **mark_document(plan.mark),
        "objects": plan.mark.objects,
        "bytes": plan.mark.bytes,
        "slots": list(plan.slots),
        "nodes": list(plan.mark.nodes),
        "nodes_unknown": list(plan.left_behind.values()),
        "drops_publications": plan.drops_publications,
        "kept": list(plan.others),
        "problem": plan.surveyed.problem if plan.surveyed else "",
        "pins": [pin_document(pin) for pin in plan.pins],
        "leases": [lease.details() for lease in plan.leases],
    }


def mark_document(mark: Mark) -> dict[str, Any]:
    """Return the restore points that a removal deletes, the time of the request, and the user who made it."""
    return {
        "operation": mark.operation or None,
        "at": mark.at,
        "by": mark.by,
        "restore_points": [to_builtins(point) for point in mark.points],
    }


def removed_document(removed: RemovalResult | None) -> dict[str, Any]:
    """Return the removed objects, and those that could not be removed."""
    return {
        "objects": removed.objects if removed else 0,
        "bytes": removed.bytes if removed else 0,
        "slots_left": removed.slots_left if removed else [],
        "slots_unknown": removed.slots_unknown if removed else [],
        "slots_foreign": removed.slots_foreign if removed else [],
        "refused": [{"object": key, "why": why} for key, why in (removed.refused.items() if removed else ())],
        "publications": removed.publications if removed else [],
        "publications_left": removed.publications_left if removed else [],
    }


def plan_lines(plan: DeletionPlan) -> list[str]:
    """Return the human-readable plan, shown before anything is changed."""
    mark = plan.mark
    what = f"{quantity_text(mark.objects, 'objects')} with commit files, {size_text(mark.bytes)}"
    if plan.is_resumed:
        lines = [f"{mark.snapshot} was deleted at {mark.at} by {requester_text(mark)}; still in the store: {what}"]
    else:
        lines = [f"delete {mark.snapshot} with all its restore points: {what}"]
        lines += point_lines(mark)
    if plan.is_last_restorable:
        lines.append(LAST_RESTORABLE)
    lines += [f"warning: {pinned_text(mark.snapshot, pin)}" for pin in plan.pins]
    if plan.surveyed and plan.surveyed.problem:
        lines.append(f"damaged: {plan.surveyed.problem}")
    lines += slot_lines(mark, plan.slots, plan.left_behind)
    if plan.drops_publications:
        lines.append("drop the publications: this is the last snapshot")
    else:
        lines.append(f"keep {', '.join(plan.others)}")
    lines.append(f"keep the records of operations, and the name {mark.snapshot}, which can't be used again")
    lines += [f"in use: in operation {lease.operation.id}, it is being {lease.what}" for lease in plan.leases]
    return lines


def losses_of(plan: DeletionPlan) -> list[str]:
    """Return the plan's lines that need confirmation: all except those that a new snapshot can change."""
    return [line for line in plan_lines(plan) if not line.startswith("keep ") and line != LAST_RESTORABLE]


def slot_lines(mark: Mark, slots: Iterable[str], left_behind: Mapping[str, str]) -> list[str]:
    """Return the lines that say where slots will be dropped, and where they will stay."""
    lines: list[str] = []
    for slot in slots:
        if nodes := [node for node in mark.nodes if node not in left_behind]:
            lines.append(f"drop slot {slot} on {', '.join(nodes)}")
        if left_behind:
            lines.append(
                f"leave slot {slot} on {', '.join(left_behind.values())}: fleet.toml no longer names that server"
            )
    return lines


def point_lines(mark: Mark) -> list[str]:
    """Return the restore points that will be lost, one per line; of many, only the first and the last ones."""
    lines = [
        f"lost: {f'increment {point.increment}' if point.increment else 'full snapshot'} of"
        f" {point.cut_at[:19].replace('T', ' ')} UTC"
        for point in mark.points
    ]
    if len(lines) <= POINTS_MAX:
        return lines
    between = f"lost: {len(lines) - 2 * POINTS_AT_ENDS:,} restore points between these"
    return [*lines[:POINTS_AT_ENDS], between, *lines[-POINTS_AT_ENDS:]]


def requester_text(mark: Mark) -> str:
    """Return who requested the deletion."""
    label = read_label(mark.by)
    return f"{label.user}@{label.host}" if label else "an unknown user"


def lines_of(deletion: DeletionResult) -> list[str]:
    """Return the human-readable output."""
    mark = deletion.mark
    if deletion.removed is None:
        who = requester_text(mark)
        return [f"{mark.snapshot} was deleted at {mark.at} by {who}; nothing of it is left in the store"]
    return removed_lines(deletion.removed, f"{mark.snapshot} is deleted", f"snapshot delete {mark.snapshot}")


def removed_lines(removed: RemovalResult, what: str, again: str) -> list[str]:
    """Describe the objects removed under one mark, and those that could not be removed."""
    freed = f"{quantity_text(removed.objects, 'objects')}, {size_text(removed.bytes)} freed"
    lines = [f"{what}: {freed}"]
    lines += [f"publication dropped: {publication}" for publication in removed.publications]
    if removed.publications:
        lines.append(NEXT_INIT)
    lines += undeleted_lines(removed.refused)
    lines += [f"warning: slot not dropped, the node is unreachable: {one}" for one in removed.slots_left]
    lines += [f"warning: publication not dropped: {one}" for one in removed.publications_left]
    lines += [
        f"warning: fleet.toml no longer names the server of slot {one}; if it still exists, run in its database:"
        f" SELECT pg_drop_replication_slot('{one.partition(' on ')[0]}');"
        for one in removed.slots_unknown
    ]
    lines += [
        f"warning: slot not dropped, because no create of this snapshot is known to have created it: {one}"
        for one in removed.slots_foreign
    ]
    if not removed.is_done:
        lines.append(f"not everything was deleted; to retry: {again}")
    return lines
