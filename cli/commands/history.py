"""`snapshot history`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutline.cli.output.activity import check_snapshot, result_cell, volumes_text, what_text
from cutline.cli.output.arguments import command_context
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.results import answer
from cutline.cli.output.tables import Cell, FittingTable, Shorter, minute_text, moment_text, seconds_text
from cutline.cli.process.stopping import owner_text
from cutline.snapshots.operations.ended_operations import Ended, read_history
from cutline.snapshots.records.store_identity import open_own_store

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "cutline/history/1"
LAST, LAST_MAX = 20, 1_000_000
TITLES = ("operation", "what", "result", "who", "ended", "took", "volumes")
IMPORTANT = ("operation", "result", "what", "ended", "took", "volumes")


def history(
    context: typer.Context,
    *,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_snapshots,
            help="Only operations of this snapshot.",
        ),
    ] = None,
    last: Annotated[
        int, typer.Option(min=1, max=LAST_MAX, metavar="N", help="How many operations to list, newest first.")
    ] = LAST,
) -> None:
    """List ended operations with their result, time, duration and snapshot.

    Records of committed operations are kept as long as their snapshot; gc removes all others after 30 days.
    """
    options = command_context(context)
    operations = read_history(open_own_store(options.load_fleet()), last, check_snapshot(name))
    answer(context, document_of(operations), [] if options.json else lines_of(operations))


def document_of(found: Iterable[Ended]) -> dict[str, Any]:
    """Return the command's JSON output."""
    return {"schema": SCHEMA, "operations": [ended.to_json() for ended in found]}


def lines_of(found: list[Ended]) -> list[str | RenderableType]:
    """Return the human-readable output."""
    if not found:
        return ["no operations have ended yet"]
    rows = [
        (
            ended.id,
            what_text(ended),
            result_cell(ended),
            owner_text(ended.label) if ended.label else "",
            _ended_cell(ended),
            "" if ended.seconds is None else seconds_text(ended.seconds),
            volumes_text(ended),
        )
        for ended in found
    ]
    causes = [f"operation {ended.id}: retried: {cause}" for ended in found for cause in ended.causes]
    return [FittingTable(TITLES, rows, important=IMPORTANT), *causes]


def _ended_cell(one: Ended) -> Cell:
    if one.outcome is None:
        return ""
    moment = datetime.fromisoformat(one.outcome.ended_at)
    return Shorter(moment_text(moment), minute_text(moment))
