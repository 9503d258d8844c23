"""Operations as people read them: their snapshot and the process that runs them."""

from __future__ import annotations

from cutline.cli.output.tables import Shorter, quantity_text
from cutline.snapshots.operations.ended_operations import Ended
from cutline.snapshots.operations.under_way import UnderWay
from cutline.snapshots.records.proven_chains import check_name
from cutline.storage.errors import UsageError
from cutline.storage.ids import OPERATION_ID

# What says nothing of how much work it was.
UNSHOWN = ("groups",)


def check_operation(text: str) -> str:
    """The id of an operation that was given; raise UsageError if it is none."""
    if not OPERATION_ID.fullmatch(text):
        raise UsageError(
            f"{text[:100]!r} is no id of an operation",
            hint="ids are such as 20261124T193137Z-65c4c093aa; see: snapshot status",
        )
    return text


def check_snapshot(name: str | None) -> str | None:
    """Return the given name of a snapshot; raise UsageError if it is not a valid name."""
    if name is not None:
        check_name(name)
    return name


def what_text(one: UnderWay | Ended) -> str:
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


def result_cell(one: Ended) -> Shorter:
    """As `result_text`, with the reason of a failure below the row on narrow terminals."""
    if one.outcome is None:
        return Shorter(result_text(one), "unknown", one.problem)
    if one.outcome.state == "done":
        return Shorter(result_text(one), result_text(one))
    code = f" (exit {one.code})" if one.code else ""
    return Shorter(result_text(one), f"{one.outcome.state}{code}", one.outcome.reason)


def volumes_text(one: Ended) -> str:
    """`1,000 rows, 2.0 MiB`."""
    parts = [quantity_text(amount, unit) for unit, amount in one.volumes.items() if amount and unit not in UNSHOWN]
    return ", ".join(parts)
