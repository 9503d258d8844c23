"""`snapshot restore`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output.arguments import At, DryRun, Groups, Increment, Routes, SnapshotName, check_text, parse_moment
from cli.output.context import command_context
from cli.output.format import count_text, seconds_text, size_text
from cli.output.left_out import left_out_lines
from cli.output.results import emit, progress
from cli.spark.on_demand import SparkOnDemand
from cli.spark.protection import check_protection
from fleet.config import Fleet, load_fleet
from fleet.hints import NEW_CHAIN
from fleet.nodes.beside import OldDatabase
from fleet.progress import Noting, Progress
from fleet.record import to_builtins
from restore.abandoning import abandon_restore
from restore.abandoning import discard_old as discard_old_databases
from restore.plan import RestorePlan, plan_restore
from restore.preview import preview_restore
from restore.report import RestoreReport
from restore.request import RestoreRequest
from restore.restore import restore_fleet, resume_restore
from snapshots.listing.name_templates import newest_name
from storage.errors import RefusedError, UsageError

SLOT_NAME = re.compile(r"cutline_[a-z0-9_]+")
ENDS = ("--resume", "--abandon", "--discard-old")
SCHEMA, PLAN_SCHEMA = "cutline/restore/1", "cutline/restore-plan/1"
ABANDON_SCHEMA, DISCARD_SCHEMA = "cutline/restore-abandon/1", "cutline/restore-discard/1"


def restore(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    at: At = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Restore into the fleet that this file describes.")
    ] = None,
    group: Groups = None,
    route: Routes = None,
    replace: Annotated[bool, typer.Option("--replace", help="Rename existing databases and keep them.")] = False,
    create_roles: Annotated[bool, typer.Option("--create-roles", help="Create missing roles, without login.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a restore that ended unfinished.")] = False,
    abandon: Annotated[bool, typer.Option("--abandon", help="Undo a restore that ended unfinished.")] = False,
    discard_old: Annotated[
        bool, typer.Option("--discard-old", help="Drop the databases that --replace has put aside.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="On a terminal: replace or drop databases.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Restore the fleet's databases as they were at an increment."""
    source = command_context(context).load_fleet()
    check_protection(source.spark_master, source.spark_settings)
    target = load_fleet(to) if to else source
    name = newest_name(source, name)
    confirm = Confirmation(is_given=yes or not sys.stdin.isatty())
    if at is not None and increment is not None:
        raise UsageError("--increment and --at exclude each other", hint="give one of the two")
    check_text("--route", *(route or ()))
    moment = None if at is None else parse_moment("--at", at)
    groups, routes = tuple(group or ()), tuple(route or ())
    request = RestoreRequest(name, increment, moment, groups, routes, replace=replace, create_roles=create_roles)
    if ends := [word for word, is_set in zip(ENDS, (resume, abandon, discard_old), strict=True) if is_set]:
        if len(ends) > 1 or dry_run or request != RestoreRequest(name):
            raise UsageError(f"{ends[0]} takes no other options than --to and --yes", hint="leave the others out")
        end_restore(context, ends[0], source, target, name, confirm)
    elif dry_run:
        show_plan(context, plan_restore(source, target, request))
    else:
        plan = plan_restore(source, target, request)
        run_restore(context, source, name, lambda spark, shown: restore_fleet(plan, spark, shown, confirm.replacing))


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Asks for --yes, unless it is given or nobody is at a terminal."""

    is_given: bool

    def replacing(self, lines: list[str]) -> None:
        """Raise NotConfirmedError if there is something that the restore ends."""
        self._ask(lines, "--replace")

    def abandoning(self, lines: list[str]) -> None:
        """Raise NotConfirmedError if a database is dropped that users may have entered."""
        self._ask(lines, "--abandon")

    def dropping(self, old: list[OldDatabase]) -> None:
        """Raise NotConfirmedError if there is a database to drop."""
        self._ask([_old_text(one) for one in old], "--discard-old")

    def _ask(self, lines: list[str], option: str) -> None:
        if lines and not self.is_given:
            raise NotConfirmedError(
                f"{option} has to be confirmed: {'; '.join(lines)}",
                hint="nothing was changed; if this is meant, add --yes",
                details={"lines": lines},
            )


class NotConfirmedError(RefusedError):
    """Somebody at a terminal has not confirmed what can't be undone."""


def run_restore(
    context: typer.Context, source: Fleet, name: str, work: Callable[[SparkOnDemand, Progress], RestoreReport]
) -> None:
    """Run a restore, or the rest of one, and print its report."""
    with SparkOnDemand(source, f"restore {name}") as spark, progress(context) as shown:
        noting = Noting(shown)
        report = work(spark, noting)
    # With --quiet no progress has shown the notes.
    unseen = [f"warning: {text}" for text in noting.notes] if command_context(context).quiet else []
    emit(context, document_of(report) | {"warnings": noting.notes}, lines_of(report) + unseen)


def end_restore(
    context: typer.Context, how: str, source: Fleet, target: Fleet, name: str, confirm: Confirmation
) -> None:
    """Go on with an unfinished restore, undo it, or drop what restores have put aside."""
    if how == "--resume":
        run_restore(context, source, name, lambda spark, shown: resume_restore(source, target, name, spark, shown))
        return
    with progress(context) as shown:
        if how == "--abandon":
            report = abandon_restore(source, target, name, confirm.abandoning, shown)
            document = {"schema": ABANDON_SCHEMA, **to_builtins(asdict(report))}
            lines = [f"restore {one} is undone" for one in report.operations]
            lines += [f"restore {one} had published all its databases, and is recorded as done" for one in report.done]
            lines += [f"previous database has its name again on {one}" for one in sorted(report.put_back)]
            lines += [f"dropped on {one}" for one in sorted(report.dropped)]
        else:
            old = discard_old_databases(source, target, name, confirm.dropping, shown)
            document = {"schema": DISCARD_SCHEMA, "discarded": [asdict(one) for one in old]}
            lines = [f"dropped: {_old_text(one)}" for one in old]
            lines = lines or ["no database was put aside"]
    emit(context, document, lines)


def _old_text(one: OldDatabase) -> str:
    return f"database {one.database} of node {one.node}" + (
        f", {size_text(one.bytes)}" if one.bytes is not None else ""
    )


def show_plan(context: typer.Context, plan: RestorePlan) -> None:
    """Make all checks, and print what the restore would do."""
    with progress(context) as shown:
        preview = preview_restore(plan, shown)
    report = plan.report()
    report.left_out = preview.left_out
    lacking = preview.roles_missing
    missing = sorted({f"{one.node.id}: {role}" for one in plan.targets for role in lacking[one.shard]})
    document = document_of(report) | {"schema": PLAN_SCHEMA, "roles_missing": missing}
    document["ddl_not_tried"] = preview.untried
    document["replaces"] = preview.replaces
    lines = [_label(report, "would be restored"), *route_lines(report)]
    lines += [f"left out: {name}" for name in report.left_out]
    lines += preview.replaces
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"role would be created, without login, on {role}" for role in missing]
    lines += [one.text for one in report.open_operations]
    if preview.untried:
        where = ", ".join(preview.untried)
        lines.append(f"not tried, as the role is not a superuser: the DDL on {where}; the restore tries it first")
    if several := plan.topology is not None and len(plan.topology.sources) > 1:
        lines.append("not compared: the keys of the sources; the restore does that first")
    other = "other " * (bool(preview.untried) or several)
    emit(context, document, [*lines, f"every {other}check passed; nothing was changed"])


def document_of(report: RestoreReport) -> dict[str, Any]:
    """The command's JSON."""
    return {
        "schema": SCHEMA,
        "snapshot": report.snapshot,
        "increment": report.increment,
        "operation": report.operation,
        "seconds": round(report.seconds, 3),
        "rows": report.rows,
        "bytes": report.bytes,
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
        "routes": [one._asdict() for one in report.routes],
        "remarks": report.remarks,
        "open_operations": [one.to_json() for one in report.open_operations],
    }


def lines_of(report: RestoreReport) -> list[str]:
    """The output for people."""
    lines = [_label(report, "is restored") + f": {count_text(report.rows)} rows in {seconds_text(report.seconds)}"]
    lines += [f"{n.node}: database {n.database}, {count_text(n.rows)} rows" for n in report.nodes]
    lines += route_lines(report)
    lines += [f"previous database kept on {name}" for name in report.aside]
    for one in report.owner_changes:
        lines.append(
            f"{one.node}: database {one.database} belongs to {one.owner}, the previous one to {one.previous};"
            f" to give it back, run on {one.node}:"
        )
        lines.append(one.statement)
    lines += [f"role created, without login or password, on {name}" for name in report.roles_created]
    lines += [f"left out: {name}" for name in report.left_out]
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"slot dropped, its chain has ended, on {name}" for name in report.slots_dropped]
    lines += [line for name in report.slots_left for line in _slot_left_lines(name)]
    lines += [one.text for one in report.open_operations]
    if report.aside:
        lines.append(f"earlier snapshots of this fleet can get no more increments; {NEW_CHAIN}")
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


def _label(report: RestoreReport, what: str) -> str:
    return f"{report.snapshot} at increment {report.increment} ({size_text(report.bytes)} stored) {what}"
