"""`snapshot repair`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.confirmation import Confirmation, Yes, require_confirmation
from cutline.cli.output.failure import CONFLICTS, DONE
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import answer, emit, progress, show_preview
from cutline.cli.output.tables import quantity_text, seconds_text
from cutline.fleet.config import Fleet
from cutline.snapshots.records.proven_chains import check_name
from cutline.snapshots.repair.planning import (
    RepairPlan,
    RepairRequest,
    RepairStep,
    Unrepairable,
    plan_repair,
    step_line,
)
from cutline.snapshots.repair.running import RepairReport, run_repair, settle_repairs
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import RefusedError, StoppedError

SCHEMA = "cutline/repair/1"
NOT_READ = (
    "only the listing and the named objects were examined: to find other damage, omit --metadata-only and --object"
)
SHOWN_MAX = 20


class NothingRepairableError(RefusedError):
    """Objects of the snapshot are damaged, and none of them can be repaired."""


@or_in_background
def repair(
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
    other: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="A copy of the store, such as s3://bucket/folder, or the fleet file that names it. Objects that it has"
            " with the right bytes are taken from there.",
        ),
    ] = None,
    objects: Annotated[
        list[str] | None,
        typer.Option(
            "--object",
            metavar="KEY",
            help="Read only this object instead of all; may be repeated. Missing objects are found in any case.",
        ),
    ] = None,
    metadata_only: Annotated[
        bool,
        typer.Option(
            "--metadata-only", help="Read no objects: repair only those that are missing or have the wrong size."
        ),
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Replace damaged or missing objects of a snapshot.

    They are rebuilt from the copy of another node of the shard, or taken from a copy of the store. Nothing is
    overwritten, and nothing is rebuilt from a copy that can't be trusted itself. Needs the store, but no node.

    Exit codes: 0 if nothing that was read is damaged any more, 1 if damaged objects remain, 3 if none of them could be
    repaired.
    """
    confirmation = require_confirmation(context, "repair", yes=yes or dry_run)
    fleet = command_context(context).load_fleet()
    check_name(name)
    request = RepairRequest(name, other, tuple(objects or ()), metadata_only)
    with with_hooks(context, fleet, "repair", name, is_dry=dry_run):
        with SparkOnDemand(fleet, f"repair {name}") as spark:
            with progress(context) as shown:
                if not dry_run:
                    settle_repairs(fleet, name, shown)
                plan = plan_repair(fleet, request, spark, shown)
            is_vain = plan.is_empty and bool(plan.unrepairable)
            if dry_run and not is_vain:
                answer(context, plan_document(plan), [*plan_lines(plan), "nothing was changed"])
                raise typer.Exit(CONFLICTS if plan.unrepairable else DONE)
            if is_vain:
                if dry_run and not command_context(context).json:
                    answer(context, {}, plan_lines(plan))
                raise _nothing_repairable_error(name, plan.unrepairable)
            report = _confirm_and_run(context, fleet, plan, spark, confirmation)
            if report.unrepaired and not report.objects:
                # Some reasons are found only once the rows of both copies are compared.
                raise _nothing_repairable_error(name, report.unrepaired)
            earlier: list[RepairReport] = []
            while report.plan.commits and report.put_back:
                # Only now that the commits are back can the damage of their objects be seen.
                earlier.append(report)
                plan = _plan_rest(context, fleet, request, spark, earlier)
                report = _confirm_and_run(context, fleet, plan, spark, confirmation)
        code = CONFLICTS if report.unrepaired else DONE
        emit(context, document_of(report, earlier), lines_of(report, earlier), code=code)
        raise typer.Exit(code)


def _plan_rest(
    context: typer.Context, fleet: Fleet, request: RepairRequest, spark: SparkOnDemand, earlier: list[RepairReport]
) -> RepairPlan:
    """Plan the repair of all other damage, after the `earlier` reports' commit files were put back."""
    try:
        with progress(context) as shown:
            return plan_repair(fleet, request, spark, shown)
    except KeyboardInterrupt as interrupt:
        keys = [key for one in earlier for key in one.put_back]
        raise StoppedError(
            f"{quantity_text(len(keys), 'commit files')} of {request.name} put back, and nothing else repaired",
            hint="to repair the rest, repeat the command",
            details={"snapshot": request.name, "put_back": keys},
        ) from interrupt


def _confirm_and_run(
    context: typer.Context, fleet: Fleet, plan: RepairPlan, spark: SparkOnDemand, confirmation: Confirmation
) -> RepairReport:
    """Show the plan, ask for confirmation unless it is given, and run it."""
    if confirmation.is_given:
        show_preview(context, plan_lines(plan))
    else:
        confirmation.ask(plan_lines(plan), "" if plan.is_empty else f"repair {plan.request.name}?")
    return _run(context, fleet, plan, spark)


def _run(context: typer.Context, fleet: Fleet, plan: RepairPlan, spark: SparkOnDemand) -> RepairReport:
    if plan.is_empty:
        return RepairReport(plan, "", unrepaired=list(plan.unrepairable))
    with activity(context, fleet, "repair", plan.request.name) as shown:
        return run_repair(fleet, plan, spark, shown)


def _nothing_repairable_error(name: str, unrepairable: Sequence[Unrepairable]) -> NothingRepairableError:
    """Return the error for a snapshot with damaged objects, of which none can be repaired."""
    first = unrepairable[0]
    more = len(unrepairable) - 1
    others = f" (and {quantity_text(more, 'other objects')})" if more else ""
    return NothingRepairableError(
        f"object {first.key}{others} can't be repaired: {first.why}; nothing was changed",
        hint="if a copy of the store has these objects, name it: --from URL   (to see what can still be restored:"
        f" snapshot restore {name} --dry-run)",
        details={"snapshot": name, "unrepairable": _unrepairable_documents(unrepairable)},
    )


def plan_lines(plan: RepairPlan) -> list[str]:
    """Return the human-readable plan, shown before anything is changed."""
    url = plan.other.url if plan.other else ""
    lines = [f"damaged: object {one.key} of {one.node}: {one.detail}" for one in plan.damages[:SHOWN_MAX]]
    if len(plan.damages) > SHOWN_MAX:
        lines.append(f"… {len(plan.damages) - SHOWN_MAX:,} more damaged objects; --json lists all of them")
    lines += [f"put back the commit file of {one.what} from {url}: {one.key}" for one in plan.commits]
    lines += [step_line(step, url) for step in plan.steps]
    lines += [f"can't be repaired: object {one.key}: {one.why}" for one in plan.unrepairable]
    if plan.commits:
        lines.append("other damage can be found only once the commit files are back: another plan follows")
    elif not plan.damages:
        lines.append(f"no damaged object was found in {plan.request.name}")
    if not plan.read_all:
        lines.append(NOT_READ)
    return lines


def plan_document(plan: RepairPlan) -> dict[str, Any]:
    """Return the JSON output of `--dry-run`."""
    return {
        "schema": SCHEMA,
        "dry_run": True,
        "snapshot": plan.request.name,
        "operation": None,
        "repair": None,
        **_damage_documents(plan),
        "put_back": [],
        "replaced": [],
        "unrepaired": _unrepairable_documents(plan.unrepairable),
        "seconds": 0.0,
    }


def document_of(report: RepairReport, earlier: Iterable[RepairReport] = ()) -> dict[str, Any]:
    """Return the command's JSON output; `earlier` are the reports of the plans that put commit files back."""
    earlier = list(earlier)
    return {
        "schema": SCHEMA,
        "dry_run": False,
        "snapshot": report.plan.request.name,
        "operation": next((one.operation for one in (report, *reversed(earlier)) if one.operation), None),
        "repair": report.number,
        **_damage_documents(report.plan),
        "commits": [commit.key for one in (*earlier, report) for commit in one.plan.commits],
        "put_back": [key for one in (*earlier, report) for key in one.put_back],
        "replaced": [
            {
                "node": one.node,
                "increment": one.increment,
                "from_copy": one.copy or None,
                "objects": [{"object": old.key, "kind": old.damage} for old in one.replaced],
                "by": [new.key for new in one.new],
            }
            for one in report.replaced
        ],
        "unrepaired": _unrepairable_documents(report.unrepaired),
        "seconds": round(sum(one.seconds for one in (*earlier, report)), 3),
    }


def _damage_documents(plan: RepairPlan) -> dict[str, Any]:
    return {
        "read_all": plan.read_all,
        "damaged": [
            {"object": one.key, "node": one.node, "kind": one.kind, "detail": one.detail} for one in plan.damages
        ],
        "steps": [_step_document(step) for step in plan.steps],
        "commits": [one.key for one in plan.commits],
        "from": plan.other.url if plan.other else None,
    }


def _step_document(step: RepairStep) -> dict[str, Any]:
    return {
        "method": step.method.value,
        "node": step.node,
        "increment": step.increment,
        "from_copy": step.copy or None,
        "objects": [one.key for one in step.damages],
    }


def _unrepairable_documents(unrepairable: Iterable[Unrepairable]) -> list[dict[str, str]]:
    return [{"object": one.key, "why": one.why} for one in unrepairable]


def lines_of(report: RepairReport, earlier: Iterable[RepairReport] = ()) -> list[str]:
    """Return the human-readable output; `earlier` are the reports of the plans that put commit files back."""
    name, earlier = report.plan.request.name, list(earlier)
    seconds = sum(one.seconds for one in (*earlier, report))
    lines = [f"put back: {key}" for one in (*earlier, report) for key in one.put_back]
    for one in report.replaced:
        source = f"rebuilt from the copy of {one.copy}" if one.copy else "taken from the other store"
        old, new = quantity_text(len(one.replaced), "objects"), quantity_text(len(one.new), "objects")
        lines.append(f"replaced {old} of {one.node} by {new}, {source}")
    lines += [f"warning: still damaged: object {one.key}: {one.why}" for one in report.unrepaired]
    if (report.objects or earlier) and report.unrepaired:
        again = f"what was replaced may help to repair the rest: snapshot repair {name}"
        lines.append(f"{name} is repaired in part{f'; {again}' if report.objects else ''}")
        if report.plan.request.other is None:
            lines.append(f"if another store has a copy of {name}: snapshot repair {name} --from URL")
    elif (report.objects or earlier) and not report.plan.read_all:
        lines += [f"what was found in {name} is repaired in {seconds_text(seconds)}", NOT_READ]
    elif report.objects or earlier:
        lines.append(f"{name} is repaired in {seconds_text(seconds)}; to compare its copies: snapshot check {name}")
    else:
        lines.append(f"nothing in {name} was repaired")
    return lines
