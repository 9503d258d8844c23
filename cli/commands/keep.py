"""`snapshot keep`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cutline.cli.output.arguments import check_text, command_context, parse_end, parse_point
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.pinned import pin_document
from cutline.cli.output.results import emit
from cutline.snapshots.records.pins import pinned_text
from cutline.snapshots.removal.pinning import PinChange, pin_point, release_pins
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError

SCHEMA = "cutline/keep/1"
REASON_LENGTH_MAX = 1000


def keep(
    context: typer.Context,
    point: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@N]",
            autocompletion=complete_snapshots,
            help="The snapshot and the increment (0: the full snapshot). Default: its newest restore point.",
        ),
    ],
    *,
    increment: Annotated[
        int | None, typer.Option("--increment", min=0, metavar="N", help="The increment; the same as NAME@N.")
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="DATE", help="The last day of the pin, in UTC, or a time. Default: no end."),
    ] = None,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why the restore point is needed.")] = "",
    release: Annotated[
        bool, typer.Option("--release", help="Release the pins of the restore point, or all pins of the snapshot.")
    ] = False,
) -> None:
    """Pin a restore point: no retention rule removes it, nor what it needs, and `delete` does so only with --force.

    A pin is stored in the store, and `list` shows it. Only the store is contacted.
    """
    name, increment = parse_point(point, increment)
    check_text("--reason", reason)
    if release and (until is not None or reason):
        raise UsageError("--release takes neither --until nor --reason", hint="release the pin, or store a new one")
    if len(reason) > REASON_LENGTH_MAX:
        raise UsageError(f"--reason is longer than {REASON_LENGTH_MAX:,} characters", hint="shorten it")
    end = None if until is None else parse_end("--until", until)
    if end is not None and end <= utc_now():
        raise UsageError(f"--until {until} has passed", hint="name a later day, or leave the option out")
    fleet = command_context(context).load_fleet()
    with with_hooks(context, fleet, "keep", name):
        change = release_pins(fleet, name, increment) if release else pin_point(fleet, name, increment, end, reason)
        emit(context, document_of(change, is_release=release), lines_of(change, is_release=release))


def document_of(change: PinChange, *, is_release: bool) -> dict[str, Any]:
    """Return the command's JSON output. `state` is pinned or released; `pins` are the pins in force now."""
    return {
        "schema": SCHEMA,
        "snapshot": change.snapshot,
        "state": "released" if is_release else "pinned",
        "changed": [pin_document(pin) for pin in change.changed],
        "pins": [pin_document(pin) for pin in change.in_force],
    }


def lines_of(change: PinChange, *, is_release: bool) -> list[str]:
    """Return the human-readable output."""
    if not is_release:
        return [pinned_text(change.snapshot, pin) for pin in change.changed]
    lines = [f"released: {pinned_text(change.snapshot, pin, is_over=True)}" for pin in change.changed]
    return [*lines, *(f"still in force: {pinned_text(change.snapshot, pin)}" for pin in change.in_force)]
