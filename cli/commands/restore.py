"""`snapshot restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output.arguments import DryRun, Groups, Increment, SnapshotName
from cli.output.context import command_context
from cli.output.format import count_text, seconds_text, size_text
from cli.output.left_out import left_out_lines
from cli.output.results import emit, progress
from cli.spark.on_demand import SparkOnDemand
from fleet.config import load_fleet
from fleet.hints import NEW_CHAIN
from fleet.progress import Noting
from fleet.record import to_builtins
from restore.plan import plan_restore
from restore.report import RestoreReport
from restore.request import RestoreRequest
from restore.restore import preview_restore, restore_fleet
from snapshots.listing.name_templates import newest_name

SCHEMA, PLAN_SCHEMA = "cutline/restore/1", "cutline/restore-plan/1"


def restore(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Restore into the fleet that this file describes.")
    ] = None,
    group: Groups = None,
    replace: Annotated[bool, typer.Option("--replace", help="Rename existing databases and keep them.")] = False,
    create_roles: Annotated[bool, typer.Option("--create-roles", help="Create missing roles, without login.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Restore the fleet's databases as they were at an increment."""
    source = command_context(context).load_fleet()
    target = load_fleet(to) if to else source
    name = newest_name(source, name)
    request = RestoreRequest(name, increment, tuple(group or ()), replace, create_roles)
    plan = plan_restore(source, target, request)
    if dry_run:
        with progress(context) as shown:
            lacking = preview_restore(plan, shown)
        report = plan.report()
        missing = sorted({f"{one.node.id}: {role}" for one in plan.targets for role in lacking[one.shard]})
        document = document_of(report) | {"schema": PLAN_SCHEMA, "roles_missing": missing}
        lines = [_label(report, "would be restored"), *left_out_lines(report.not_in_snapshot)]
        lines += [f"role would be created, without login, on {role}" for role in missing]
        lines += [one.text for one in report.open_operations]
        emit(context, document, [*lines, "every check passed; nothing was changed"])
        return
    with SparkOnDemand(source, f"restore {name}") as spark, progress(context) as shown:
        noting = Noting(shown)
        report = restore_fleet(plan, spark, noting)
    # With --quiet no progress has shown the notes.
    unseen = [f"warning: {text}" for text in noting.notes] if command_context(context).quiet else []
    emit(context, document_of(report) | {"warnings": noting.notes}, lines_of(report) + unseen)


def document_of(report: RestoreReport) -> dict[str, Any]:
    """The command's JSON."""
    return {
        "schema": SCHEMA,
        "snapshot": report.snapshot,
        "increment": report.increment,
        "operation": report.operation,
        "seconds": round(report.seconds, 3),
        "rows": report.rows,
        "bytes": report.bytes,
        "nodes": [
            {"node": n.node, "database": n.database, "rows": n.rows, "seconds": round(n.seconds, 3)}
            for n in report.nodes
        ],
        "aside": report.aside,
        "roles_created": report.roles_created,
        "left_out": report.left_out,
        "not_in_snapshot": to_builtins(report.not_in_snapshot),
        "slots_dropped": report.slots_dropped,
        "slots_left": report.slots_left,
        "open_operations": [one.to_json() for one in report.open_operations],
    }


def lines_of(report: RestoreReport) -> list[str]:
    """The output for people."""
    lines = [_label(report, "is restored") + f": {count_text(report.rows)} rows in {seconds_text(report.seconds)}"]
    lines += [f"{n.node}: database {n.database}, {count_text(n.rows)} rows" for n in report.nodes]
    lines += [f"previous database kept on {name}" for name in report.aside]
    lines += [f"role created, without login or password, on {name}" for name in report.roles_created]
    lines += [f"left out: {name}" for name in report.left_out]
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"slot dropped, its chain has ended, on {name}" for name in report.slots_dropped]
    lines += [f"warning: slot not dropped, drop it or it keeps WAL, on {name}" for name in report.slots_left]
    lines += [one.text for one in report.open_operations]
    if report.aside:
        lines.append(f"earlier snapshots of this fleet can get no more increments; {NEW_CHAIN}")
    return lines


def _label(report: RestoreReport, what: str) -> str:
    return f"{report.snapshot} at increment {report.increment} ({size_text(report.bytes)} stored) {what}"
