"""`snapshot restore`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output.arguments import DryRun, Groups, Increment, SnapshotName
from cli.output.context import command_context
from cli.output.format import count_text, seconds_text, size_text
from cli.output.left_out import left_out_lines
from cli.output.results import emit, progress
from cli.spark.on_demand import SparkOnDemand
from cli.spark.protection import check_protection
from fleet.config import load_fleet
from fleet.hints import NEW_CHAIN
from fleet.progress import Noting
from fleet.record import to_builtins
from restore.plan import plan_restore
from restore.report import RestoreReport
from restore.request import RestoreRequest
from restore.restore import preview_restore, restore_fleet
from snapshots.listing.name_templates import newest_name

SLOT_NAME = re.compile(r"cutline_[a-z0-9_]+")
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
    check_protection(source.spark_master, source.spark_settings)
    target = load_fleet(to) if to else source
    name = newest_name(source, name)
    request = RestoreRequest(name, increment, tuple(group or ()), replace, create_roles)
    plan = plan_restore(source, target, request)
    if dry_run:
        with progress(context) as shown:
            preview = preview_restore(plan, shown)
        report = plan.report()
        report.left_out = preview.left_out
        lacking = preview.roles_missing
        missing = sorted({f"{one.node.id}: {role}" for one in plan.targets for role in lacking[one.shard]})
        document = document_of(report) | {"schema": PLAN_SCHEMA, "roles_missing": missing}
        document["ddl_not_tried"] = preview.untried
        lines = [_label(report, "would be restored"), *(f"left out: {name}" for name in report.left_out)]
        lines += left_out_lines(report.not_in_snapshot)
        lines += [f"role would be created, without login, on {role}" for role in missing]
        lines += [one.text for one in report.open_operations]
        if preview.untried:
            where = ", ".join(preview.untried)
            lines.append(f"not tried, as the role is not a superuser: the DDL on {where}; the restore tries it first")
        emit(context, document, [*lines, f"every {'other ' * bool(preview.untried)}check passed; nothing was changed"])
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
        "owner_changes": to_builtins(report.owner_changes),
        "open_operations": [one.to_json() for one in report.open_operations],
    }


def lines_of(report: RestoreReport) -> list[str]:
    """The output for people."""
    lines = [_label(report, "is restored") + f": {count_text(report.rows)} rows in {seconds_text(report.seconds)}"]
    lines += [f"{n.node}: database {n.database}, {count_text(n.rows)} rows" for n in report.nodes]
    lines += [f"previous database kept on {name}" for name in report.aside]
    for one in report.owner_changes:
        lines.append(
            f"{one.node}: database {one.database} belongs to {one.owner}, the previous one to {one.previous};"
            f" to give it back, run on {one.node}:"
        )
        lines.append(one.statement)
    lines += [f"role created, without login or password, on {name}" for name in report.roles_created]
    lines += [f"left out: {name}" for name in report.left_out]
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"slot dropped, its chain has ended, on {name}" for name in report.slots_dropped]
    lines += [line for name in report.slots_left for line in _slot_left_lines(name)]
    lines += [one.text for one in report.open_operations]
    if report.aside:
        lines.append(f"earlier snapshots of this fleet can get no more increments; {NEW_CHAIN}")
    return lines


def _slot_left_lines(name: str) -> list[str]:
    """The lines on a slot, `node: slot`, that was not dropped, with the statement that drops it."""
    line = f"warning: slot not dropped, it keeps WAL until it is, on {name}"
    node, _, slot = name.rpartition(": ")
    if not SLOT_NAME.fullmatch(slot):
        # The node was not reachable, so the slots have no names here.
        return [f"{line}; to drop them, drop that database if it is not needed"]
    return [f"{line}; to drop it, run as a superuser on {node}:", f"SELECT pg_drop_replication_slot('{slot}');"]


def _label(report: RestoreReport, what: str) -> str:
    return f"{report.snapshot} at increment {report.increment} ({size_text(report.bytes)} stored) {what}"
