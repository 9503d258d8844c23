"""`snapshot cancel`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from cutline.cli.output.activity import check_operation, check_snapshot, what_text
from cutline.cli.output.arguments import SECONDS_MAX, command_context
from cutline.cli.output.completing import complete_operations, complete_snapshots
from cutline.cli.output.failure import BUSY, DONE, REFUSED, UNREACHABLE
from cutline.cli.output.results import emit, progress
from cutline.snapshots.operations.cancelling import Cancelled, CancelResult, cancel_operations
from cutline.snapshots.operations.ended_operations import read_ended
from cutline.snapshots.operations.under_way import UnderWay, read_under_way
from cutline.snapshots.records.store_identity import open_own_store
from cutline.storage.errors import RefusedError, UsageError
from cutline.storage.store import ObjectStore

SCHEMA = "cutline/cancel/1"
CODES = {
    CancelResult.TOO_LATE: REFUSED,
    CancelResult.UNFINISHED: REFUSED,
    CancelResult.REFUSED: REFUSED,
    CancelResult.UNREACHABLE: UNREACHABLE,
    CancelResult.STILL_RUNNING: BUSY,
    CancelResult.BUSY: BUSY,
}


class NotUnderWayError(RefusedError):
    """There is no operation to cancel."""


def cancel(
    context: typer.Context,
    operation: Annotated[
        str | None,
        typer.Argument(
            metavar="OPERATION",
            autocompletion=complete_operations,
            help="The operation's id, as `snapshot status` shows it.",
        ),
    ] = None,
    *,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=complete_snapshots,
            help="Stop all operations of this snapshot.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all operations of the fleet.")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, max=SECONDS_MAX, metavar="SECONDS", help="How long to wait for them to stop."),
    ] = 60.0,
) -> None:
    """Stop running operations, on any machine.

    A stopped operation cleans up and keeps nothing to be resumed; its command exits with 8. Dead operations are cleaned
    up by this command; cleaning up one dead create cleans up all others that can't be resumed.

    Exit codes: 0 if all have stopped, 3 if one had already ended or can no longer be undone, 7 if one is still running.
    """
    if (operation is not None) + (name is not None) + every != 1:
        raise UsageError(
            "give exactly one of OPERATION, --name and --all", hint="to list running operations: snapshot status"
        )
    options = command_context(context)
    fleet = options.load_fleet()
    wanted = check_operation(operation) if operation is not None else None
    check_snapshot(name)
    store = open_own_store(fleet)
    chosen = [way for way in read_under_way(store) if every or wanted == way.id or name == way.snapshot]
    if not chosen and operation is not None:
        raise _not_under_way(store, operation)
    with progress(context) as shown:
        results = cancel_operations(fleet, chosen, wait, shown)
    code = max((CODES.get(result.result, DONE) for result in results), default=DONE)
    emit(context, document_of(results), lines_of(results, name), code=code)
    raise typer.Exit(code)


def _not_under_way(store: ObjectStore, operation: str) -> NotUnderWayError:
    # The operation may have ended since it was listed.
    ended = read_ended(store, operation)
    if ended is None or ended.outcome is None:
        return NotUnderWayError(
            f"operation {operation} is not under way", hint="to list running operations: snapshot status"
        )
    return NotUnderWayError(
        f"operation {operation} has ended: {ended.outcome.state} at {ended.outcome.ended_at}",
        hint="nothing was changed; to list ended operations: snapshot history",
        details={"operation": operation, "state": ended.outcome.state},
    )


def document_of(results: Iterable[Cancelled]) -> dict[str, Any]:
    """Return the command's JSON output."""
    return {
        "schema": SCHEMA,
        "operations": [
            {
                "operation": result.operation.id,
                "kind": result.operation.kind or None,
                "snapshot": result.operation.snapshot or None,
                "result": result.result.value,
                "detail": result.text,
            }
            for result in results
        ],
    }


def lines_of(results: list[Cancelled], name: str | None = None) -> list[str]:
    """Return the human-readable output."""
    nothing = f"no operations on snapshot {name} are under way" if name else "no operations are under way"
    return [_line(result.operation, result) for result in results] or [nothing]


def _line(operation: UnderWay, one: Cancelled) -> str:
    return f"operation {operation.id} ({what_text(operation)}): {one.text}"
