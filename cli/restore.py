"""`snapshot restore`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cli.arguments import DryRun, Groups, Increment, SnapshotName
from cli.context import command_context
from cli.format import count_text, seconds_text, size_text
from cli.left_out import left_out_lines
from cli.output import emit, progress
from cli.spark_session import SparkOnDemand
from fleet.config import load_fleet
from fleet.hints import NEW_CHAIN
from restore.restore import RestoreReport, RestoreRequest, check_restore, plan_restore, restore_fleet

SCHEMA, PLAN_SCHEMA = "cutline/restore/1", "cutline/restore-plan/1"


def restore(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Into the fleet that this fleet.toml has.")] = None,
    group: Groups = None,
    replace: Annotated[bool, typer.Option("--replace", help="Put existing databases aside, renamed.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Bring the fleet's databases back as they were at an increment."""
    source = command_context(context).load_fleet()
    target = load_fleet(to) if to else source
    request = RestoreRequest(name, increment, tuple(group or ()), replace)
    restoring = plan_restore(source, target, request)
    if dry_run:
        with progress(context) as shown:
            check_restore(restoring, shown)
        report = restoring.report
        document = document_of(report) | {"schema": PLAN_SCHEMA}
        lines = [_called(report, "would be restored"), *left_out_lines(report.not_in_snapshot)]
        emit(context, document, [*lines, "every check passed; nothing was changed"])
        return
    with SparkOnDemand(source, f"restore {name}") as spark, progress(context) as shown:
        report = restore_fleet(restoring, spark, shown)
    emit(context, document_of(report), lines_of(report))


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
        "left_out": report.left_out,
        "not_in_snapshot": [one.to_json() for one in report.not_in_snapshot],
        "slots_dropped": report.slots_dropped,
        "slots_left": report.slots_left,
    }


def lines_of(report: RestoreReport) -> list[str]:
    """What a person is told."""
    lines = [_called(report, "is restored") + f": {count_text(report.rows)} rows in {seconds_text(report.seconds)}"]
    lines += [f"{n.node}: database {n.database}, {count_text(n.rows)} rows" for n in report.nodes]
    lines += [f"put aside on {name}" for name in report.aside]
    lines += [f"left out: {name}" for name in report.left_out]
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"dropped, as its chain has ended: slot on {name}" for name in report.slots_dropped]
    lines += [f"warning: drop it, or it keeps WAL: slot on {name}" for name in report.slots_left]
    if report.aside:
        lines.append(f"earlier snapshots of this fleet get no more increments; {NEW_CHAIN}")
    return lines


def _called(report: RestoreReport, what: str) -> str:
    return f"{report.snapshot} at increment {report.increment} ({size_text(report.bytes)} stored) {what}"
