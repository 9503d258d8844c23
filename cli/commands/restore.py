"""`snapshot restore`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.commands.drill import run_drill_command
from cutline.cli.commands.restore_ends import (
    ABANDON,
    DISCARD_OLD,
    ENDS,
    RESUME,
    Confirmation,
    check_ends,
    drop_old_databases,
    naming_target,
    show_old_databases,
    show_undo,
    undo_restore,
)
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import (
    Abandon,
    AllowRefusedDdl,
    Analyze,
    At,
    CreateRoles,
    DataOnly,
    DiscardOld,
    Drill,
    DryRun,
    GroupsOrMoves,
    Increment,
    Junit,
    NoDatabaseSettings,
    Nodes,
    NoOwner,
    Replace,
    Resume,
    RoleMap,
    Routes,
    SchemaOnly,
    Schemas,
    SnapshotName,
    To,
    UseBackupCopies,
    Yes,
    command_context,
    parse_at,
)
from cutline.cli.output.failure import DDL_REFUSED, DONE
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.recovery import WARNING, write_transactions
from cutline.cli.output.refused_statements import write_refused
from cutline.cli.output.restore_report import announce_plan, document_of, dry_run_lines, lines_of, preview_document
from cutline.cli.output.restore_scope import check_options, parse_groups, parse_role_map, parse_routes
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.process.detaching import is_user_present
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Noting, Progress
from cutline.restore.plan.plan import RestorePlan, plan_restore
from cutline.restore.plan.report import RestoreReport
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore, preview_resumed
from cutline.restore.run.refused import DdlRefusedError
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.listing.name_templates import newest_name
from cutline.spark.on_demand import SparkOnDemand
from cutline.spark.settings import check_protection

NO_TARGET_HINT = "--to names the file that describes the target; docs/fleet-file.md lists every key"


@or_in_background
def restore(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    at: At = None,
    to: To = None,
    group: GroupsOrMoves = None,
    schema: Schemas = None,
    node: Nodes = None,
    route: Routes = None,
    no_owner: NoOwner = False,
    role_map: RoleMap = None,
    no_database_settings: NoDatabaseSettings = False,
    schema_only: SchemaOnly = False,
    data_only: DataOnly = False,
    replace: Replace = False,
    create_roles: CreateRoles = False,
    use_backup_copies: UseBackupCopies = False,
    allow_refused_ddl: AllowRefusedDdl = False,
    analyze: Analyze = False,
    resume: Resume = False,
    abandon: Abandon = False,
    discard_old: DiscardOld = False,
    drill: Drill = False,
    junit: Junit = None,
    yes: Yes = False,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Restore the fleet's databases as they were at an increment."""
    source = command_context(context).load_fleet()
    check_protection(source.spark_master, source.spark_settings)
    target = load_fleet(to, hint=NO_TARGET_HINT) if to else source
    (groups, moves), routes = parse_groups(group or ()), parse_routes(route or ())
    nodes, schemas, roles = tuple(node or ()), tuple(schema or ()), parse_role_map(role_map or ())
    scope = RestoreScope(
        nodes=nodes,
        schemas=schemas,
        schema_only=schema_only,
        data_only=data_only,
        no_owner=no_owner,
        role_map=roles,
        moves=moves,
        analyze=analyze,
        no_database_settings=no_database_settings,
    )
    name, moment = newest_name(source, name), parse_at(at, increment)
    request = RestoreRequest(
        name, increment, moment, groups, routes, replace, create_roles, use_backup_copies, allow_refused_ddl, scope
    )
    check_options(request)
    confirm = Confirmation(is_given=yes or not is_user_present())
    ends = [word for word, is_set in zip(ENDS, (resume, abandon, discard_old), strict=True) if is_set]
    what = "drill" if drill else "restore"
    with naming_target(name, to), leaving_metrics(context, source, what, metrics, is_dry=dry_run):
        if drill or junit is not None:
            is_alone = drill and not any((yes, dry_run, ends))
            run_drill_command(context, source, request, junit, target if to else None, is_drill_alone=is_alone)
        elif ends:
            check_ends(ends, request)
            previews = {RESUME: show_rest, ABANDON: show_undo, DISCARD_OLD: show_old_databases}
            commands = {RESUME: go_on_restore, ABANDON: undo_restore, DISCARD_OLD: drop_old_databases}
            (previews if dry_run else commands)[ends[0]](context, source, target, request, confirm)
        else:
            (show_plan if dry_run else run_plan)(context, plan_restore(source, target, request), source, confirm)


def run_plan(context: typer.Context, plan: RestorePlan, source: Fleet, confirm: Confirmation) -> None:
    """Show the plan once all checks have passed, and run it."""
    announced: dict[str, Any] = {}

    def work(spark: SparkOnDemand, shown: Progress) -> RestoreReport:
        announce = partial(announce_plan, context, announced, plan)
        return restore_fleet(plan, spark, shown, confirm.replacing, announce)

    run_restore(context, source, plan.request.name, work, announced)


def go_on_restore(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, _confirm: Confirmation
) -> None:
    """Show what is left of an unfinished restore, and do it."""
    announced: dict[str, Any] = {}

    def work(spark: SparkOnDemand, shown: Progress) -> RestoreReport:
        return resume_restore(source, target, request, spark, shown, partial(announce_plan, context, announced))

    run_restore(context, source, request.name, work, announced)


def show_rest(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, _confirm: Confirmation
) -> None:
    """Make all checks of an unfinished restore that is resumed, and print what is left of it."""
    with progress(context) as shown:
        plan, preview = preview_resumed(source, target, request, shown)
    answer(context, preview_document(plan, preview), dry_run_lines(plan, preview))


def run_restore(
    context: typer.Context,
    source: Fleet,
    name: str,
    work: Callable[[SparkOnDemand, Progress], RestoreReport],
    announced: Mapping[str, Any],
) -> None:
    """Run a restore, or the rest of one, and print its report; its JSON has what `work` has `announced`."""
    report: RestoreReport | None = None
    try:
        with SparkOnDemand(source, f"restore {name}") as spark, activity(context, source, "restore") as shown:
            noting = Noting(shown)
            report = work(spark, noting)
    except KeyboardInterrupt:
        # All is done, and Spark ends with this process.
        if report is None:
            raise
    except DdlRefusedError as error:
        path, line = write_refused(str(error.details["unfinished"]), error.refused, Path.cwd(), is_published=False)
        error.details["file"] = path
        error.hint = f"{line}\n{error.hint}"
        raise
    in_doubt = write_transactions((report.snapshot, report.increment), report.in_doubt, Path.cwd())
    failed = [line.removeprefix(WARNING) for line in in_doubt if line.startswith(WARNING)]
    document = document_of(report) | dict(announced) | {"warnings": [*report.warnings, *noting.notes, *failed]}
    others = list(in_doubt)
    if report.refused:
        path, line = write_refused(report.operation, report.refused, Path.cwd(), is_published=True)
        document["refused_file"] = path
        others.append(line)
    is_verbose = command_context(context).verbose
    lines = lines_of(report, others, is_announced=bool(announced), is_verbose=is_verbose)
    code = DDL_REFUSED if report.refused else DONE
    emit(context, document, lines, code=code)
    if code:
        raise typer.Exit(code)


def show_plan(context: typer.Context, plan: RestorePlan, _source: Fleet, _confirm: Confirmation) -> None:
    """Make all checks, and print what the restore would do."""
    with progress(context) as shown:
        preview = preview_restore(plan, shown)
    answer(context, preview_document(plan, preview), dry_run_lines(plan, preview))
