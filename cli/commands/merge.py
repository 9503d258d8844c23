"""`snapshot merge`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cutline.check.merge_proof import prove_merge
from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.confirmation import Confirmation, Yes, require_confirmation
from cutline.cli.output.failure import DONE
from cutline.cli.output.given_up import code_of_drop, drop_document, drop_text, dropped_document, dropped_lines
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import WARNING, answer, emit, progress, show_preview
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.snapshots.fold.amounts import amount_of_copies
from cutline.snapshots.merge.running import MergePlan, MergeReport, plan_merge, run_merge
from cutline.snapshots.operations.second_stores import read_uncopied
from cutline.snapshots.records.merge_records import Merge
from cutline.snapshots.removal.earlier_objects import (
    DropPlan,
    DropResult,
    drop_earlier_objects,
    plan_drop,
    preview_drop,
)
from cutline.snapshots.removal.pinning import check_none_pinned
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.store import ObjectStore

SCHEMA = "cutline/merge/1"


@or_in_background
def merge(
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
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="N", min=0, help="The increment at which to begin. Default: the newest."),
    ] = None,
    drop_earlier: Annotated[
        bool,
        typer.Option(
            "--drop-earlier",
            help="Then give up all restore points before this merge, and remove the objects that only they need.",
        ),
    ] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Make a full snapshot of an increment from the store alone, so that later restores begin there.

    The chain is folded to the increment, and a base of every copy is written. It is read back, and compared with the
    chain. Only then does the chain begin at the increment: restores and checks of it, and of later increments, no
    longer read what lies before. Earlier increments can still be restored, unless --drop-earlier removes what they
    need. Needs the store, but no node.

    Exit codes: 0 if the chain begins at the increment now, or did so before; 1 if the new base is not equal to the
    chain, or an object can't be read; 3 if there is nothing to merge. Except for 0, nothing was changed.
    """
    confirmation = require_confirmation(context, "merge", yes=yes or dry_run or not drop_earlier)
    fleet = command_context(context).load_fleet()
    with with_hooks(context, fleet, "merge", name, is_dry=dry_run):
        _merge(context, fleet, name, to, confirmation, drop_earlier=drop_earlier, dry_run=dry_run)


def _merge(
    context: typer.Context,
    fleet: Fleet,
    name: str,
    to: int | None,
    confirmation: Confirmation,
    *,
    drop_earlier: bool,
    dry_run: bool,
) -> None:
    with SparkOnDemand(fleet, f"merge {name}") as spark:
        if dry_run:
            with progress(context) as shown:
                plan = plan_merge(fleet, name, to, shown)
            lines, document = plan_lines(plan), plan_document(plan)
            if drop_earlier:
                drop = _plan_drop(fleet.store.open(), plan)
                what = "" if plan.existing else ", but for the objects that the merge carries"
                warnings = _uncopied_texts(fleet, drop)
                lines += [f"give up: {drop_text(drop)}{what}", *(f"{WARNING}{text}" for text in warnings)]
                document |= {"to_drop": drop_document(drop), "warnings": warnings}
            answer(context, document, [*lines, "nothing was changed"])
            return
        with activity(context, fleet, "merge", name) as shown:
            plan = plan_merge(fleet, name, to, shown)
            if drop_earlier:
                # Refuse before the work, rather than after it.
                check_none_pinned(fleet.store.open(), name, range(plan.increment))
            report = run_merge(fleet, plan, spark, shown, prove_merge)
    document, lines, code = document_of(report), lines_of(report), DONE
    if drop_earlier:
        dropped, warnings = _drop(context, fleet, report, confirmation)
        document |= {"dropped": dropped_document(dropped), "warnings": warnings}
        # With --quiet the plan was not printed.
        unseen = warnings if command_context(context).quiet else []
        lines += [*dropped_lines(dropped), *(f"{WARNING}{text}" for text in unseen)]
        code = code_of_drop(dropped)
    emit(context, document, lines, code=code)
    if code:
        raise typer.Exit(code)


def _drop(
    context: typer.Context, fleet: Fleet, report: MergeReport, confirmation: Confirmation
) -> tuple[DropResult, list[str]]:
    """Remove what lies before the merge, after a confirmation at a terminal; return the plan's warnings, too."""
    store, name, first = fleet.store.open(), report.merge.snapshot, report.merge.increment
    plan = plan_drop(store, name, first)
    warnings = _uncopied_texts(fleet, plan)
    lines = [f"remove: {drop_text(plan)}; they can't be restored any more", *(f"{WARNING}{text}" for text in warnings)]
    if confirmation.is_given:
        show_preview(context, lines)
    else:
        confirmation.ask(lines, f"permanently remove these from {name}?")
    with progress(context) as shown:
        # Much may have happened while the question was open.
        return drop_earlier_objects(store, plan_drop(store, name, first), shown), warnings


def _uncopied_texts(fleet: Fleet, plan: DropPlan) -> list[str]:
    """Return the warnings about second stores that lack what is removed."""
    return read_uncopied(fleet.store.open(), len(fleet.copies), {plan.snapshot: plan.points})


def _plan_drop(store: ObjectStore, plan: MergePlan) -> DropPlan:
    """Return what the merge lets go; before it is made, with the objects that it will carry."""
    name = plan.chain.name
    check_none_pinned(store, name, range(plan.increment))
    return plan_drop(store, name, plan.increment) if plan.existing else preview_drop(store, plan.chain)


def plan_document(plan: MergePlan) -> dict[str, Any]:
    """Return the JSON output of `--dry-run`."""
    chain = plan.chain
    return {
        "schema": SCHEMA,
        "dry_run": True,
        "snapshot": chain.name,
        "increment": plan.increment,
        "from_increment": chain.full.increment,
        "is_merged": plan.existing is not None,
        "later_merge": plan.later,
        "nodes": list(plan.nodes),
        "absent": sorted(chain.absent),
        **_read_of(plan),
    }


def _read_of(plan: MergePlan) -> dict[str, int]:
    segments = [segment for node in plan.nodes for segment in plan.chain.segments(node)]
    amount = amount_of_copies(plan.chain, plan.nodes)
    return {"segments": len(segments), "changes": sum(segment.changes for segment in segments), "rows": amount.rows}


def plan_lines(plan: MergePlan) -> list[str]:
    """Return the human-readable plan."""
    chain, number = plan.chain, plan.increment
    if plan.existing is not None:
        return [f"{_beginning(plan)} already: operation {plan.existing.operation}"]
    found = _read_of(plan)
    first = chain.full.increment
    base = f"the merge at increment {first}" if first else "the full snapshot"
    lines = [
        f"merge {chain.name} to increment {number}, from {base} on: {quantity_text(len(plan.nodes), 'copies')} with"
        f" {quantity_text(found['changes'], 'changes')} in {quantity_text(found['segments'], 'segments')}"
    ]
    if chain.absent:
        lines.append(f"carried as they are, because the increment leaves them out: {', '.join(sorted(chain.absent))}")
    if plan.later is not None:
        lines.append(f"increments from {plan.later} on begin with the merge there as before")
    return lines


def _beginning(plan: MergePlan) -> str:
    """Say which increments begin with the merge: all later ones, or those before the next merge."""
    name, number, later = plan.chain.name, plan.increment, plan.later
    if later is None:
        return f"{name} begins at increment {number}"
    subject = f"increment {number} of {name} begins"
    if later - number > 1:
        subject = f"increments {number} to {later - 1} of {name} begin"
    return f"{subject} with the merge at {number}, and later ones with that at {later}"


def document_of(report: MergeReport) -> dict[str, Any]:
    """Return the command's JSON output."""
    merge, counts = report.merge, _counts(report.merge)
    return {
        "schema": SCHEMA,
        "dry_run": False,
        "snapshot": merge.snapshot,
        "increment": merge.increment,
        "operation": report.operation,
        "is_new": report.is_new,
        "later_merge": report.plan.later,
        "seconds": round(report.seconds, 3),
        "rows": counts["rows"],
        "bytes": counts["bytes"],
        "objects": counts["objects"],
        "carried_objects": counts["carried_objects"],
        "carried_bytes": counts["carried_bytes"],
        "written_objects": counts["written_objects"],
        "written_bytes": counts["written_bytes"],
    }


def _counts(merge: Merge) -> dict[str, int]:
    """Return the counts of the merge, and what is left of its objects and bytes without those that were carried."""
    counts = merge.counts
    written = {f"written_{name}": counts[name] - counts[f"carried_{name}"] for name in ("objects", "bytes")}
    return {**counts, **written}


def lines_of(report: MergeReport) -> list[str]:
    """Return the human-readable output."""
    merge, counts = report.merge, _counts(report.merge)
    if not report.is_new:
        return [f"{_beginning(report.plan)} already: operation {report.operation}"]
    written, carried = (
        f"{quantity_text(counts[objects], 'objects')} ({size_text(counts[size])})"
        for objects, size in (("written_objects", "written_bytes"), ("carried_objects", "carried_bytes"))
    )
    return [
        f"{_beginning(report.plan)} now: {quantity_text(counts['rows'], 'rows')};"
        f" wrote {written}, carried {carried} from earlier base copies; {seconds_text(report.seconds)}",
        f"to check it: snapshot check {merge.snapshot} --increment {merge.increment}",
    ]
