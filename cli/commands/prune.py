"""`snapshot prune`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.commands.delete import (
    code_of,
    mark_document,
    point_lines,
    removed_document,
    removed_lines,
    requester_text,
    slot_lines,
)
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.confirmation import Yes, require_confirmation
from cutline.cli.output.failure import DONE, UNREACHABLE
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import answer, emit
from cutline.cli.output.tables import quantity_text, size_text
from cutline.fleet.config import Retention
from cutline.fleet.messages import list_some
from cutline.fleet.units import DAYS_MAX
from cutline.snapshots.removal.deletion import DELETE, RemovalResult
from cutline.snapshots.removal.pruning import PrunePlan, PruneResult, PruneStep, preview_prune, prune_store
from cutline.snapshots.removal.retention import RetentionFate, RetentionVerdict

SCHEMA = "cutline/prune/1"
NAMES_SHOWN_MAX = 10
LABELS = {RetentionFate.KEEP: "kept", RetentionFate.ONLY_FULL: "increments deleted", RetentionFate.DELETE: "deleted"}


@or_in_background
def prune(
    context: typer.Context,
    *,
    keep_full: Annotated[int | None, typer.Option(min=1, metavar="N", help="Keep the newest N snapshots.")] = None,
    keep_days: Annotated[
        int | None,
        typer.Option(min=1, max=DAYS_MAX, metavar="D", help="Keep snapshots with a restore point younger than D days."),
    ] = None,
    keep_increments: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="Keep the increments of the newest K snapshots; for older snapshots, keep only the full one.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also delete the last snapshot that can be restored.")] = False,
    yes: Yes = False,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Delete the snapshots and increments that no retention rule keeps. Options override the rules of fleet.toml."""
    confirmation = require_confirmation(context, "prune", yes=yes or dry_run)
    fleet = command_context(context).load_fleet()
    rules = fleet.retention
    for name, value in (("keep_full", keep_full), ("keep_days", keep_days), ("keep_increments", keep_increments)):
        rules = rules if value is None else replace(rules, **{name: value})
    if dry_run:
        plan = preview_prune(fleet, rules, force=force)
        lines = [*plan_lines(plan), "nothing was changed"]
        answer(context, plan_document(plan) | {"dry_run": True, "done": []}, lines)
        return
    if not confirmation.is_given:
        plan = preview_prune(fleet, rules, force=force)
        question = "permanently delete these?" if plan.steps else ""
        confirmation.ask(plan_lines(plan), question, losses=losses_of(plan))

    with leaving_metrics(context, fleet, "prune", metrics), with_hooks(context, fleet, "prune"):
        # Each removal is an operation, and the whole prune is another: the one that users see, wait for and cancel.
        with recorded_activity(context, fleet, "prune", begins_at_once=False) as recorded:

            def begin(plan: PrunePlan) -> None:
                confirmation.announce(plan_lines(plan), losses_of(plan))
                if plan.steps:
                    recorded.begin()

            # Record what has been removed, even if the prune is stopped during the next removal.
            volumes = recorded.volumes = Counter(objects=0, bytes=0)

            def count(one: RemovalResult) -> None:
                volumes.update(objects=one.objects, bytes=one.bytes)

            pruned = prune_store(fleet, rules, recorded.activity, begin, force=force, ended=count)
            recorded.code = _code_of_all(pruned.removed)
            recorded.reason = _unfinished_text(pruned.removed)
        # With --quiet the plan was not printed.
        unseen = pruned.plan.warnings if command_context(context).quiet else []
        lines = [*(f"warning: {text}" for text in unseen), *lines_of(pruned)]
        document = document_of(pruned)
        document["warnings"] = [*pruned.plan.warnings, *recorded.warnings]
        emit(context, document, lines, code=recorded.code)
        if recorded.code:
            raise typer.Exit(recorded.code)


def _code_of_all(removed: Sequence[RemovalResult]) -> int:
    codes = {code_of(result) for result in removed} - {DONE}
    return UNREACHABLE if UNREACHABLE in codes else min(codes, default=DONE)


def _unfinished_text(removed: Sequence[RemovalResult]) -> str:
    left = [result.mark.snapshot for result in removed if not result.is_done]
    return f"unfinished: {list_some(left, NAMES_SHOWN_MAX)}" if left else ""


def plan_document(plan: PrunePlan) -> dict[str, Any]:
    """Return the plan as JSON. `fate` is keep, only-full or delete; `steps` are the removals, in order.

    `checked` is the check whose result applies to a snapshot; null if no such check is known.
    """
    return {
        "schema": SCHEMA,
        "rules": rules_document(plan.rules),
        "snapshots": [_verdict_document(plan, verdict) for verdict in plan.verdicts],
        "steps": [_step_document(step) for step in plan.steps],
        "objects": plan.objects,
        "bytes": plan.bytes,
        "warnings": plan.warnings,
    }


def _verdict_document(plan: PrunePlan, one: RetentionVerdict) -> dict[str, Any]:
    checked = plan.held[one.name].checked
    return {
        "name": one.name,
        "fate": one.fate.value,
        "why": list(one.why),
        "problem": plan.problems.get(one.name, ""),
        "checked": checked.to_json() if checked else None,
    }


def rules_document(rules: Retention) -> dict[str, int | None]:
    """Return the rules that were applied; a rule that is not set is null."""
    return {"keep_full": rules.keep_full, "keep_days": rules.keep_days, "keep_increments": rules.keep_increments}


def _step_document(step: PruneStep) -> dict[str, Any]:
    return {
        "snapshot": step.mark.snapshot,
        "kind": step.kind,
        "begun": step.is_resumed,
        **mark_document(step.mark),
        "objects": step.mark.objects,
        "bytes": step.mark.bytes,
        "slots": list(step.slots),
        "nodes": list(step.mark.nodes),
        "nodes_unknown": list(step.left_behind.values()),
    }


def document_of(pruned: PruneResult) -> dict[str, Any]:
    """Return the command's JSON output: the plan and its results."""
    done = [
        {
            "snapshot": result.mark.snapshot,
            "kind": step.kind,
            "state": "done" if result.is_done else "unfinished",
            **mark_document(result.mark),
            **removed_document(result),
        }
        for step, result in zip(pruned.plan.steps, pruned.removed, strict=True)
    ]
    return plan_document(pruned.plan) | {"dry_run": False, "done": done}


def plan_lines(plan: PrunePlan) -> list[str]:
    """Return the human-readable plan, shown before anything is changed."""
    lines: list[str] = []
    for step in plan.steps:
        if step.is_resumed:
            lines.append(
                f"{step.mark.snapshot}: finish the removal begun at {step.mark.at} by {requester_text(step.mark)}"
            )
    by_name = {step.mark.snapshot: step for step in plan.steps}
    for verdict in plan.verdicts:
        problem = plan.problems.get(verdict.name)
        why = "; ".join(verdict.why) + (f" ({problem}); see: snapshot check {verdict.name}" if problem else "")
        going = by_name.get(verdict.name)
        label = LABELS[verdict.fate]
        if verdict.fate is RetentionFate.ONLY_FULL and len(plan.held[verdict.name].points) == 1:
            label = "kept, chain ended"
        lines.append(f"{verdict.name}: {label}: {why}")
        if going and not going.is_resumed:
            lines += [f"  {line}" for line in point_lines(going.mark)]
            lines += [f"  {line}" for line in slot_lines(going.mark, going.slots, going.left_behind)]
    lines += [f"warning: {text}" for text in plan.warnings]
    if not plan.steps:
        return [*lines, "nothing to prune"]
    what = f"{quantity_text(plan.objects, 'objects')} with commit files to delete"
    return [*lines, f"{what}, {size_text(plan.bytes)} to free"]


def losses_of(plan: PrunePlan) -> list[str]:
    """Return the removals that need confirmation. Their reasons and the kept snapshots may change over time."""
    return [
        line
        for step in plan.steps
        for line in (
            f"{step.kind} {step.mark.snapshot}",
            *point_lines(step.mark),
            *slot_lines(step.mark, step.slots, step.left_behind),
        )
    ]


def lines_of(pruned: PruneResult) -> list[str]:
    """Return the human-readable output."""
    return [
        line
        for step, result in zip(pruned.plan.steps, pruned.removed, strict=True)
        for line in removed_lines(
            result,
            f"{result.mark.snapshot} {'is deleted' if step.kind == DELETE else 'keeps only its full snapshot'}",
            "snapshot prune",
        )
    ]
