"""`snapshot prune`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

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
from cutline.cli.output.failure import BUSY, DONE, REFUSED, UNREACHABLE
from cutline.cli.output.given_up import code_of_drop, drop_document, drop_text, dropped_document, dropped_lines
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import answer, emit
from cutline.cli.output.retention_rules import DEFAULT_NOTE, rules_document, rules_text
from cutline.cli.output.tables import Cell, FittingTable, Shorter, minute_text, quantity_text, size_text, time_text
from cutline.fleet.config import ALL, KeepCount
from cutline.fleet.messages import list_some
from cutline.fleet.units import Duration
from cutline.snapshots.operations.leases import SnapshotInUseError, in_use_error
from cutline.snapshots.records.operation_records import DELETE
from cutline.snapshots.removal.earlier_objects import DropResult
from cutline.snapshots.removal.pruning import PrunePlan, PruneResult, PruneStep, preview_prune, prune_store
from cutline.snapshots.removal.removing import RemovalResult
from cutline.snapshots.removal.retention import PointVerdict, RetentionFate, RetentionVerdict

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "cutline/prune/1"
NAMES_SHOWN_MAX = 10
LEFT_HINT = (
    "to remove what was left out, when the operation has ended or, if its process is gone, its lease has expired"
)
QUOTA_HINT = "prune deletes nothing because of a quota: keep less, release pins, or raise [retention] quota"
# The columns of the table of restore points that stay and that go.
DRAWN = ("snapshot", "increment", "cut made", "fate", "why")
LABELS = {RetentionFate.KEEP: "kept", RetentionFate.ONLY_FULL: "increments deleted", RetentionFate.DELETE: "deleted"}


# typer accepts no union of two types, so the options have the type Any, and their parsers check them.
def _count(what: str) -> Any:
    return typer.Option(parser=parse_keep_count, metavar="N|all", help=f"Keep {what}.")


def _newest_of_each(periods: str) -> Any:
    return _count(f"the newest restore point of each of the last N {periods} that have one")


def parse_keep_count(text: str) -> KeepCount:
    """Parse the value of an option that says how many to keep: a positive number, or `all`."""
    if text == ALL:
        return ALL
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"{text!r} is not a positive number or all")
    return int(text)


def parse_within(text: str) -> float:
    """Parse the value of --keep-within, in seconds."""
    try:
        seconds = float(Duration.parse(text))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if seconds <= 0:
        raise typer.BadParameter("every restore point is older than 0")
    return seconds


@or_in_background
def prune(
    context: typer.Context,
    *,
    keep_last: Annotated[Any, _count("the newest N snapshots with all their increments")] = None,
    keep_only_full: Annotated[Any, _count("the newest N full snapshots, without their increments")] = None,
    keep_within: Annotated[
        Any,
        typer.Option(
            parser=parse_within, metavar="AGE", help="Keep every restore point younger than this, such as 36h or 30d."
        ),
    ] = None,
    keep_hourly: Annotated[Any, _newest_of_each("hours")] = None,
    keep_daily: Annotated[Any, _newest_of_each("days")] = None,
    keep_weekly: Annotated[Any, _newest_of_each("ISO weeks")] = None,
    keep_monthly: Annotated[Any, _newest_of_each("months")] = None,
    keep_yearly: Annotated[Any, _newest_of_each("years")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also delete the last snapshot that can be restored.")] = False,
    yes: Yes = False,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Delete the snapshots and increments that no retention rule keeps.

    A restore point that is kept keeps its full snapshot and its whole chain. Hours, days, weeks, months and years are
    those of UTC. An option overrides the same rule of fleet.toml; without any rule, the default is
    --keep-last 2 --keep-daily 7 --keep-weekly 4 --keep-monthly 12. Pinned restore points (`snapshot keep`) always stay.
    A snapshot that a restore, repair or merge is reading is left out (exit code 7).
    """
    confirmation = require_confirmation(context, "prune", yes=yes or dry_run)
    fleet = command_context(context).load_fleet()
    given = {
        "last": keep_last,
        "only_full": keep_only_full,
        "within_seconds": keep_within,
        "hourly": keep_hourly,
        "daily": keep_daily,
        "weekly": keep_weekly,
        "monthly": keep_monthly,
        "yearly": keep_yearly,
    }
    rules = replace(fleet.retention, **{name: value for name, value in given.items() if value is not None})
    if dry_run:
        plan = preview_prune(fleet, rules, force=force)
        lines: list[str | RenderableType] = [*plan_lines(plan), *drawing_of(plan), "nothing was changed"]
        answer(context, plan_document(plan) | {"dry_run": True, "done": []}, lines)
        if plan.excess_bytes:
            raise typer.Exit(REFUSED)
        return
    if not confirmation.is_given:
        plan = preview_prune(fleet, rules, force=force)
        question = "" if plan.is_empty else "permanently delete these?"
        confirmation.ask(plan_lines(plan), question, losses=losses_of(plan))

    with leaving_metrics(context, fleet, "prune", metrics), with_hooks(context, fleet, "prune"):
        # Each removal is an operation, and the whole prune is another: the one that users see, wait for and cancel.
        with recorded_activity(context, fleet, "prune", begins_at_once=False) as recorded:

            def begin(plan: PrunePlan) -> None:
                confirmation.announce(plan_lines(plan), losses_of(plan))
                if not plan.is_empty:
                    recorded.begin()

            # Record what has been removed, even if the prune is stopped during the next removal.
            volumes = recorded.volumes = Counter(objects=0, bytes=0)

            def count(one: RemovalResult | DropResult) -> None:
                if isinstance(one, DropResult):
                    volumes.update(objects=one.total.objects, bytes=one.total.size_bytes)
                else:
                    volumes.update(objects=one.objects, bytes=one.bytes)

            pruned = prune_store(fleet, rules, recorded.activity, begin, force=force, ended=count)
            recorded.code = code_of_all(pruned)
            recorded.reason = _unfinished_text(pruned) or pruned.plan.quota_problem
        # With --quiet the plan was not printed.
        unseen = _warnings(pruned.plan) if command_context(context).quiet else []
        done = [*(f"warning: {text}" for text in unseen), *lines_of(pruned)]
        document = document_of(pruned)
        document["warnings"] = [*_warnings(pruned.plan), *recorded.warnings]
        emit(context, document, done, code=recorded.code)
        if recorded.code:
            raise typer.Exit(recorded.code)


def code_of_all(pruned: PruneResult) -> int:
    """Return the exit code of a prune."""
    codes = {code_of(result) for result in pruned.removed} | {code_of_drop(result) for result in pruned.dropped}
    codes |= {REFUSED} if pruned.plan.excess_bytes else set()
    # What the operator has to do something about is more important than what ends by itself.
    codes |= {BUSY} if pruned.left else set()
    codes -= {DONE}
    return UNREACHABLE if UNREACHABLE in codes else min(codes, default=DONE)


def _unfinished_text(pruned: PruneResult) -> str:
    left = [result.mark.snapshot for result in pruned.removed if not result.is_done]
    left += [result.plan.snapshot for result in pruned.dropped if result.refused]
    in_use = [str(error.details["snapshot"]) for error in pruned.left]
    texts = [f"unfinished: {list_some(left, NAMES_SHOWN_MAX)}"] if left else []
    texts += [f"left out, because in use: {list_some(in_use, NAMES_SHOWN_MAX)}"] if in_use else []
    return "; ".join(texts)


def plan_document(plan: PrunePlan) -> dict[str, Any]:
    """Return the plan as JSON. `fate` is keep, only-full or delete; `steps` are the removals, in order.

    `begins_at` is the merge at which a chain that is kept will begin, or null, and `given_up` is what then goes.
    `checked` is the check whose result applies to a snapshot; null if no such check is known. Each restore point in
    `points` stays for the reasons in `why`, or because `needed_by`, an increment, needs it, or with the rest of its
    chain. `quota` is null if no quota is set. `in_use` are the snapshots that are left out, because an operation is
    reading them: the details of the error that `delete` would end with, and its message.
    """
    quota = plan.rules.quota_bytes
    return {
        "schema": SCHEMA,
        "rules": rules_document(plan.rules) | {"default": plan.is_default},
        "snapshots": [_verdict_document(plan, verdict) for verdict in plan.verdicts],
        "steps": [_step_document(step) for step in plan.steps],
        "given_up": [drop_document(drop) for drop in plan.drops],
        "objects": plan.objects,
        "bytes": plan.bytes,
        "bytes_left": plan.left_bytes,
        "quota": None if quota is None else {"bytes": quota, "exceeded_by": plan.excess_bytes},
        "in_use": [_in_use_document(in_use_error(lease)) for lease in plan.in_use.values()],
        "warnings": _warnings(plan),
    }


def _in_use_document(error: SnapshotInUseError) -> dict[str, Any]:
    return {**error.details, "message": error.message}


def _warnings(plan: PrunePlan) -> list[str]:
    return [*plan.warnings, *([f"{plan.quota_problem}: {QUOTA_HINT}"] if plan.quota_problem else [])]


def _verdict_document(plan: PrunePlan, one: RetentionVerdict) -> dict[str, Any]:
    checked = plan.held[one.name].checked
    return {
        "name": one.name,
        "fate": one.fate.value,
        "begins_at": one.begins,
        "why": list(one.why),
        "problem": plan.problems.get(one.name, ""),
        "checked": checked.to_json() if checked else None,
        "points": [
            {
                "increment": point.increment,
                "cut_at": time_text(point.cut_at),
                "kept": point.is_kept,
                "why": list(point.why),
                "needed_by": point.needed_by,
            }
            for point in one.points
        ],
    }


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
        for step, result in zip(pruned.steps, pruned.removed, strict=True)
    ]
    results = {
        "done": done,
        "given_up": [dropped_document(result) for result in pruned.dropped],
        "in_use": [_in_use_document(error) for error in pruned.left],
    }
    return plan_document(pruned.plan) | {"dry_run": False, **results}


def plan_lines(plan: PrunePlan) -> list[str]:
    """Return the human-readable plan, shown before anything is changed."""
    lines = [f"rules: {rules_text(plan.rules)}{DEFAULT_NOTE if plan.is_default else ''}"]
    for step in plan.steps:
        if step.is_resumed:
            lines.append(
                f"{step.mark.snapshot}: finish the removal begun at {step.mark.at} by {requester_text(step.mark)}"
            )
    by_name = {step.mark.snapshot: step for step in plan.steps}
    drops = {drop.snapshot: drop for drop in plan.drops}
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
        if verdict.name in drops:
            lines.append(f"  given up: {drop_text(drops[verdict.name])}")
    lines += [f"warning: left out: {in_use_error(lease).message}" for lease in plan.in_use.values()]
    lines += [f"warning: {text}" for text in _warnings(plan)]
    if plan.is_empty:
        return [*lines, "nothing to prune"]
    what = f"{quantity_text(plan.objects, 'objects')} with commit files to delete"
    return [*lines, f"{what}, {size_text(plan.bytes)} to free"]


def drawing_of(plan: PrunePlan) -> list[FittingTable]:
    """Return a table of all restore points, newest snapshot first: what stays and why, and what goes.

    Neighbouring increments with the same fate share a row.
    """
    rows: list[tuple[Cell, ...]] = []
    for verdict in plan.verdicts:
        for number, run in enumerate(_runs(verdict.points)):
            first, last = run[0], run[-1]
            what = str(first.increment) if first is last else f"{first.increment}-{last.increment}"
            cut = minute_text(first.cut_at)
            cuts = cut if first is last else f"{cut} to {minute_text(last.cut_at)}"
            fate = "stays" if first.is_kept else "goes"
            rows.append(
                (
                    verdict.name if number == 0 else "",
                    what if first.increment or first is not last else "full",
                    Shorter(cuts, cut),
                    fate,
                    _why_text(run, verdict.fate),
                )
            )
    return [FittingTable(DRAWN, rows)] if rows else []


def _runs(points: Sequence[PointVerdict]) -> list[list[PointVerdict]]:
    """Group neighbouring restore points that have the same fate for the same reasons."""
    runs: list[list[PointVerdict]] = []
    for point in points:
        before = runs[-1][-1] if runs else None
        if before is not None and (before.why, before.needed_by, before.is_kept) == (
            point.why,
            point.needed_by,
            point.is_kept,
        ):
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _why_text(run: Sequence[PointVerdict], fate: RetentionFate) -> str:
    point = run[0]
    if point.why:
        return "; ".join(point.why)
    if point.needed_by is not None:
        return f"needed by increment {point.needed_by}"
    if point.is_kept:
        return "kept with its chain, which can't be cut"
    return "only the full snapshot is kept" if fate is RetentionFate.ONLY_FULL else "no rule keeps it"


def losses_of(plan: PrunePlan) -> list[str]:
    """Return the removals that need confirmation. Their reasons and the kept snapshots may change over time."""
    drops = [f"give up {drop.snapshot}: {drop_text(drop)}" for drop in plan.drops]
    return drops + [
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
    dropped = [f"{result.plan.snapshot}: {line}" for result in pruned.dropped for line in dropped_lines(result)]
    in_use = [f"warning: left out: {error.message}" for error in pruned.left]
    in_use += [f"{LEFT_HINT}: snapshot prune"] if in_use else []
    removed = [
        line
        for step, result in zip(pruned.steps, pruned.removed, strict=True)
        for line in removed_lines(
            result,
            f"{result.mark.snapshot} {'is deleted' if step.kind == DELETE else 'keeps only its full snapshot'}",
            "snapshot prune",
        )
    ]
    return [*dropped, *removed, *in_use]
