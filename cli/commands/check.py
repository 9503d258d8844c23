"""`snapshot check`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from msgspec import UNSET

from cutline.check.named_rows import ROWS_DIFFER
from cutline.check.report import CheckReport, Conflict, DifferentRow, RestsOn, SnapshotReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import SECONDS_MAX, Increment, command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.junit import junit_of, reporting_errors, write_report
from cutline.cli.output.left_out import warning_lines
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.results import emit
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import Fleet
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.records.operation_records import CONFLICTS, ONE_COPY, CheckedPoint, CheckResult
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import UsageError

CONFLICTS_SHOWN_MAX, ROWS_MAX = 20, 1000
SUBSET = re.compile(r"([0-9]{1,6})/([0-9]{1,6})", re.ASCII)
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
    since_last: Annotated[
        bool,
        typer.Option(
            "--since-last",
            help="Read only what no check has read since, and rest on the record of an earlier check for the rest.",
        ),
    ] = False,
    subset: Annotated[
        str | None,
        typer.Option(
            metavar="N/T", help="Like --since-last, and of the rest, reread the Nth of T parts instead of what is due."
        ),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=SECONDS_MAX,
            metavar="S",
            help="Like --since-last, and end at the first boundary after this time; the result says what was not read.",
        ),
    ] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Check only the newest snapshot: the one whose first cut is the latest.")
    ] = False,
    metrics: MetricsFile = None,
) -> None:
    """Read snapshots back from the store and verify that they are complete and consistent.

    Exit codes: 0 if everything was compared and agrees, 1 on conflicts, 4 if something was not compared. The rows of
    shards without a standby need not be compared if the fleet file's check table allows one-copy. With --since-last,
    what earlier checks compared counts as compared if it was read again in the time that the check table sets.
    """
    with reporting_errors(junit):
        request = CheckRequest(
            name, increment, metadata_only, rows, since_last, parse_subset(subset), max_seconds, newest
        )
        check_request(request)
        fleet = command_context(context).load_fleet()
        with leaving_metrics(context, fleet, "check", metrics):
            request = replace(request, name=newest_name(fleet, name) if name is not None else None)
            report = run_check(context, fleet, request)
            problems = write_report(junit, junit_of(report))
            lines = [*lines_of(report), *(f"warning: {problem}" for problem in problems)]
            code = report.exit_code or (UNWRITTEN if problems else DONE)
            emit(context, report.to_json() | {"warnings": problems}, lines, code=code)
            raise typer.Exit(code)


def parse_subset(text: str | None) -> tuple[int, int] | None:
    """Parse the value of --subset; raise UsageError unless it is N/T with N from 1 to T."""
    if text is None:
        return None
    if (match := SUBSET.fullmatch(text)) and 1 <= int(match[1]) <= int(match[2]):
        return int(match[1]), int(match[2])
    raise UsageError(f"--subset {text[:100]!r} is not a part such as 1/7", hint="snapshot check NAME --subset 1/7")


def check_request(request: CheckRequest) -> None:
    """Raise UsageError if the request is contradictory."""
    if request.increment is not None and request.name is None:
        raise UsageError("--increment needs a NAME", hint="snapshot check NAME --increment N")
    if request.newest and request.name is not None:
        raise UsageError("--newest and NAME are mutually exclusive", hint="use only one of them")
    reads_all = {
        "--increment": request.increment is not None,
        "--metadata-only": request.metadata_only,
        "--rows": request.rows > 0,
    }
    if request.uses_records and any(reads_all.values()):
        option = next(option for option, is_given in reads_all.items() if is_given)
        raise UsageError(
            f"{option} does not go with --since-last, --subset and --max-seconds",
            hint="they check the newest increment, and read only a part of what is stored",
        )


def run_check(context: typer.Context, fleet: Fleet, request: CheckRequest) -> CheckReport:
    """Run the check, and record its result."""
    with (
        SparkOnDemand(fleet, f"check {request.name or 'all'}") as spark,
        recorded_activity(context, fleet, "check", request.name or "") as recorded,
    ):
        report = check_snapshots(fleet, request, spark, recorded.activity)
        recorded.code, recorded.reason, recorded.volumes = report.exit_code, reason_of(report), volumes_of(report)
        recorded.checked = checked_points(report, request)
    return report


def reason_of(report: CheckReport) -> str:
    """Return the result as `history` shows it."""
    return f"{report.result}, with records of earlier checks" if report.rests_on_records else report.result


def volumes_of(report: CheckReport) -> dict[str, int]:
    """Return the amounts compared and reread, summed over all snapshots."""
    volumes = sum((Counter(asdict(snapshot.compared)) for snapshot in report.snapshots), Counter[str]())
    for rests_on in (snapshot.rests_on for snapshot in report.snapshots):
        if rests_on:
            volumes.update(objects=rests_on.reread_objects, bytes=rests_on.reread_bytes)
    return dict(volumes)


def checked_points(report: CheckReport, request: CheckRequest) -> tuple[CheckedPoint, ...]:
    """Return the result for each restore point, in the format used in the operation's outcome."""
    is_full = request.increment is None and not request.metadata_only
    return tuple(_checked_point(snapshot, is_full=is_full and snapshot.reads_all) for snapshot in report.snapshots)


def _checked_point(snapshot: SnapshotReport, *, is_full: bool) -> CheckedPoint:
    return CheckedPoint(
        snapshot.name,
        snapshot.increment,
        snapshot.result,
        is_full,
        snapshot.figures,
        snapshot.rests_on.operation if snapshot.rests_on else UNSET,
        snapshot.read or UNSET,
    )


def lines_of(report: CheckReport) -> list[str]:
    """Return the human-readable output."""
    lines = [line for snapshot in report.snapshots for line in _snapshot_lines(snapshot)]
    if not report.snapshots:
        lines.append("the store contains no snapshots: nothing was compared")
    if any(_may_name_rows(snapshot, conflict) for snapshot in report.snapshots for conflict in snapshot.conflicts):
        lines.append(HOW_TO_NAME_ROWS)
    if report.result == CONFLICTS:
        lines.append(WHAT_TO_DO)
    lines += [open_operation.text for open_operation in report.open_operations]
    result = result_text(report.result, rests_on_records=report.rests_on_records)
    return [*lines, f"{result}, {seconds_text(report.seconds)}"]


def _may_name_rows(snapshot: SnapshotReport, conflict: Conflict) -> bool:
    """Whether a check of everything may name rows that differ; if only changes were compared, their rows may differ."""
    if snapshot.rests_on and conflict.kind == "changes":
        return True
    return conflict.kind in ROWS_DIFFER and not conflict.rows and not conflict.rows_unnamed


def result_text(result: CheckResult, *, rests_on_records: bool) -> str:
    """Describe the result of a check."""
    texts = [f"{result}: each copy is consistent with itself" if result == ONE_COPY else result]
    return ", ".join([*texts, *(["with records of earlier checks"] if rests_on_records else [])])


def _snapshot_lines(one: SnapshotReport) -> list[str]:
    compared = one.compared
    lines = [
        f"{one.name} at increment {one.increment}: {result_text(one.result, rests_on_records=bool(one.rests_on))}",
        f"  compared {quantity_text(compared.objects, 'objects')} ({size_text(compared.bytes)}), "
        f"{quantity_text(compared.rows, 'base rows')}, {quantity_text(compared.changes, 'changes')}, "
        f"{quantity_text(compared.partitions, 'partitions')}, "
        f"{quantity_text(compared.transactions, 'global transactions')}",
    ]
    if one.rests_on:
        lines += [f"  {line}" for line in _lines_of_records(one.rests_on)]
    if one.unused_records:
        lines.append(f"  no record of an earlier check was used: {one.unused_records}")
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


def _lines_of_records(rests_on: RestsOn) -> Iterator[str]:
    """Say what the result rests on, when that was read, and what was reread."""
    amount = f"{quantity_text(rests_on.objects, 'objects')} ({size_text(rests_on.bytes)})"
    yield f"not read now: {amount}, all of them read since {rests_on.oldest_read_at}"
    yield f"record: check {rests_on.operation}; everything was compared by check {rests_on.compared_by}"
    yield f"reread: {quantity_text(rests_on.reread_objects, 'objects')} ({size_text(rests_on.reread_bytes)})"
    if rests_on.left_objects:
        left = f"{quantity_text(rests_on.left_objects, 'objects')} ({size_text(rests_on.left_bytes)})"
        yield f"no time was left to reread {left}"


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
