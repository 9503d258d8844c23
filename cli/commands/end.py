"""`snapshot end`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cutline.cli.output.arguments import DryRun, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.confirmation import Yes, require_confirmation
from cutline.cli.output.failure import DONE, UNREACHABLE
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.tables import size_text
from cutline.snapshots.records.proven_chains import check_name
from cutline.snapshots.removal.chain_end import EndPlan, EndResult, end_chain, preview_end

SCHEMA = "cutline/end/1"


def end(
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
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """End the chain of a snapshot, and keep its restore points.

    The snapshot gets no more increments, and its slots are dropped, so that no node retains WAL for it. Everything that
    is stored can still be restored and checked. Safe to repeat, for example when a node can be reached again.
    """
    confirmation = require_confirmation(context, "end", yes=yes or dry_run)
    fleet = command_context(context).load_fleet()
    check_name(name)
    if dry_run:
        plan = preview_end(fleet, name)
        answer(context, plan_document(plan) | {"dry_run": True}, [*plan_lines(plan), "nothing was changed"])
        return
    if not confirmation.is_given:
        plan = preview_end(fleet, name)
        confirmation.ask(plan_lines(plan), _question(plan), losses=losses_of(plan))
    with with_hooks(context, fleet, "end", name):
        with progress(context) as shown:
            result = end_chain(
                fleet, name, shown, lambda plan: confirmation.announce(plan_lines(plan), losses_of(plan))
            )
        code = UNREACHABLE if result.left else DONE
        emit(context, document_of(result), lines_of(result), code=code)
        if code:
            raise typer.Exit(code)


def _question(plan: EndPlan) -> str:
    return "" if _has_ended(plan) else f"end the chain of {plan.snapshot} for good?"


def _has_ended(plan: EndPlan) -> bool:
    return plan.marks.ended is not None or plan.marks.is_only_full


def plan_document(plan: EndPlan) -> dict[str, Any]:
    """Return the plan as JSON. `slots` are the chain's slots on the nodes that answered."""
    return {
        "schema": SCHEMA,
        "snapshot": plan.snapshot,
        "after_increment": plan.last,
        "slot": plan.slot,
        "slots": [
            {"node": one.node, "retained_bytes": one.size_bytes, "problem": one.problem} for one in plan.retained
        ],
        "not_asked": [{"node": node, "why": why} for node, why in plan.unanswered.items()],
        "ended_before": _has_ended(plan),
    }


def plan_lines(plan: EndPlan) -> list[str]:
    """Return the human-readable plan, shown before anything is changed."""
    last = f"increment {plan.last}" if plan.last else "the full snapshot"
    if plan.marks.is_only_full:
        lines = [f"{plan.snapshot}: its increments were pruned before"]
    elif plan.marks.ended:
        lines = [f"{plan.snapshot} {plan.marks.ended.text}"]
    else:
        lines = [f"end the chain of {plan.snapshot} after {last}: it gets no more increments; its restore points stay"]
    lines += [
        f"drop slot {plan.slot} on {one.node}, which retains {size_text(one.size_bytes)}"
        + (f" ({one.problem})" if one.problem else "")
        for one in plan.retained
    ]
    lines += [f"node {node}: its slots are not known: {why}" for node, why in plan.unanswered.items()]
    return lines


def losses_of(plan: EndPlan) -> list[str]:
    """Return the part of the plan that needs confirmation; how much WAL is retained changes all the time."""
    return [f"end {plan.snapshot} after {plan.last}"]


def document_of(result: EndResult) -> dict[str, Any]:
    """Return the command's JSON output: the plan, the chain's mark, and the nodes on which slots may remain."""
    return plan_document(result.plan) | {
        "dry_run": False,
        "ended": result.mark.details() if result.mark else None,
        "slots_left": result.left,
    }


def lines_of(result: EndResult) -> list[str]:
    """Return the human-readable output."""
    plan = result.plan
    lines = [f"{plan.snapshot} gets no more increments; to list its restore points: snapshot list {plan.snapshot}"]
    if dropped := [one.node for one in plan.retained if one.node not in result.left]:
        lines.append(f"slot {plan.slot} was dropped on {', '.join(dropped)}")
    if result.left:
        lines.append(
            f"warning: the slot may remain on {', '.join(result.left)}, which can't be reached: the next create drops"
            f" it, or repeat: snapshot end {plan.snapshot}"
        )
    return lines
