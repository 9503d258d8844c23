"""What a restore has done, or would do, as JSON and for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

import typer

from cutline.cli.output.borrowed import borrowed_document, borrowed_lines
from cutline.cli.output.context import command_context
from cutline.cli.output.format import quantity_text, seconds_text, size_text, time_text
from cutline.cli.output.left_out import left_out_lines
from cutline.cli.output.restore_plan import plan_document, plan_lines
from cutline.cli.output.results import show_preview, write_document
from cutline.fleet.hints import NEW_CHAIN
from cutline.fleet.record import to_builtins
from cutline.restore.plan import RestorePlan
from cutline.restore.preview import RestorePreview
from cutline.restore.report import RefusedStatement, RestoreReport

SLOT_NAME = re.compile(r"cutline_[a-z0-9_]+")
DIFFERENCES_SHOWN_MAX = 10
# Of so many, people read the number.
COUNTED_MIN = 4
ALL_IN_JSON = "--json names each"
SCHEMA, PLAN_SCHEMA = "cutline/restore/1", "cutline/restore-plan/1"


def document_of(report: RestoreReport) -> dict[str, Any]:
    """The command's JSON."""
    return {
        "schema": SCHEMA,
        "snapshot": report.snapshot,
        "increment": report.increment,
        "cut_at": time_text(report.cut_at) if report.cut_at else None,
        "safe_at": report.safe_at,
        "operation": report.operation,
        "seconds": round(report.seconds, 3),
        "rows": report.rows,
        "bytes": report.bytes,
        "wal": asdict(replace(report.wal, seconds=round(report.wal.seconds, 3))) if report.wal else None,
        "nodes": [
            {"node": n.node, "database": n.database, "rows": n.rows, "seconds": round(n.seconds, 3)}
            for n in report.nodes
        ],
        "aside": report.aside,
        "resumed": report.is_resumed,
        "roles_created": report.roles_created,
        "left_out": report.left_out,
        "not_in_snapshot": to_builtins(report.not_in_snapshot),
        "slots_dropped": report.slots_dropped,
        "slots_left": report.slots_left,
        "owner_changes": to_builtins(report.owner_changes),
        "open_operations": [one.to_json() for one in report.open_operations],
        "transactions": None if report.in_doubt is None else [one.to_json() for one in report.in_doubt],
        **borrowed_document(report),
        "warnings": report.warnings,
        "moved": report.moved,
        "routes": [one._asdict() for one in report.routes],
        "remarks": report.remarks,
        "scope": to_builtins(report.scope),
        "refused": [one.document() for one in report.refused],
        "role_differences": report.role_differences,
    }


def lines_of(report: RestoreReport, *, is_announced: bool = False) -> list[str]:
    """The output for people. If its plan `is_announced`, they have read there what is left out and how roles differ."""
    lines = [f"{_label(report)}: {quantity_text(report.rows, 'rows')} in {seconds_text(report.seconds)}"]
    if (wal := report.wal) and report.increment:
        changes, transactions = quantity_text(wal.changes, "changes"), quantity_text(wal.transactions, "transactions")
        lines.append(f"WAL: {changes} in {transactions}, {size_text(wal.bytes)}, read in {seconds_text(wal.seconds)}")
    lines += [f"{n.node}: database {n.database}, {quantity_text(n.rows, 'rows')}" for n in report.nodes]
    lines += route_lines(report)
    lines += [f"restored under another name on {one}" for one in report.moved]
    lines += [f"warning: {text}" for text in report.warnings]
    lines += [f"previous database kept on {name}" for name in report.aside]
    for one in report.owner_changes:
        lines.append(
            f"{one.node}: database {one.database} belongs to {one.owner}, the previous one to {one.previous};"
            f" to give it back, run on {one.node}:"
        )
        lines.append(one.statement)
    lines += refused_lines("refused", report.refused, "the file of them has each")
    lines += borrowed_lines(report)
    lines += [f"role created on {name}" for name in report.roles_created]
    if not is_announced:
        lines += difference_lines(report.role_differences)
        lines += [f"left out: {name}" for name in report.left_out]
        lines += left_out_lines(report.not_in_snapshot)
    lines += [f"slot dropped, its chain has ended, on {name}" for name in report.slots_dropped]
    lines += [line for name in report.slots_left for line in _slot_left_lines(name)]
    lines += [one.text for one in report.open_operations]
    if report.slots_dropped or report.slots_left:
        lines.append(
            "earlier snapshots of the databases that were put aside can get no more increments; for theirs,"
            f" {NEW_CHAIN}"
        )
    return lines


def difference_lines(found: Sequence[str]) -> list[str]:
    """How roles differ, the first of many; JSON has all."""
    more = len(found) - DIFFERENCES_SHOWN_MAX
    rest = [f"… and {more} more differences of roles: --json has all"] if more > 0 else []
    return [f"differs: {one}" for one in found[:DIFFERENCES_SHOWN_MAX]] + rest


def refused_lines(word: str, refused: Sequence[RefusedStatement], all_of_them: str = ALL_IN_JSON) -> list[str]:
    """What was refused; of many privileges their number, the first reason, and where `all_of_them` are."""
    reasons = {one.counted: one.reason for one in reversed(refused) if one.counted}
    found = [(one.text(), one.counted and f"{one.counted} ({reasons[one.counted]})") for one in refused]
    return [f"{word}: {line}" for line in _counted_lines(found, all_of_them)]


def _counted_lines(found: Iterable[tuple[str, str]], all_of_them: str = ALL_IN_JSON) -> list[str]:
    """The texts, each given with what many like it are counted as; "" is never counted."""
    crowds: dict[tuple[str, str], list[str]] = {}
    for text, counted in found:
        crowds.setdefault((counted, "" if counted else text), []).append(text)
    lines = list[str]()
    for (counted, _), texts in crowds.items():
        is_many = bool(counted) and len(texts) >= COUNTED_MIN
        lines += [f"privileges of {len(texts)} {counted}: {all_of_them}"] if is_many else texts
    return lines


def route_lines(report: RestoreReport) -> list[str]:
    """How rows are divided among targets that are not the snapshot's shards, and what that means for other things."""
    return [*report.remarks, *(f"{one.table} by {one.route}" for one in report.routes)]


def _slot_left_lines(name: str) -> list[str]:
    """The lines on a slot, `node: slot`, that was not dropped, with the statement that drops it."""
    line = f"warning: slot not dropped, it keeps WAL until it is, on {name}"
    node, _, slot = name.rpartition(": ")
    if not SLOT_NAME.fullmatch(slot):
        # The node was not reachable, so the slots have no names here.
        return [f"{line}; to drop them, drop that database if it is not needed"]
    return [f"{line}; to drop it, run as a superuser on {node}:", f"SELECT pg_drop_replication_slot('{slot}');"]


def _label(report: RestoreReport) -> str:
    return f"{report.snapshot} at increment {report.increment} ({size_text(report.bytes)} stored) is restored"


def preview_document(plan: RestorePlan, preview: RestorePreview) -> dict[str, Any]:
    """The JSON of a restore that only makes its checks."""
    return document_of(plan.report()) | {
        "schema": PLAN_SCHEMA,
        "left_out": preview.left_out,
        "roles_missing": _missing_roles(plan, preview),
        "ddl_not_tried": preview.untried,
        "role_differences": preview.role_differences,
        "refused": [one.document() for one in preview.refused],
        "replaces": preview.replaces,
        "warnings": [*plan.report().warnings, *preview.warnings],
        "plan": plan_document(plan, preview),
    }


def preview_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """What a restore would do, for people, once all checks have passed."""
    report = plan.report()
    lines = [*plan_lines(plan, preview), *route_lines(report)]
    left_out = [(line, preview.counted.get(line, "")) for line in preview.left_out]
    lines += [f"left out: {line}" for line in _counted_lines(left_out)]
    lines += [f"restored under another name on {one}" for one in report.moved]
    lines += [f"warning: {text}" for text in (*report.warnings, *preview.warnings)]
    lines += difference_lines(preview.role_differences)
    lines += preview.replaces
    lines += borrowed_lines(report, is_done=False)
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"role to create on {role}" for role in _missing_roles(plan, preview)]
    return lines + [one.text for one in report.open_operations]


def announce_plan(
    context: typer.Context, announced: dict[str, Any], plan: RestorePlan, preview: RestorePreview
) -> None:
    """Show what will be done, and keep it for the command's JSON; with `--json` it is a line of stderr at once."""
    announced["plan"] = plan_document(plan, preview)
    if command_context(context).json and not command_context(context).quiet:
        write_document(preview_document(plan, preview), sys.stderr)
    # Progress shows the warnings, and what --replace ends.
    show_preview(context, preview_lines(plan, replace(preview, warnings=[], replaces=[])))


def dry_run_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """The output for people of a restore that only makes its checks."""
    lines = preview_lines(plan, preview)
    lines += refused_lines("refused, and left out", preview.refused)
    if preview.untried:
        where = ", ".join(preview.untried)
        lines.append(f"not rehearsed: the DDL on {where}; the restore does that before it loads any row")
    if several := plan.topology is not None and len(plan.topology.sources) > 1:
        lines.append("not compared: the keys of the sources; the restore does that first")
    other = "other " * (bool(preview.untried) or several)
    return [*lines, f"every {other}check passed; nothing was changed"]


def _missing_roles(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    return sorted(
        {f"{one.node.id}: {role}" for one in plan.targets for role in preview.roles_missing.get(one.shard, [])}
    )
