"""`snapshot report`: its options, its file and its JSON output."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import asdict

from cutline.cli.output.arguments import command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.results import emit
from cutline.cli.output.tables import time_text
from cutline.cli.report.sections import counts_text
from cutline.fleet.own_files import replaced_file
from cutline.fleet.record import to_builtins
from cutline.snapshots.listing.figures import (
    Gap,
    PointFigures,
    RestorePlace,
    SnapshotFigures,
    StoreFigures,
    read_figures,
)
from cutline.snapshots.listing.name_templates import newest_name
from cutline.snapshots.operations.ended_operations import EndedCheck
from cutline.snapshots.records.operation_records import CheckFigures
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError


def figures_document(figures: StoreFigures) -> dict[str, Any]:
    """Return all figures in the charts and tables."""
    operations, gaps = figures.operations, figures.gaps
    return {
        "fleet": figures.fleet,
        "made_at": time_text(figures.made_at),
        "last_good": {
            "restore_point": _point_place(figures.last_good_point),
            "check": _check(figures.last_good_check) if figures.last_good_check else None,
            "drill": figures.last_good_drill.to_json() if figures.last_good_drill else None,
        },
        "snapshots": [_snapshot(snapshot) for snapshot in figures.snapshots],
        "gaps": {
            "median_seconds": gaps.median_seconds,
            "limit_seconds": gaps.limit_seconds,
            "found": [_gap(gap) for gap in gaps.found],
        },
        "operations": {"read": operations.read, "are_all": operations.are_all, "untimed": operations.untimed},
        "phases": [asdict(phase) for phase in operations.phases],
        "checks": [_check(check) for check in operations.checks],
    }


def _point_place(point: PointFigures | None) -> dict[str, Any] | None:
    if point is None:
        return None
    return {"snapshot": point.snapshot, "increment": point.increment, "cut_at": time_text(point.cut_at)}


def _snapshot(one: SnapshotFigures) -> dict[str, Any]:
    return {
        "name": one.name,
        "state": one.state,
        "remark": one.remark or None,
        "type": "only-cut" if one.is_only_cut else "full",
        "bytes": one.bytes,
        "growth_bytes_per_day": one.growth_bytes_per_day,
        "points": [_point(point) for point in one.points],
    }


def _point(point: PointFigures) -> dict[str, Any]:
    return {
        "increment": point.increment,
        "operation": point.operation,
        "cut_at": time_text(point.cut_at),
        "cut_seconds": point.cut_seconds,
        "in_flight": point.in_flight,
        "included_early": point.included_early,
        "global_transactions": point.global_transactions,
        "attempts": point.attempts,
        "causes": list(point.causes),
        "seconds": point.seconds,
        "bytes": point.bytes,
        "changes": point.changes,
        "transactions": point.transactions,
        "comment": point.comment,
        "terminal": point.is_terminal,
        "safe_at": time_text(point.safe_at),
        "lags": {node: asdict(lag) for node, lag in point.lags.items()},
    }


def _gap(gap: Gap) -> dict[str, Any]:
    return {
        "after": _place(gap.after),
        "before": _place(gap.before) if gap.before else None,
        "seconds": gap.seconds,
        "why": gap.why or None,
    }


def _place(place: RestorePlace) -> dict[str, Any]:
    return {"snapshot": place.snapshot, "increment": place.increment, "cut_at": time_text(place.at)}


def _check(one: EndedCheck) -> dict[str, Any]:
    """Return a check as JSON; `figures` is null if the check did not record how much it compared and skipped."""
    figures = one.point.figures
    found = to_builtins(figures) if isinstance(figures, CheckFigures) else None
    return {**one.to_json(), "snapshot": one.point.snapshot, "figures": found}


SCHEMA = "cutline/report/1"


def report(
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
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the report to FILE as an HTML page without scripts."),
    ] = None,
) -> None:
    """Report on snapshots over time: cuts, sizes, durations, checks, node lag and gaps.

    Only commits and the records of operations are read. --json prints the same figures.
    """
    options = command_context(context)
    if html is None and not options.json:
        raise UsageError(
            "a report needs a file or --json",
            hint="snapshot report --html report.html   or in a terminal: snapshot show NAME --timeline",
        )
    fleet = options.load_fleet()
    with replaced_file(html) if html else nullcontext() as write:
        figures = read_figures(fleet, newest_name(fleet, name) if name is not None else None, utc_now())
        if write is not None:
            from cutline.cli.report.page import page_of

            write(page_of(figures))
    document = {"schema": SCHEMA, **figures_document(figures), "file": html}
    emit(context, document, [f"{html}: {counts_text(figures)}"])
