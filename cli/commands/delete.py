"""`snapshot delete`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.output.arguments import DryRun
from cli.output.context import command_context
from cli.output.exit_codes import DONE, REFUSED, UNREACHABLE
from cli.output.format import count_text, size_text
from cli.output.results import emit, progress, show_preview
from fleet.label import read_label
from fleet.record import to_builtins
from snapshots.records.commits import check_name
from snapshots.records.tombstones import Mark
from snapshots.removal.deletion import DeletionPlan, DeletionResult, delete_snapshot, preview_deletion
from snapshots.removal.removal import RemovalResult

SCHEMA = "cutline/delete/1"
NEXT_INIT = "the next full snapshot needs the publications again: snapshot init   then: snapshot create NAME"


def delete(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The snapshot's name; no template.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Also the last snapshot that can be restored, or one that can't be read.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a snapshot with its increments, for good; its name is never used again. A repeat finishes it."""
    fleet = command_context(context).load_fleet()
    check_name(name)
    if dry_run:
        plan = preview_deletion(fleet, name, force=force)
        emit(context, plan_document(plan), [*plan_lines(plan), "nothing was changed"])
        return

    with progress(context) as shown:
        deletion = delete_snapshot(
            fleet, name, shown, lambda plan: show_preview(context, plan_lines(plan)), force=force
        )
    emit(context, document_of(deletion), lines_of(deletion))
    if deletion.removed and (code := code_of(deletion.removed)):
        raise typer.Exit(code)


def code_of(removed: RemovalResult) -> int:
    """How a command ends that has taken something away."""
    if removed.slots_left:
        return UNREACHABLE
    return DONE if removed.is_done else REFUSED


def document_of(deletion: DeletionResult) -> dict[str, Any]:
    """The command's JSON. `state` is deleted, unfinished, or already-deleted."""
    state = "already-deleted"
    if deletion.removed:
        state = "deleted" if deletion.removed.is_done else "unfinished"
    return {
        "schema": SCHEMA,
        "snapshot": deletion.mark.snapshot,
        "state": state,
        **mark_document(deletion.mark if deletion.removed is None else deletion.removed.mark),
        **removed_document(deletion.removed),
    }


def plan_document(plan: DeletionPlan) -> dict[str, Any]:
    """The same of `--dry-run`: what would be taken away. `state` is planned, or unfinished where it was begun."""
    return {
        "schema": SCHEMA,
        "snapshot": plan.mark.snapshot,
        "state": "unfinished" if plan.begun else "planned",
        **mark_document(plan.mark),
        "objects": plan.mark.objects,
        "bytes": plan.mark.bytes,
        "slots": list(plan.mark.slots),
        "nodes": list(plan.mark.nodes),
        "nodes_unknown": list(plan.unknown),
        "drops_publications": plan.drops_publications,
        "kept": list(plan.others),
        "problem": plan.standing.problem if plan.standing else "",
        "leases": [lease.details() for lease in plan.leases],
    }


def mark_document(mark: Mark) -> dict[str, Any]:
    """What is lost, and who said so and when."""
    return {
        "operation": mark.operation or None,
        "at": mark.at,
        "by": mark.by,
        "restore_points": [to_builtins(point) for point in mark.points],
    }


def removed_document(removed: RemovalResult | None) -> dict[str, Any]:
    """What was taken away, and what was not."""
    return {
        "objects": removed.objects if removed else 0,
        "bytes": removed.bytes if removed else 0,
        "slots_left": removed.slots_left if removed else [],
        "slots_unknown": removed.slots_unknown if removed else [],
        "refused": [{"object": key, "why": why} for key, why in (removed.refused.items() if removed else ())],
        "publications": removed.publications if removed else [],
        "publications_left": removed.publications_left if removed else [],
    }


def plan_lines(plan: DeletionPlan) -> list[str]:
    """What a person is told before anything is changed."""
    mark = plan.mark
    what = f"{count_text(mark.objects)} objects, {size_text(mark.bytes)}"
    if plan.begun:
        lines = [f"{mark.snapshot} was deleted at {mark.at} by {requester_text(mark)}; what is left of it: {what}"]
    else:
        lines = [f"{mark.snapshot} is deleted with all its restore points: {what}"]
        lines += point_lines(mark)
    if plan.standing and plan.standing.problem:
        lines.append(f"damaged: {plan.standing.problem}")
    lines += [f"slot {slot} is dropped on {', '.join(mark.nodes)}" for slot in mark.slots]
    if plan.drops_publications:
        lines.append("it is the last snapshot: the publications are dropped too")
    else:
        lines.append(f"kept: {', '.join(plan.others)}")
    lines.append(f"kept: the name {mark.snapshot}, which is never used again, and the records of operations")
    lines += [f"in use: operation {one.operation.id} restores it" for one in plan.leases]
    return lines


def point_lines(mark: Mark) -> list[str]:
    """The restore points that are lost."""
    return [
        f"lost: {f'increment {one.increment}' if one.increment else 'full snapshot'} of"
        f" {one.created_at[:19].replace('T', ' ')} UTC"
        for one in mark.points
    ]


def requester_text(mark: Mark) -> str:
    """Who put the mark."""
    found = read_label(mark.by)
    return f"{found.user}@{found.host}" if found else "somebody"


def lines_of(deletion: DeletionResult) -> list[str]:
    """What a person is told at the end."""
    mark = deletion.mark
    if deletion.removed is None:
        return [f"{mark.snapshot} was deleted at {mark.at} by {requester_text(mark)}; nothing is left of it"]
    return removed_lines(deletion.removed, f"{mark.snapshot} is deleted", f"snapshot delete {mark.snapshot}")


def removed_lines(removed: RemovalResult, what: str, again: str) -> list[str]:
    """What was taken away under one mark, and what was not."""
    freed = f"{count_text(removed.objects)} objects, {size_text(removed.bytes)} freed"
    lines = [f"{what}: {freed}"]
    lines += [f"publication dropped: {one}" for one in removed.publications]
    if removed.publications:
        lines.append(NEXT_INIT)
    lines += [f"warning: the store keeps {key}: {why}" for key, why in removed.refused.items()]
    lines += [f"warning: could not be asked to drop its slot: {one}" for one in removed.slots_left]
    lines += [f"warning: may not be dropped: {one}" for one in removed.publications_left]
    lines += [
        f"warning: fleet.toml does not name the node any more; if it is there, drop its slot by hand: {one}"
        for one in removed.slots_unknown
    ]
    if not removed.is_done:
        lines.append(f"not all of it is gone; repeat: {again}")
    return lines
