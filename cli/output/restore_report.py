"""The reports on a restore and on a drill, as text and as JSON."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from msgspec import UNSET
from msgspec.structs import asdict, replace

from cutline.cli.output.arguments import command_context
from cutline.cli.output.exact_point import exact_document, exact_plan_lines, exact_text
from cutline.cli.output.junit import NO_ASSERTIONS
from cutline.cli.output.left_out import left_out_lines
from cutline.cli.output.results import show_preview, write_document
from cutline.cli.output.tables import age_text, count_text, quantity_text, seconds_text, size_text, time_text
from cutline.fleet.messages import NEW_CHAIN, NODES_NAMED_MAX, list_some
from cutline.fleet.record import to_builtins
from cutline.restore.drill.assertions import AssertionResult, rows_text
from cutline.restore.estimates.estimate import BegunShard, Estimate
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.plan.report import COUNT, RefusedStatement, RestoreReport
from cutline.restore.run.preview import RestorePreview
from cutline.restore.targets.databases import Phase
from cutline.restore.targets.requirements import DiskSpace
from cutline.snapshots.records.proven_chains import cut_time
from cutline.storage.clock import utc_now

if TYPE_CHECKING:
    from cutline.restore.drill.drill import DrillReport

NAMED_MAX = 20


def borrowed_document(report: RestoreReport) -> dict[str, Any]:
    """Return the JSON fields about damaged objects and copies of standbys."""
    return {
        "from_backup_copies": to_builtins(report.borrowed),
        "damaged": [{"object": damage.key, "node": damage.node, "kind": damage.kind} for damage in report.damaged],
    }


def borrowed_lines(report: RestoreReport, *, is_done: bool = True) -> list[str]:
    """Return a line for each damaged object, and for each copy that rows were taken from."""
    lines = [
        f"damaged: object {damage.key} of node {damage.node}: {damage.detail}" for damage in report.damaged[:NAMED_MAX]
    ]
    if (more := len(report.damaged) - NAMED_MAX) > 0:
        lines.append(f"… {more} more damaged objects; --json lists all of them")
    for rows in report.borrowed:
        more = len(rows.groups) - NAMED_MAX
        names = ", ".join(rows.groups[:NAMED_MAX]) + (f" and {more} more tables" if more > 0 else "")
        lines.append(f"{'taken' if is_done else 'to take'} from the copy of {rows.node} for {rows.shard}: {names}")
    return lines


def plan_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """Return the first lines of a restore's plan."""
    chain, volumes, now = plan.chain, preview.volumes, utc_now()
    made_at = cut_time(chain.last)
    number = f"increment {chain.last.increment}" if chain.last.increment else "the full snapshot"
    if plan.exact:
        lines = [f"source: {chain.name}, from {plan.store.open().url}", *exact_plan_lines(plan.exact)]
    else:
        lines = [
            f"source: {chain.name} at {number}, from {plan.store.open().url}",
            f"cut: {time_text(made_at)}, {age_text(made_at, now=now)}",
        ]
    if plan.request.at and plan.request.at > utc_now():
        lines.append("warning: --at is in the future, so the newest cut is restored; check the UTC offset")
    if plan.next_cut:
        after = chain.last.increment + 1
        lines.append(f"the next cut, that of increment {after}, is after --at: {time_text(plan.next_cut)}")
        lines.append("to restore the state at --at itself, add --exact")
    where = "into the tables of" if plan.request.scope.data_only else "to"
    for target in plan.targets:
        begun = preview.begun.get(target.shard)
        if (volume := volumes.get(target.shard)) is None:
            if begun:
                lacks = "the values of its sequences" if plan.request.scope.data_only else "its name"
                done = "already published" if begun.phase == Phase.PUBLISHED else f"already done except for {lacks}"
                rows = quantity_text(begun.rows, "rows")
                lines.append(f"{target.shard} to database {target.database}: {rows}, {done}")
            continue
        about = _about(is_rough=volume.changes_are_rough and not volume.rows_are_rough)
        changes = f" and {about}{quantity_text(volume.changes, 'changes')}" if volume.changes else ""
        lines.append(
            f"{target.shard} {where} database {target.database} on {preview.servers[target.shard]}:"
            f" {_about(is_rough=volume.rows_are_rough)}{quantity_text(volume.row_count, 'rows')}{changes},"
            f" {size_text(volume.stored_bytes)} stored,"
            f" {_about(is_rough=volume.is_rough)}{size_text(volume.size_bytes)} on disk{_loaded_text(begun)}"
        )
    lines += ["then: ANALYZE every table"] * plan.request.scope.analyze
    return [*lines, time_line(preview.estimate), *map(_disk_line, preview.disks)]


def _loaded_text(begun: BegunShard | None) -> str:
    if begun is None or not (begun.rows or begun.is_loaded):
        return ""
    return f"; {'all ' if begun.is_loaded else ''}{count_text(begun.rows)} rows are already loaded"


def time_line(estimate: Estimate) -> str:
    """Return the line of the plan with the time that the restore takes."""
    least, most = estimate.bounds
    if not estimate.basis:
        # Nothing is known about the servers. The minimum is so much shorter that it would tell nothing.
        unmeasured = "no restore of all rows from this store has been measured yet"
        return f"time: at most about {seconds_text(most)}, updated as it runs ({unmeasured})"
    if not estimate.is_rough:
        return f"time: about {seconds_text(estimate.total)}, based on {estimate.basis}"
    return f"time: {seconds_text(least)} to {seconds_text(most)}, updated as it runs, based on {estimate.basis}"


def _disk_line(disk: DiskSpace) -> str:
    why = (
        "the role is not allowed to see the server's data_directory"
        if disk.is_hidden
        else "the server is not running on this machine, or its data can't be read here"
    )
    free = f"free space unknown: {why}" if disk.free_bytes is None else f"{size_text(disk.free_bytes)} free"
    needed = f"{_about(is_rough=disk.is_rough)}{size_text(disk.needed_bytes)} needed"
    return f"disk of {list_some(disk.nodes, NODES_NAMED_MAX)}: {needed}, {free}"


def _about(*, is_rough: bool) -> str:
    return "roughly " if is_rough else ""


def plan_document(plan: RestorePlan, preview: RestorePreview) -> dict[str, Any]:
    """Return the plan as JSON."""
    made_at = cut_time(plan.chain.last)
    estimate = preview.estimate
    return {
        "store": plan.store.open().url,
        "cut_at": time_text(made_at),
        "next_cut_at": time_text(plan.next_cut) if plan.next_cut else None,
        "age_seconds": round((utc_now() - made_at).total_seconds(), 3),
        "targets": [
            {
                "shard": target.shard,
                "sources": target.sources or (target.shard,),
                "node": target.node.id,
                "database": target.database,
                "server": preview.servers[target.shard],
                "rows": volume.row_count,
                "rows_are_rough": volume.rows_are_rough,
                "changes": volume.changes,
                "changes_are_rough": volume.changes_are_rough,
                "bytes": volume.stored_bytes,
                "size_bytes": volume.size_bytes,
                "size_is_rough": volume.is_rough,
                **_begun_document(preview.begun.get(target.shard)),
            }
            for target in plan.targets
            if (volume := preview.volumes.get(target.shard)) is not None
        ],
        "done": [
            {"shard": target.shard, "node": target.node.id, "database": target.database, **_begun_document(begun)}
            for target in plan.targets
            if (begun := preview.begun.get(target.shard)) is not None and target.shard not in preview.volumes
        ],
        "seconds": round(estimate.total, 3),
        "seconds_by_step": {step: round(seconds, 3) for step, seconds in estimate.seconds.items()},
        "seconds_min": round(estimate.bounds[0], 3),
        "seconds_max": round(estimate.bounds[1], 3),
        "seconds_are_rough": estimate.is_rough,
        "based_on": estimate.basis or None,
        "disks": [
            {
                "nodes": disk.nodes,
                "needed_bytes": disk.needed_bytes,
                "free_bytes": disk.free_bytes,
                "is_rough": disk.is_rough,
            }
            for disk in preview.disks
        ],
    }


def _begun_document(begun: BegunShard | None) -> dict[str, Any]:
    return {"phase": begun.phase if begun else None, "rows_loaded": begun.rows if begun else 0}


DIFFERENCES_SHOWN_MAX = 10
# How many items of each kind a restore's plan names without --verbose, if the restore starts right afterwards.
SHOWN_IN_BRIEF = 3
# If there are this many items or more, they are only counted.
COUNTED_MIN = 4
ALL_IN_JSON = "--json lists all of them"
SCHEMA, PLAN_SCHEMA = "cutline/restore/1", "cutline/restore-plan/1"
DRILL_SCHEMA = "cutline/drill/1"


def document_of(report: RestoreReport) -> dict[str, Any]:
    """Return the command's JSON output."""
    return {
        "schema": SCHEMA,
        "snapshot": report.snapshot,
        "increment": report.increment,
        "cut_at": time_text(report.cut_at) if report.cut_at else None,
        "safe_at": report.safe_at,
        "exact": exact_document(report.exact) if report.exact else None,
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
        "open_operations": [open_operation.to_json() for open_operation in report.open_operations],
        "transactions": None if report.in_doubt is None else [transaction.to_json() for transaction in report.in_doubt],
        **borrowed_document(report),
        "warnings": report.warnings,
        "moved": report.moved,
        "routes": [route._asdict() for route in report.routes],
        "remarks": report.remarks,
        "scope": to_builtins(report.scope),
        "refused": [statement.document() for statement in report.refused],
        "search_path_needed": [asdict(needed) for needed in report.needed_paths],
        "role_differences": report.role_differences,
    }


def lines_of(
    report: RestoreReport,
    others: Iterable[str] = (),
    shown: Collection[str] = (),
    *,
    is_announced: bool = False,
    is_verbose: bool = False,
) -> list[str]:
    """Return the human-readable output, with `others` before the result; details only if it `is_verbose`.

    If the plan `is_announced`, it has already named the items left out, the role differences, the sources of rows, and
    the warnings that were `shown`.
    """
    lines = _detail_lines(report) if is_verbose else []
    if is_verbose or not is_announced:
        lines += [*route_lines(report), *(f"restored under another name on {one}" for one in report.moved)]
        lines += [*borrowed_lines(report), *(f"role created on {name}" for name in report.roles_created)]
    if not is_announced:
        lines += difference_lines(report.role_differences)
        lines += [f"left out: {name}" for name in report.left_out]
        lines += left_out_lines(report.not_in_snapshot)
        lines += [one.text for one in report.open_operations]
    lines += [f"warning: {text}" for text in report.warnings if text not in shown]
    lines += [needed.text() for needed in report.needed_paths] if is_verbose else []
    lines += refused_lines("refused", report.refused, "the file lists all of them")
    for owner_change in report.owner_changes:
        lines.append(
            f"{owner_change.node}: database {owner_change.database} belongs to {owner_change.owner},"
            f" the previous one belonged to {owner_change.previous};"
            f" to restore the ownership, run on {owner_change.node}:"
        )
        lines.append(owner_change.statement)
    lines += [f"previous database kept: {name} on {nodes}" for name, nodes in _by_name(report.aside)]
    lines += [f"chain ended: slot {name} dropped on {nodes}" for name, nodes in _by_name(report.slots_dropped)]
    lines += [line for name in report.slots_left for line in _slot_left_lines(name)]
    if report.slots_dropped or report.slots_left:
        lines.append(f"for further increments, {NEW_CHAIN}")
    return [
        *lines,
        *others,
        f"{_label(report)}: {quantity_text(report.rows, 'rows')} in {seconds_text(report.seconds)}",
    ]


def _detail_lines(report: RestoreReport) -> list[str]:
    lines = list[str]()
    if (wal := report.wal) and report.increment:
        changes, transactions = quantity_text(wal.changes, "changes"), quantity_text(wal.transactions, "transactions")
        lines.append(f"WAL: {changes} in {transactions}, {size_text(wal.bytes)}, read in {seconds_text(wal.seconds)}")
    return lines + [f"{n.node}: database {n.database}, {quantity_text(n.rows, 'rows')}" for n in report.nodes]


def _by_name(places: Iterable[str]) -> list[tuple[str, str]]:
    """Group texts such as `node: name` by name; return each name with its nodes."""
    nodes = dict[str, list[str]]()
    for place in places:
        node, _, name = place.partition(": ")
        nodes.setdefault(name, []).append(node)
    return [(name, list_some(found, NODES_NAMED_MAX)) for name, found in nodes.items()]


def difference_lines(found: Sequence[str], shown: int = DIFFERENCES_SHOWN_MAX) -> list[str]:
    """Describe how roles differ, with at most `shown` differences; JSON contains all of them."""
    return _shorten([f"differs: {one}" for one in found], shown, "role differences: --json lists all of them")


def _shorten(lines: list[str], shown: int, rest: str) -> list[str]:
    more = len(lines) - shown
    return [*lines[:shown], f"… and {count_text(more)} more {rest}"] if more > 0 else lines


def refused_lines(word: str, refused: Sequence[RefusedStatement], all_of_them: str = ALL_IN_JSON) -> list[str]:
    """Describe the refused statements; if many are privileges, only count them, and add a reason and `all_of_them`."""
    reasons = {statement.counted: statement.reason for statement in reversed(refused) if statement.counted}
    found = [
        (statement.text(), statement.counted and f"{statement.counted} ({reasons[statement.counted]})")
        for statement in refused
    ]
    return [f"{word}: {line}" for line in _counted_lines(found, all_of_them)]


def _counted_lines(found: Iterable[tuple[str, str]], all_of_them: str = ALL_IN_JSON) -> list[str]:
    """Return the texts; if there are many of one kind, which contains COUNT, return their number instead.

    The kind "" is never counted.
    """
    crowds: dict[tuple[str, str], list[str]] = {}
    for text, counted in found:
        crowds.setdefault((counted, "" if counted else text), []).append(text)
    lines = list[str]()
    for (counted, _), texts in crowds.items():
        is_many = bool(counted) and len(texts) >= COUNTED_MIN
        lines += [f"{counted.replace(COUNT, count_text(len(texts)), 1)}: {all_of_them}"] if is_many else texts
    return lines


def left_out_texts(
    left_out: Iterable[str], counted: Mapping[str, str], rows_left: Collection[str], shown: int | None = None
) -> list[str]:
    """Return the lines about omissions: all that are in `rows_left`, then the others, at most `shown` of them.

    `counted` is as in CheckedDdl.
    """
    found = [(line, counted.get(line, "")) for line in left_out]
    rows = [f"left out: {text}" for text in _counted_lines(one for one in found if one[0] in rows_left)]
    others = [f"left out: {text}" for text in _counted_lines(one for one in found if one[0] not in rows_left)]
    return rows + (others if shown is None else _shorten(others, shown, "items: --verbose lists all of them"))


def route_lines(report: RestoreReport) -> list[str]:
    """Describe how rows are divided among targets that are not the snapshot's shards, and the consequences."""
    return [*report.remarks, *(f"{route.table} by {route.route}" for route in report.routes)]


def _slot_left_lines(name: str) -> list[str]:
    """Return the lines about a slot, `node: slot`, that was not dropped, with the statement that drops it."""
    node, _, slot = name.rpartition(": ")
    return [
        f"warning: slot not dropped, so it retains WAL, on {name}; to drop it, run as a superuser on {node} (if it is"
        " down, once it is back):",
        f"SELECT pg_drop_replication_slot('{slot}');",
    ]


def _label(report: RestoreReport) -> str:
    return f"{state_label(report)} ({size_text(report.bytes)} stored) is restored"


def state_label(report: RestoreReport) -> str:
    """Return the name of the restored state."""
    if report.exact:
        return f"{report.snapshot} at {exact_text(report.exact.moment)}"
    return f"{report.snapshot} at increment {report.increment}"


def preview_document(plan: RestorePlan, preview: RestorePreview) -> dict[str, Any]:
    """Return the JSON output of a dry run."""
    return document_of(plan.report()) | {
        "schema": PLAN_SCHEMA,
        "left_out": preview.left_out,
        "roles_missing": _missing_roles(plan, preview),
        "ddl_not_tried": preview.untried,
        "role_differences": preview.role_differences,
        "refused": [statement.document() for statement in preview.refused],
        "replaces": preview.replaces,
        "warnings": [*plan.report().warnings, *preview.warnings],
        "plan": plan_document(plan, preview),
    }


def preview_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """Return the human-readable plan of a restore, once all checks have passed."""
    return _plan_lines(plan, preview, [*plan.report().warnings, *preview.warnings], preview.replaces)


def _plan_lines(
    plan: RestorePlan,
    preview: RestorePreview,
    warnings: Iterable[str],
    replaces: Iterable[str],
    shown: int | None = None,
) -> list[str]:
    """Return the lines of a plan; with `shown`, at most that many role differences and left-out items besides rows."""
    report = plan.report()
    lines = [*plan_lines(plan, preview), *route_lines(report)]
    lines += left_out_texts(preview.left_out, preview.counted, preview.rows_left, shown)
    lines += [f"restored under another name on {one}" for one in report.moved]
    lines += [f"warning: {text}" for text in warnings]
    lines += difference_lines(preview.role_differences, shown or DIFFERENCES_SHOWN_MAX)
    lines += replaces
    lines += borrowed_lines(report, is_done=False)
    lines += left_out_lines(report.not_in_snapshot)
    lines += [f"role to create on {nodes}: {role}" for role, nodes in _by_name(_missing_roles(plan, preview))]
    return lines + [operation.text for operation in report.open_operations]


def announce_plan(
    context: typer.Context, announced: dict[str, Any], plan: RestorePlan, preview: RestorePreview
) -> None:
    """Show the plan, and keep it for the JSON output; with `--json`, also write it to stderr at once, as one line."""
    announced["plan"] = plan_document(plan, preview)
    options = command_context(context)
    if options.json and not options.quiet:
        write_document(preview_document(plan, preview), sys.stderr)
    # The JSON result contains all warnings; the human-readable result contains only those that were not shown.
    announced["warnings"] = [] if options.quiet else list(plan.report().warnings)
    # Progress shows the other warnings, and the effects of --replace.
    brief = None if options.verbose else SHOWN_IN_BRIEF
    show_preview(context, _plan_lines(plan, preview, announced["warnings"], [], brief))


def dry_run_lines(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    """Return the human-readable output of a dry run."""
    lines = preview_lines(plan, preview)
    lines += refused_lines("refused, and left out", preview.refused)
    if preview.untried:
        where = ", ".join(preview.untried)
        lines.append(f"not rehearsed: the DDL on {where}; the restore rehearses it before it loads any rows")
    if several := plan.topology is not None and len(plan.topology.sources) > 1:
        lines.append("not compared: the sources' keys; the restore compares them first")
    if is_unread := plan.request.use_backup_copies:
        lines.append("not read: the objects; the restore reads them first, and chooses the copies")
    other = "other " * (bool(preview.untried) or several or is_unread)
    return [*lines, f"every {other}check passed; nothing was changed"]


def _missing_roles(plan: RestorePlan, preview: RestorePreview) -> list[str]:
    return sorted(
        {f"{target.node.id}: {role}" for target in plan.targets for role in preview.roles_missing.get(target.shard, [])}
    )


SQL_SHOWN_MAX = 100


def drill_document(report: DrillReport) -> dict[str, Any]:
    """Return the command's JSON output."""
    restored = report.restored
    return {
        "schema": DRILL_SCHEMA,
        "result": report.result,
        "snapshot": restored.snapshot,
        "increment": restored.increment,
        "exact": exact_document(restored.exact) if restored.exact else None,
        "seconds": round(report.seconds, 3),
        "rows": restored.rows,
        "bytes": restored.bytes,
        "nodes": [{"node": n.node, "rows": n.rows, "seconds": round(n.seconds, 3)} for n in restored.nodes],
        "left_out": restored.left_out,
        "refused": [statement.document() for statement in restored.refused],
        "search_path_needed": [asdict(needed) for needed in restored.needed_paths],
        "warnings": restored.warnings,
        "assertions": [_assertion_document(assertion) for assertion in report.assertions],
        **borrowed_document(restored),
    }


def _assertion_document(one: AssertionResult) -> dict[str, Any]:
    assertion = one.assertion
    return {
        "node": assertion.node,
        "sql": assertion.sql,
        "expected": None if assertion.expected is UNSET else to_builtins(assertion.expected),
        "found": [list(row) for row in one.found],
        "holds": one.holds,
        "why": one.why,
        "seconds": round(one.seconds, 3),
    }


def drill_lines(report: DrillReport, shown: Collection[str] = ()) -> list[str]:
    """Return the human-readable output; the plan has already named the items left out, and the warnings `shown`."""
    restored = report.restored
    size, rows, seconds = (
        size_text(restored.bytes),
        quantity_text(restored.rows, "rows"),
        seconds_text(restored.seconds),
    )
    lines = [f"{state_label(restored)} ({size} stored): {rows} restored in {seconds}"]
    lines += [f"{node.node}: {quantity_text(node.rows, 'rows')}" for node in restored.nodes]
    lines += borrowed_lines(restored)
    lines += [f"warning: {text}" for text in restored.warnings if text not in shown]
    lines += refused_lines("refused", restored.refused)
    lines += [_assertion_line(assertion) for assertion in report.assertions] or [f"skipped: {NO_ASSERTIONS}"]
    return [*lines, f"{report.result}, {seconds_text(report.seconds)}"]


def _assertion_line(one: AssertionResult) -> str:
    sql = " ".join(one.assertion.sql.split())
    what = f"{one.assertion.node}: {sql[:SQL_SHOWN_MAX]}{'…' * (len(sql) > SQL_SHOWN_MAX)}"
    if one.holds:
        return f"holds: {what}: {rows_text(one.found)}"
    return f"{'skipped' if one.holds is None else 'FAILS'}: {what}: {one.why}"
