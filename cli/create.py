"""`snapshot create`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cli.arguments import DryRun, Groups, SnapshotName
from cli.context import command_context
from cli.format import causes_lines, count_text, seconds_text, size_text
from cli.left_out import left_out_lines
from cli.output import emit, progress
from cli.spark_session import SparkOnDemand
from fleet.lsn import lsn_to_text
from fleet.progress import Noting
from snapshots.create import CreateRequest, FullPlan, create_full, estimate_full
from snapshots.increment import create_increment, estimate_increment
from snapshots.manifest import Commit
from storage.errors import UsageError

SCHEMA, PLAN_SCHEMA = "cutline/create/1", "cutline/create-plan/1"


def create(
    context: typer.Context,
    name: SnapshotName,
    *,
    incremental: Annotated[bool, typer.Option("--incremental", help="The next increment of NAME.")] = False,
    only_primary: Annotated[bool, typer.Option("--only-primary", help="No copies of the standbys.")] = False,
    group: Groups = None,
    exclude_group: Annotated[
        list[str] | None, typer.Option(metavar="S.T", help="Leave these tables out (repeatable; * and ?).")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="How often an inconsistent cut is made again.")] = 3,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Full snapshot: time for older transactions to end.")
    ] = 60.0,
    comment: Annotated[str, typer.Option(help="A line that list and show print.")] = "",
    dry_run: DryRun = False,
) -> None:
    """Take a full snapshot, or with --incremental its next increment."""
    if incremental and (only_primary or group or exclude_group):
        raise UsageError(
            "an increment has the nodes and tables of its full snapshot",
            hint="leave out --only-primary, --group and --exclude-group",
        )
    options = command_context(context)
    fleet = options.load_fleet()
    request = CreateRequest(name, only_primary, tuple(group or ()), tuple(exclude_group or ()), retries, wait, comment)
    if dry_run:
        with progress(context) as shown:
            noting = Noting(shown)
            if incremental:
                planned = estimate_increment(fleet, request, noting)
                document: dict[str, Any] = {"schema": PLAN_SCHEMA, "snapshot": name, "wal_bytes": planned.wal_bytes}
                lines = [f"{node}: {size_text(size)} of WAL to archive" for node, size in planned.wal_bytes.items()]
                left_out = planned.left_out
            else:
                plan = estimate_full(fleet, request, noting)
                document, lines, left_out = plan_document(name, plan), plan_lines(plan), plan.left_out
        document |= {"left_out": [one.to_json() for one in left_out], "warnings": noting.notes}
        lines += left_out_lines(left_out)
        emit(context, document, [*lines, "every check passed; nothing was changed"])
        return
    with SparkOnDemand(fleet, f"create {name}") as spark, progress(context) as shown:
        noting = Noting(shown)
        commit = (create_increment if incremental else create_full)(fleet, request, spark, noting)
    # Where progress is not shown nobody has seen the notes yet.
    unseen = [f"warning: {text}" for text in noting.notes] if options.quiet else []
    emit(context, document_of(commit) | {"warnings": noting.notes}, lines_of(commit) + unseen)


def document_of(commit: Commit) -> dict[str, Any]:
    """The command's JSON."""
    cut = commit.cut
    return {
        "schema": SCHEMA,
        "snapshot": commit.snapshot,
        "increment": commit.increment,
        "operation": commit.operation,
        "created_at": commit.created_at,
        "seconds": round(commit.seconds, 3),
        **{name: commit.counts[name] for name in ("bytes", "objects", "rows", "changes", "transactions")},
        "cut": {
            "id": cut.id,
            "attempts": cut.attempts,
            "causes": list(cut.causes),
            "seconds": round(cut.seconds, 6),
            "nodes": [
                {
                    "node": node,
                    "start": lsn_to_text(found.start),
                    "finish": lsn_to_text(found.finish),
                    "position": lsn_to_text(found.position),
                }
                for node, found in cut.cut.nodes.items()
            ],
            "global_transactions": cut.cut.global_transactions,
            "included_early": cut.cut.included_early,
            "in_flight": cut.cut.in_flight,
        },
        "left_out": [one.to_json() for one in commit.left_out or ()],
    }


def lines_of(commit: Commit) -> list[str]:
    """What a person is told."""
    counts, cut = commit.counts, commit.cut
    what = f"increment {commit.increment} of {commit.snapshot}" if commit.increment else f"snapshot {commit.snapshot}"
    rows = f"{count_text(counts['rows'])} rows, " if counts["rows"] else ""
    lines = [
        f"{what} is committed: {rows}{count_text(counts['changes'])} changes in "
        f"{count_text(counts['transactions'])} transactions, {size_text(counts['bytes'])} in {counts['objects']} "
        f"objects, {seconds_text(commit.seconds)}",
        f"the cut took {cut.seconds * 1000:.1f} ms on {len(cut.cut.nodes)} shards"
        + (f" in attempt {cut.attempts}" if cut.attempts > 1 else "")
        + f": {count_text(cut.cut.global_transactions)} global transactions, {cut.cut.in_flight} in flight across it, "
        f"{cut.cut.included_early} of them included",
    ]
    return lines + causes_lines(cut.causes) + left_out_lines(commit.left_out or ())


def plan_document(name: str, plan: FullPlan) -> dict[str, Any]:
    """The JSON of a full snapshot's --dry-run."""
    tables = {
        shard: [
            {
                "group": t.group.name,
                "identity": t.group.identity,
                "rows_estimate": t.rows_estimate,
                "bytes": t.size_bytes,
            }
            for t in found
        ]
        for shard, found in plan.tables.items()
    }
    return {"schema": PLAN_SCHEMA, "snapshot": name, "nodes": [node.id for node in plan.nodes], "groups": tables}


def plan_lines(plan: FullPlan) -> list[str]:
    """The same for a person."""
    return [
        f"{shard}: {len(found)} tables, about {count_text(sum(t.rows_estimate for t in found))} rows, "
        f"{size_text(sum(t.size_bytes for t in found))} to read on each of its nodes"
        for shard, found in plan.tables.items()
    ]
