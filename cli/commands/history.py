"""`snapshot history`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output.context import command_context
from cli.output.format import count_text, quantity_text, seconds_text
from cli.output.results import emit
from cli.output.stopping import owner_text
from snapshots.activity.history import Ended, read_history

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = "cutline/history/1"
LAST = 20
# What says nothing of how much work it was.
UNSHOWN = ("groups",)


def history(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only operations of this snapshot.")] = None,
    last: Annotated[int, typer.Option(min=1, metavar="N", help="How many, the newest first.")] = LAST,
) -> None:
    """List the operations that have ended: how, when, how long they took, and what they worked on.

    Records of what has committed stay as long as the snapshot; gc removes others after 30 days.
    """
    options = command_context(context)
    found = read_history(options.load_fleet().store.open(), last, name)
    emit(context, document_of(found), [] if options.json else lines_of(found))


def document_of(found: Iterable[Ended]) -> dict[str, Any]:
    """The command's JSON."""
    return {"schema": SCHEMA, "operations": [one.to_json() for one in found]}


def lines_of(found: list[Ended]) -> list[str | RenderableType]:
    """The output for people."""
    if not found:
        return ["no operation has ended"]
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("operation", "what", "result", "who", "ended", "took", "volumes"):
        table.add_column(title)
    for one in found:
        ended_at = one.outcome.ended_at[:19].replace("T", " ") + "Z" if one.outcome else ""
        table.add_row(
            one.id, what_text(one), result_text(one), owner_text(one.label) if one.label else "", ended_at,
            "" if one.seconds is None else seconds_text(one.seconds), volumes_text(one),
        )  # fmt: skip
    causes = [f"operation {one.id}: tried again: {cause}" for one in found for cause in one.causes]
    return [table, *causes]


def line_of(one: Ended) -> str:
    """One operation on one line."""
    took = "" if one.seconds is None else f", {seconds_text(one.seconds)}"
    volumes = f", {text}" if (text := volumes_text(one)) else ""
    return f"operation {one.id} ({what_text(one)}): {result_text(one)}{took}{volumes}"


def what_text(one: Ended) -> str:
    """`create nightly, increment 3`."""
    what = f"{one.kind or 'unknown'} {one.snapshot}".rstrip()
    return f"{what}, increment {one.increment}" if one.increment else what


def result_text(one: Ended) -> str:
    """`done`, or how it failed: the error's name, and the exit code."""
    if one.outcome is None:
        return f"unknown: {one.problem}"
    reason = f": {one.outcome.reason}" if one.outcome.reason else ""
    code = f" (exit {one.code})" if one.code else ""
    return f"{one.outcome.state}{reason}{code}"


def volumes_text(one: Ended) -> str:
    """`1,000 rows, 2.0 MiB`."""
    parts = [
        quantity_text(amount, unit) if unit == "bytes" else f"{count_text(amount)} {unit}"
        for unit, amount in one.volumes.items()
        if amount and unit not in UNSHOWN
    ]
    return ", ".join(parts)
