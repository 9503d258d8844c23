"""What `merge --drop-earlier` and `prune` give up of a merged chain: its beginning, before a merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutline.cli.output.failure import DONE, REFUSED
from cutline.cli.output.tables import quantity_text, size_text
from cutline.snapshots.removal.earlier_objects import DropPlan, DropResult

# In a bucket with Object Lock, all objects of a chain may be refused: thousands.
REFUSALS_SHOWN_MAX = 3


def drop_text(plan: DropPlan) -> str:
    """Return what is removed, in one line."""
    objects, size = quantity_text(plan.total.objects, "objects"), size_text(plan.total.size_bytes)
    return f"{quantity_text(len(plan.points), 'restore points')} before increment {plan.first}, {objects} ({size})"


def drop_document(plan: DropPlan) -> dict[str, Any]:
    """Return a plan as JSON: the increments that are given up (0 is the full snapshot), and the objects."""
    return {
        "snapshot": plan.snapshot,
        "begins_at": plan.first,
        "increments": list(plan.points),
        "objects": plan.total.objects,
        "bytes": plan.total.size_bytes,
    }


def dropped_document(result: DropResult) -> dict[str, Any]:
    """Return a result as JSON: as for the plan, with the objects that the store refused to remove."""
    return {
        **drop_document(result.plan),
        "objects": result.total.objects,
        "bytes": result.total.size_bytes,
        "refused": [{"object": key, "why": why} for key, why in result.refused.items()],
    }


def dropped_lines(result: DropResult) -> list[str]:
    """Return a result as human-readable lines."""
    return [f"removed: {drop_text(result.plan)}", *undeleted_lines(result.refused)]


def undeleted_lines(refused: Mapping[str, str]) -> list[str]:
    """Return the store's first reasons for refusing to delete objects, by key, and count the others."""
    lines = [f"warning: {why}" for why in list(refused.values())[:REFUSALS_SHOWN_MAX]]
    if len(refused) > REFUSALS_SHOWN_MAX:
        lines.append(f"warning: the store refused to delete {len(refused):,} objects: --json lists all of them")
    return lines


def code_of_drop(result: DropResult) -> int:
    """Return the exit code for a result."""
    return REFUSED if result.refused else DONE
