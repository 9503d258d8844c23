"""`snapshot check --live`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import typer

from cutline.check.live.repair_script import repair_script
from cutline.check.live.report import (
    APPEND_ONLY,
    CUT_ROWS,
    STANDBY_ROWS,
    LiveCompared,
    LiveConflict,
    LiveReport,
    ShardReport,
    row_lines,
)
from cutline.check.live.run import LiveRequest, check_live
from cutline.cli.output.activity import recorded_activity
from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.junit import write_report
from cutline.cli.output.junit_live import junit_of_live
from cutline.cli.output.results import CONFLICTS_SHOWN_MAX, WARNING, emit
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.config import read_limit
from cutline.fleet.own_files import replaced_file
from cutline.snapshots.listing.name_templates import newest_name
from cutline.spark.on_demand import SparkOnDemand

# The kind of operation in `history`: it does not count as a check of snapshots.
LIVE_KIND = "check-live"
WHAT_TO_DO_LIVE = "find out which side is right before you change anything"
HOW_TO_SEE_ROWS, HOW_TO_REPAIR = "to see rows: --rows 20", "to get statements for repairs: --repair-script FILE"
REPEAT_LATER = "check that these nodes are running, and that their dsns are correct, then repeat the check"
WITH_ROWS = (STANDBY_ROWS, CUT_ROWS, APPEND_ONLY)


def run_live(
    context: typer.Context,
    name: str | None,
    rows: int,
    *,
    bytes_per_second: int | None,
    indexes: bool,
    script: Path | None,
    junit: Path | None,
) -> None:
    """Run a check of running databases, and report its result; the arguments are those of `check`."""
    fleet = command_context(context).load_fleet()
    name = newest_name(fleet, name) if name is not None else None
    limit = bytes_per_second or read_limit(fleet.nodes)
    request = LiveRequest(name, rows, limit, indexes, script is not None)
    with with_hooks(context, fleet, LIVE_KIND, name):
        # A file that can't be written is refused before the work.
        with nullcontext() if script is None else replaced_file(script, script_mode(script)) as write:
            with (
                SparkOnDemand(fleet, f"check live {name or ''}") as spark,
                recorded_activity(context, fleet, LIVE_KIND, name or "") as recorded,
            ):
                report = check_live(fleet, request, spark, recorded.activity)
                recorded.code, recorded.reason, recorded.volumes = report.exit_code, report.result, report.volumes
            if write is not None:
                write(repair_script(report))
        problems = write_report(junit, junit_of_live(report))
        lines = [*live_lines(report, script, rows), *(f"{WARNING}{problem}" for problem in problems)]
        code = report.exit_code or (UNWRITTEN if problems else DONE)
        emit(context, report.to_json() | {"warnings": [*recorded.warnings, *problems]}, lines, code=code)
        raise typer.Exit(code)


def script_mode(script: Path) -> int | None:
    """Return the permissions of a new repair script, which contains rows: only its user's. None: keep a file's own."""
    return None if script.exists() else 0o600


def live_lines(report: LiveReport, script: Path | None = None, rows: int = 0) -> list[str]:
    """Return the human-readable output of a check of running databases; `rows` and `script` are the options given."""
    lines = [line for shard in report.shards for line in _shard_lines(shard, report)]
    for conflict in report.conflicts[:CONFLICTS_SHOWN_MAX]:
        lines.append(f"  conflict: {live_conflict_text(conflict)}")
        lines += [f"    {line}" for row in conflict.rows for line in row_lines(row)]
    if len(report.conflicts) > CONFLICTS_SHOWN_MAX:
        lines.append(f"  … {len(report.conflicts) - CONFLICTS_SHOWN_MAX:,} more; --json lists all of them")
    lines += [f"  skipped: {skipped.what} ({skipped.why})" for skipped in report.skipped]
    for unproven in report.unproven:
        if unproven.rows:
            lines.append(f"  unproven: {unproven.group} on {unproven.node}: these rows differ from the cut")
            lines += [f"    {line}" for row in unproven.rows for line in row_lines(row)]
    lines += [f"  unreachable: {node} ({why})" for node, why in report.unreachable.items()]
    if report.unreachable:
        lines.append(REPEAT_LATER)
    hints = [WHAT_TO_DO_LIVE] if report.conflicts else []
    if not rows and (report.unproven or any(conflict.kind in WITH_ROWS for conflict in report.conflicts)):
        hints.append(HOW_TO_SEE_ROWS)
    if script is None and report.conflicts:
        hints.append(HOW_TO_REPAIR)
    if hints:
        lines.append("; ".join(hints))
    if script is not None:
        lines.append(f"statements for repairs: {script}")
    return [*lines, f"{report.result}, {seconds_text(report.seconds)}"]


def _shard_lines(shard: ShardReport, report: LiveReport) -> Iterator[str]:
    compared = shard.compared
    if shard.standbys:
        amounts = f"{quantity_text(compared.rows, 'rows')}, {size_text(compared.bytes)}"
        yield f"shard {shard.shard}: compared {live_tables_text(compared)} with {', '.join(shard.standbys)}: {amounts}"
    else:
        yield f"shard {shard.shard}: {'no standby can be reached' if shard.away else 'no standby'}"
    if compared.indexes:
        yield f"  checked {quantity_text(compared.indexes, 'indexes')}"
    if (cut := shard.cut) is not None:
        differing = f"{cut.differing:,} different" if cut.differing or not cut.unproven else ""
        unproven = f"{cut.unproven:,} not equal, perhaps because they were written since" if cut.unproven else ""
        counts = [f"{quantity_text(cut.equal, 'rows')} equal", f"{cut.written:,} written since", differing, unproven]
        yield (
            f"  compared {quantity_text(cut.tables, 'tables')} with {report.snapshot} at increment {report.increment}:"
            f" {', '.join(filter(None, counts))}"
        )


def live_tables_text(compared: LiveCompared) -> str:
    """Return how many tables were compared with standbys, and how many of them in part."""
    partial = compared.partial_tables
    but = f" (in {partial:,} of them, not the pages that can't be read)" if partial else ""
    return f"{quantity_text(compared.tables, 'tables')}{but}"


def live_conflict_text(conflict: LiveConflict) -> str:
    """Describe a conflict in a running database on one line."""
    names = ", ".join(name for name in (conflict.nodes, conflict.group or "") if name)
    return f"{conflict.kind} ({names}): {conflict.detail}"
