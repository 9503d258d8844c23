"""`snapshot resume`."""

from __future__ import annotations

from typing import Any

import typer

from cutline.cli.output.arguments import command_context
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import emit, progress
from cutline.nodes.other_sessions import sessions_text
from cutline.nodes.read_only import ResumeReport, ThawResult, resume_fleet

SCHEMA = "cutline/resume/1"


def resume(context: typer.Context) -> None:
    """Make the fleet accept writes again after a terminal snapshot. Safe to repeat."""
    fleet = command_context(context).load_fleet()
    with with_hooks(context, fleet, "resume"):
        with progress(context) as shown:
            report = resume_fleet(fleet, shown)
        emit(context, document_of(report), lines_of(report))


def document_of(report: ResumeReport) -> dict[str, Any]:
    """Return the command's JSON output. `nodes` are the nodes that were read-only."""
    return {
        "schema": SCHEMA,
        "asked": list(report.asked),
        "nodes": [
            {
                "node": result.node,
                "operation": result.was.operation,
                "snapshot": result.was.snapshot,
                "since": result.was.since,
                "sessions_ended": result.ended,
                "sessions_left": [session.details() for session in result.left],
            }
            for result in report.results
        ],
    }


def lines_of(report: ResumeReport) -> list[str]:
    """Return the human-readable output."""
    if not report.results:
        return [f"no terminal snapshot has made {', '.join(report.asked)} read-only; nothing was changed"]
    return [line for result in report.results for line in _lines(result)]


def _lines(one: ThawResult) -> list[str]:
    lines = [f"{one.node} accepts writes again; it was {one.was.text()}"]
    if one.ended:
        lines.append(f"{one.node}: ended {one.ended} sessions that had started read-only")
    if one.left:
        lines.append(f"warning: read-only until they end: {sessions_text(list(one.left))}")
    return lines
