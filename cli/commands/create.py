"""`snapshot create`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from cutline.cli.commands.background import or_in_background
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import SECONDS_MAX, DryRun, Groups, check_text, command_context
from cutline.cli.output.commit_document import document_of
from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.left_out import left_out_lines, left_out_since
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.renewed import renewed_lines
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.shared_bases import shared_base_lines
from cutline.cli.output.tables import causes_lines, quantity_text, size_text, took_text
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Noting
from cutline.fleet.record import to_builtins
from cutline.nodes.left_out import LeftOut
from cutline.snapshots.create.context import RETRIES, WAIT_SECONDS, CreateRequest
from cutline.snapshots.create.full import FullPlan, create_full, preview_full
from cutline.snapshots.create.increment import create_increment, preview_increment
from cutline.snapshots.create.restore_point import create_restore_point, preview_restore_point
from cutline.snapshots.listing.name_templates import full_name, new_name, newest_name
from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.proven_chains import read_commit
from cutline.spark.on_demand import SparkOnDemand, forked_processes
from cutline.spark.task_processes import TaskProcess
from cutline.storage.errors import IndeterminateError, SnapshotError, UsageError

NewName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=complete_snapshots,
        help="Name of the new snapshot. In a template, {date}, {time} (UTC) and {n} are filled in.",
    ),
]
ExcludedGroups = Annotated[
    list[str] | None, typer.Option(metavar="S.T", help="Leave out tables that match this pattern (repeatable).")
]
Wait = Annotated[
    float,
    typer.Option(
        min=0,
        max=SECONDS_MAX,
        metavar="SECONDS",
        help="How long to wait for older transactions, for locks on sequences and, without --retries, for a time"
        " without DDL.",
    ),
]
LargeObjects = Annotated[
    bool | None,
    typer.Option(
        "--large-objects/--no-large-objects",
        help="Also copy large objects as they are now. Increments do not include changes to them. Default: [groups]"
        " large_objects in fleet.toml, else no.",
        show_default=False,
    ),
]
OnlyCut = Annotated[bool, typer.Option("--only-cut", help="Record a restore point for physical backups; copy no rows.")]
Replaced = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SHARD",
        help="Accept that another server or database has taken this shard's place, and copy it again (repeatable).",
    ),
]
PLAN_SCHEMA = "cutline/create-plan/1"


@or_in_background
def create(
    context: typer.Context,
    name: NewName,
    *,
    incremental: Annotated[
        bool, typer.Option("--incremental", help="Take the next increment of snapshot NAME.")
    ] = False,
    only_primary: Annotated[
        bool, typer.Option("--only-primary", help="Copy only primaries, not their standbys.")
    ] = False,
    group: Groups = None,
    exclude_group: ExcludedGroups = None,
    retries: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="How many times to retry if the cut is inconsistent or DDL interferes. Default: "
            f"{RETRIES}, and with DDL for as long as --wait.",
        ),
    ] = None,
    wait: Wait = WAIT_SECONDS,
    terminal: Annotated[
        bool,
        typer.Option("--terminal", help="Leave the fleet read-only until `snapshot resume`, for a move or an upgrade."),
    ] = False,
    large_objects: LargeObjects = None,
    only_cut: OnlyCut = False,
    replaced: Replaced = None,
    comment: Annotated[str, typer.Option(metavar="TEXT", help="A comment, shown by list and show.")] = "",
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Take a full snapshot of the fleet, or with --incremental the next increment of one.

    The fleet is not locked and keeps working. A snapshot is committed as a whole or not at all.
    """
    request = CreateRequest(
        name,
        only_primary,
        tuple(group or ()),
        tuple(exclude_group or ()),
        RETRIES if retries is None else retries,
        wait,
        comment,
        terminal,
        bool(large_objects),
        only_cut,
        tuple(dict.fromkeys(replaced or ())),
        wait if retries is None else 0.0,
    )
    check_request(request, incremental=incremental)
    fleet = command_context(context).load_fleet()
    if large_objects is None and not (incremental or only_cut):
        request = replace(request, large_objects=fleet.with_large_objects)
    with (
        forked_processes(fleet, are_wanted=not (dry_run or only_cut), store=True) as processes,
        leaving_metrics(context, fleet, "create", metrics, is_dry=dry_run),
    ):
        choose = newest_name if incremental else new_name if only_cut else full_name
        request = replace(request, name=choose(fleet, name))
        with with_hooks(context, fleet, "create", request.name, is_dry=dry_run, incremental=incremental):
            if dry_run:
                show_plan(context, fleet, request, incremental=incremental)
            else:
                run_create(context, fleet, request, processes, incremental=incremental)


def check_request(request: CreateRequest, *, incremental: bool) -> None:
    """Raise UsageError if options conflict, or are not valid UTF-8."""
    of_full = request.only_primary or request.include or request.exclude or request.large_objects
    if request.only_cut and (incremental or of_full or request.terminal):
        raise UsageError(
            "--only-cut takes a cut of all primaries and copies nothing",
            hint="--only-cut accepts only --retries, --wait, --comment and --dry-run; every restore point needs a new"
            " name: snapshot create NAME --only-cut",
        )
    if incremental and of_full:
        raise UsageError(
            "an increment always covers the nodes and tables of its full snapshot",
            hint="omit --only-primary, --group, --exclude-group and --large-objects",
        )
    if request.replaced and not incremental:
        raise UsageError(
            "a full snapshot copies every server as it is now",
            hint="omit --replaced, or take an increment: --incremental",
        )
    check_text("--comment", request.comment)
    check_text("--replaced", *request.replaced)
    check_text("--group or --exclude-group", *request.include, *request.exclude)


def run_create(
    context: typer.Context, fleet: Fleet, request: CreateRequest, processes: Sequence[TaskProcess], *, incremental: bool
) -> None:
    """Take the snapshot or increment, and print its report."""
    with (
        SparkOnDemand(fleet, f"create {request.name}", processes=processes) as spark,
        activity(context, fleet, "create") as shown,
    ):
        noting = Noting(shown)
        with _extend_hint(request):
            if request.only_cut:
                commit: Commit = create_restore_point(fleet, request, noting)
            else:
                commit = (create_increment if incremental else create_full)(fleet, request, spark, noting)
    # The commit is complete. Read the store again only if the human-readable output has items to name.
    options = command_context(context)
    is_named = incremental and bool(commit.left_out) and not options.json
    before: Iterable[LeftOut] = ()
    if is_named:
        before = _left_out_before(fleet, commit)
    elif options.quiet:
        # Every full snapshot leaves these items out, and they need no action: don't let cron mail them every night.
        before = commit.left_out
    lines = lines_of(commit, before)
    if request.only_cut:
        lines.append(f"to recover physical backups to it: snapshot show {request.name} --recovery-plan")
    emit(context, document_of(commit) | {"warnings": noting.warnings, "notes": noting.news}, lines)


def _left_out_before(fleet: Fleet, commit: Commit) -> tuple[LeftOut, ...]:
    """Return the items that the previous commit left out, or nothing if it can't be read, so that all are named."""
    with suppress(SnapshotError):
        named = commit.previous.digest if commit.previous else ""
        return read_commit(fleet.store.open(), commit.snapshot, commit.increment - 1, named).left_out
    return ()


def show_plan(context: typer.Context, fleet: Fleet, request: CreateRequest, *, incremental: bool) -> None:
    """Run all checks, and print the plan."""
    with progress(context) as shown:
        noting = Noting(shown)
        document, lines = make_plan(fleet, request, noting, incremental=incremental)
    document |= {"warnings": noting.warnings, "notes": noting.news}
    answer(context, document, [*lines, "every check passed; nothing was changed"])


@contextmanager
def _extend_hint(request: CreateRequest) -> Iterator[None]:
    try:
        yield
    except IndeterminateError as error:
        if request.terminal:
            error.hint += "\nuntil then the fleet is read-only; to accept writes at once: snapshot resume"
        raise


def make_plan(
    fleet: Fleet, request: CreateRequest, noting: Noting, *, incremental: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the output of --dry-run, as JSON and as lines."""
    if request.only_cut:
        nodes = list(preview_restore_point(fleet, request, noting).nodes)
        return {"schema": PLAN_SCHEMA, "snapshot": request.name, "nodes": nodes, "left_out": []}, []
    if incremental:
        increment_plan = preview_increment(fleet, request, noting)
        document: dict[str, Any] = {
            "schema": PLAN_SCHEMA,
            "snapshot": request.name,
            "wal_bytes": increment_plan.wal_bytes,
        }
        lines = [f"{node}: {size_text(size)} of WAL to archive" for node, size in increment_plan.wal_bytes.items()]
        left_out = increment_plan.left_out
    else:
        plan = preview_full(fleet, request, noting)
        document, lines, left_out = plan_document(request.name, plan), plan_lines(plan), plan.left_out
    return document | {"left_out": to_builtins(left_out)}, lines + left_out_lines(left_out)


def lines_of(commit: Commit, before: Iterable[LeftOut] = ()) -> list[str]:
    """Return the human-readable output; `before` contains the items that the previous commit left out."""
    counts, cut = commit.counts, commit.cut
    what = f"increment {commit.increment} of {commit.snapshot}" if commit.increment else f"snapshot {commit.snapshot}"
    rows = f"{quantity_text(counts['rows'], 'rows')}, " if counts["rows"] else ""
    lines = [
        f"{what} is committed: {rows}{quantity_text(counts['changes'], 'changes')} in "
        f"{quantity_text(counts['transactions'], 'transactions')}, {size_text(counts['bytes'])} in "
        f"{quantity_text(counts['objects'], 'objects')}, "
        + took_text(commit.seconds, commit.ran_seconds if isinstance(commit, FullSnapshot) else None),
        f"the cut took {cut.seconds * 1000:.1f} ms on {quantity_text(len(cut.nodes), 'shards')}"
        + (f" in attempt {cut.attempts}" if cut.attempts > 1 else "")
        + f": {quantity_text(cut.global_transactions, 'global transactions')}, {cut.in_flight} in flight at the cut, "
        f"{cut.included_early} of them included",
    ]
    if commit.terminal:
        lines.append("terminal: the fleet is read-only now; to accept writes again: snapshot resume")
    return (
        lines
        + shared_base_lines(commit)
        + renewed_lines(commit)
        + causes_lines(cut.causes)
        + left_out_since(commit.left_out, before, commit.snapshot)
    )


def plan_document(name: str, plan: FullPlan) -> dict[str, Any]:
    """Return the JSON output of --dry-run for a full snapshot."""
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
    readers = {shard: node.id for shard, node in plan.readers.items()}
    nodes = [node.id for node in plan.nodes]
    return {"schema": PLAN_SCHEMA, "snapshot": name, "nodes": nodes, "readers": readers, "groups": tables}


def plan_lines(plan: FullPlan) -> list[str]:
    """Return the human-readable plan of a full snapshot."""
    spared = {shard: " except the primary" for shard in plan.readers}
    return [
        f"{shard}: {quantity_text(len(found), 'tables')}, {_rows_text([t.rows_estimate for t in found])}, "
        f"{size_text(sum(t.size_bytes for t in found))} to read on each of its nodes{spared.get(shard, '')}"
        for shard, found in plan.tables.items()
    ]


def _rows_text(estimates: list[int | None]) -> str:
    known = [rows for rows in estimates if rows is not None]
    if not (unknown := len(estimates) - len(known)):
        return f"about {quantity_text(sum(known), 'rows')}"
    if not any(known):
        return "number of rows unknown (ANALYZE was never run)"
    return f"about {quantity_text(sum(known), 'rows')}, plus those of {quantity_text(unknown, 'tables')} never analyzed"
