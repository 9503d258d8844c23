"""What a restore takes from standbys' copies, and why: as JSON and for people."""

from __future__ import annotations

from typing import Any

from cutline.fleet.record import to_builtins
from cutline.restore.report import RestoreReport

NAMED_MAX = 20


def borrowed_document(report: RestoreReport) -> dict[str, Any]:
    """The fields of the command's JSON."""
    return {
        "from_backup_copies": to_builtins(report.borrowed),
        "damaged": [{"object": one.key, "node": one.node, "kind": one.kind} for one in report.damaged],
    }


def borrowed_lines(report: RestoreReport, *, is_done: bool = True) -> list[str]:
    """A line for each damaged object, and for each copy that rows were taken from."""
    lines = [f"damaged: object {one.key} of node {one.node}: {one.detail}" for one in report.damaged[:NAMED_MAX]]
    if (more := len(report.damaged) - NAMED_MAX) > 0:
        lines.append(f"… {more} more damaged objects; all of them with --json")
    for one in report.borrowed:
        more = len(one.groups) - NAMED_MAX
        names = ", ".join(one.groups[:NAMED_MAX]) + (f" and {more} more tables" if more > 0 else "")
        lines.append(f"{'taken' if is_done else 'to take'} from the copy of {one.node} for {one.shard}: {names}")
    return lines
