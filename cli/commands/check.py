"""`snapshot check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cutline.check.named_rows import ROWS_DIFFER
from cutline.check.report import CheckReport, Conflict, DifferentRow, SnapshotReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import Increment, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.junit import junit_of, reporting_errors, write_report
from cutline.cli.output.left_out import warning_lines
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import WARNING, emit
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.records.operation_records import CONFLICTS, ONE_COPY, CheckedPoint, CheckResult
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import UsageError

CONFLICTS_SHOWN_MAX, ROWS_MAX = 20, 1000
HOW_TO_NAME_ROWS = "to see rows that differ, and what each copy has of them: snapshot check NAME --rows 20"
WHAT_TO_DO = (
    "a restore refuses damaged or missing objects, and names the increments that it can restore instead;"
    " to get a snapshot without conflicts, fix their cause, then take a new full snapshot: snapshot create NAME"
)


@or_in_background
def check(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_snapshots,
            help="The snapshot, or a template. Default: all snapshots.",
        ),
    ] = None,
    *,
    increment: Increment = None,
    metadata_only: Annotated[
        bool,
        typer.Option(
            "--metadata-only",
            help="Check only commits and object sizes. The result is at best inconclusive (exit code 4).",
        ),
    ] = False,
    rows: Annotated[
        int,
        typer.Option(
            min=0,
            max=ROWS_MAX,
            metavar="K",
            help="For each partition that differs between copies, name up to K rows, and show what each copy has.",
        ),
    ] = 0,
    junit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a JUnit report to FILE; it contains an <error> if the check itself fails."
        ),
    ] = None,
    metrics: MetricsFile = None,
) -> None:
    """Read snapshots back from the store and verify that they are complete and consistent.

    Exit codes: 0 if everything was compared and agrees, 1 on conflicts, 4 if something was not compared. The rows of
    shards without a standby need not be compared if the fleet file's check table allows one-copy.
    """
    with reporting_errors(junit):
        if increment is not None and name is None:
            raise UsageError("--increment needs a NAME", hint="snapshot check NAME --increment N")
        fleet = command_context(context).load_fleet()
        with leaving_metrics(context, fleet, "check", metrics):
            name = newest_name(fleet, name) if name is not None else None
            report = run_check(context, fleet, CheckRequest(name, increment, metadata_only, rows))
            problems = write_report(junit, junit_of(report))
            lines = [*lines_of(report), *(f"warning: {problem}" for problem in problems)]
            code = report.exit_code or (UNWRITTEN if problems else DONE)
            emit(context, report.to_json() | {"warnings": problems}, lines, code=code)
            raise typer.Exit(code)


def run_check(context: typer.Context, fleet: Fleet, request: CheckRequest) -> CheckReport:
    """Run the check, and record its result."""
    with (
        SparkOnDemand(fleet, f"check {request.name or 'all'}") as spark,
        recorded_activity(context, fleet, "check", request.name or "") as recorded,
    ):
        report = check_snapshots(fleet, request, spark, recorded.activity)
        recorded.code, recorded.reason, recorded.volumes = report.exit_code, report.result, volumes_of(report)
        recorded.checked = checked_points(report, request)
    return report


def volumes_of(report: CheckReport) -> dict[str, int]:
    """Return the amounts compared, summed over all snapshots."""
    return dict(sum((Counter(asdict(snapshot.compared)) for snapshot in report.snapshots), Counter()))


def checked_points(report: CheckReport, request: CheckRequest) -> tuple[CheckedPoint, ...]:
    """Return the result for each restore point, in the format used in the operation's outcome."""
    is_full = request.increment is None and not request.metadata_only
    return tuple(
        CheckedPoint(snapshot.name, snapshot.increment, snapshot.result, is_full, snapshot.figures)
        for snapshot in report.snapshots
    )


def lines_of(report: CheckReport) -> list[str]:
    """Return the human-readable output."""
    lines = [line for snapshot in report.snapshots for line in _snapshot_lines(snapshot)]
    if not report.snapshots:
        lines.append("the store contains no snapshots: nothing was compared")
    conflicts = [conflict for snapshot in report.snapshots for conflict in snapshot.conflicts]
    if any(one.kind in ROWS_DIFFER and not one.rows and not one.rows_unnamed for one in conflicts):
        lines.append(HOW_TO_NAME_ROWS)
    if report.result == CONFLICTS:
        lines.append(WHAT_TO_DO)
    # These lines go to stderr even with --quiet.
    lines += [line for snapshot in report.snapshots for line in _doubt_lines(snapshot)]
    lines += [open_operation.text for open_operation in report.open_operations]
    return [*lines, f"{result_text(report.result)}, {seconds_text(report.seconds)}"]


def result_text(result: CheckResult) -> str:
    """Describe the result of a check."""
    return f"{result}: each copy is consistent with itself" if result == ONE_COPY else result


def _snapshot_lines(one: SnapshotReport) -> list[str]:
    compared = one.compared
    lines = [
        f"{one.name} at increment {one.increment}: {result_text(one.result)}",
        f"  compared {quantity_text(compared.objects, 'objects')} ({size_text(compared.bytes)}), "
        f"{quantity_text(compared.rows, 'base rows')}, {quantity_text(compared.changes, 'changes')}, "
        f"{quantity_text(compared.partitions, 'partitions')}, "
        f"{quantity_text(compared.transactions, 'global transactions')}",
    ]
    if one.large_objects:
        read_back = quantity_text(one.large_objects, "large objects")
        lines.append(f"  read back, no second copy to compare with: {read_back}")
    for conflict in one.conflicts[:CONFLICTS_SHOWN_MAX]:
        lines.append(f"  conflict: {conflict_text(conflict)}")
        lines += [f"    {line}" for row in conflict.rows for line in _row_lines(row)]
        lines += [f"    rows are not named: {conflict.rows_unnamed}"] if conflict.rows_unnamed else []
    if len(one.conflicts) > CONFLICTS_SHOWN_MAX:
        lines.append(f"  … {len(one.conflicts) - CONFLICTS_SHOWN_MAX} more; --json lists all of them")
    lines += [f"  {line}" for line in warning_lines(one.warned)]
    return lines + [f"  skipped: {skipped.what} ({skipped.why})" for skipped in one.skipped]


def _doubt_lines(one: SnapshotReport) -> Iterator[str]:
    """Describe what may be damage, and may be as it should be."""
    for doubt in one.doubts[:CONFLICTS_SHOWN_MAX]:
        place = ", ".join(name for name in (doubt.node, doubt.group) if name) or doubt.object
        yield f"{WARNING}{one.name}: {doubt.kind}{f' ({place})' if place else ''}: {doubt.detail}"
    if len(one.doubts) > CONFLICTS_SHOWN_MAX:
        yield f"{WARNING}{one.name}: {len(one.doubts) - CONFLICTS_SHOWN_MAX} more doubts; --json lists all of them"


def _row_lines(row: DifferentRow) -> Iterator[str]:
    """Describe what each copy has of a row, and which copies the others contradict."""
    yield f"row {row.key}:" if row.key else "a row without a key:"
    for stored in row.copies:
        wrong = "; most copies contradict it" if stored.node in row.outvoted else ""
        if stored.line is None:
            yield f"  {stored.node}: no such row{wrong}"
            continue
        times = f"{stored.count} times, " * (stored.count > 1)
        where = "the base copy" if stored.position is None else f"{stored.position}, xid {stored.xid}"
        writer = f"{times}written at {where}, in increment {stored.increment}"
        if stored.position is None:
            writer = f"{times}in {where} of increment {stored.increment}" if stored.increment else f"{times}in {where}"
        if stored.global_id:
            writer += f", transaction {stored.global_id}"
        yield f"  {stored.node}: {stored.line} ({writer}){wrong}"


def conflict_text(conflict: Conflict) -> str:
    """Describe a conflict on one line: kind, location and detail."""
    nodes = " and ".join(node for node in (conflict.node, conflict.other_node) if node)
    place = conflict.group or ""
    if conflict.partition is not None:
        place += f" partition {conflict.partition}"
    names = [name for name in (nodes, place, conflict.global_id or "") if name]
    return f"{conflict.kind}" + (f" ({', '.join(names)})" if names else "") + f": {conflict.detail}"
