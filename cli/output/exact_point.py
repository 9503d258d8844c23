"""An exact point as text and as JSON: what the state at a time contains, and what limits its exactness."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from cutline.cli.output.tables import FittingTable, count_text, quantity_text, time_text
from cutline.fleet.messages import list_some
from cutline.fleet.record import Time
from cutline.snapshots.records.proven_chains import cut_time, point_label
from cutline.wal.cut.safe_time import SKEW_SECONDS_MAX

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cutline.snapshots.listing.exact_point import ExactPoint

NAMED_MAX = 5
TITLES = ("node", "position", "last commit", "early", "late", "undecided")
NUMBERS = {"early", "late", "undecided"}
IMPORTANT = ("node", "position", "last commit", "early")


def exact_text(moment: datetime) -> str:
    """Return the time in UTC with microseconds, as PostgreSQL records the times of commits."""
    return Time.exactly(moment.astimezone(UTC))


def exact_document(point: ExactPoint) -> dict[str, Any]:
    """Return the exact point as JSON."""
    cuts = point.cut.by_node
    return {
        "at": exact_text(point.moment),
        "before": point.before.increment,
        "after": point.after.increment,
        "skew_seconds": point.skew_seconds,
        "global_transactions": point.cut.global_transactions,
        "definitions_changed": point.find_changed(point.chain.primaries),
        "nodes": [
            {
                "node": node.node,
                "at": str(node.at),
                "position": str(node.position),
                "last_commit_at": node.last_commit_at,
                "early": node.early,
                "early_transactions": [asdict(one) for one in node.named],
                "late": node.late,
                "held": node.is_held,
                "undecided": [one.global_id for one in cuts[node.node].undecided],
            }
            for node in point.nodes
        ],
    }


def exact_plan_lines(point: ExactPoint) -> list[str]:
    """Return the lines of a restore's plan: which state it is, and what limits its exactness."""
    before, after = point.before, point.after
    return [
        f"state: at {exact_text(point.moment)} by each node's clock",
        f"between the cuts of {point_label(before.increment)}, {time_text(cut_time(before))}, and"
        f" {point_label(after.increment)}, {time_text(cut_time(after))}",
        *limit_lines(point),
    ]


def limit_lines(point: ExactPoint) -> list[str]:
    """Describe what differs from the time on each node's clock."""
    early, late = sum(node.early for node in point.nodes), sum(node.late for node in point.nodes)
    lines = []
    if early:
        where = list_some((node.node for node in point.nodes if node.early), NAMED_MAX)
        lines.append(
            f"included although committed later, so that no distributed transaction is torn:"
            f" {quantity_text(early, 'transactions')} on {where}"
        )
    if late:
        where = list_some((node.node for node in point.nodes if node.late), NAMED_MAX)
        lines.append(
            f"not included, because an earlier record in WAL has a later time: {quantity_text(late, 'transactions')}"
            f" on {where}"
        )
    if held := [node.node for node in point.nodes if node.is_held]:
        lines.append(
            f"{point_label(point.before.increment)} contains later commits of {list_some(held, NAMED_MAX)}: everything"
            " in it is included"
        )
    skew = f"the nodes' clocks differed by at most {point.skew_seconds:.3f} s at the cuts"
    warning = "warning: " * (point.skew_seconds > SKEW_SECONDS_MAX)
    lines.append(f"{warning}{skew}")
    lines.append(
        f"sequences, rows of extension tables, roles and settings are those of {point_label(point.after.increment)}"
    )
    return lines


def exact_lines(point: ExactPoint) -> list[str | RenderableType]:
    """Return the output of `show --at`."""
    name, cuts = point.chain.name, point.cut.by_node
    rows = [
        (
            node.node,
            str(node.position),
            node.last_commit_at or "",
            count_text(node.early),
            count_text(node.late),
            count_text(len(cuts[node.node].undecided)),
        )
        for node in point.nodes
    ]
    state, between, *limits = exact_plan_lines(point)
    lines: list[str | RenderableType] = [
        f"{name}, {state}",
        between,
        "",
        FittingTable(TITLES, rows, NUMBERS, IMPORTANT),
        "",
        *limits,
    ]
    if changed := point.find_changed(point.chain.primaries):
        tables = [table for found in changed.values() for table in found]
        what = f" ({list_some(tables, NAMED_MAX)})" if tables else ""
        return [
            *lines,
            f"can't be restored: definitions changed between the two cuts on {list_some(changed, NAMED_MAX)}{what};"
            f" restore {point_label(point.before.increment)} or {point_label(point.after.increment)}",
        ]
    return [
        *lines,
        f"to restore this state: snapshot restore {name} --at {exact_text(point.moment)} --exact   (with --replace in"
        " place of existing databases)",
        f"without --exact, --at restores {point_label(point.before.increment)}",
    ]
