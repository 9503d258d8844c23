"""`snapshot restore`, and `snapshot restore-resume`, which finishes an interrupted restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.commands.restore_ends import load_target, naming_target
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import (
    AllowRefusedDdl,
    Analyze,
    At,
    CreateRoles,
    DataOnly,
    DryRun,
    Exact,
    GroupsOrMoves,
    Increment,
    NoDatabaseSettings,
    Nodes,
    NoOwner,
    Replace,
    RoleMap,
    Routes,
    SchemaOnly,
    Schemas,
    SnapshotName,
    To,
    UseBackupCopies,
    command_context,
    parse_at,
)
from cutline.cli.output.confirmation import Confirmation, Yes, require_confirmation
from cutline.cli.output.failure import DDL_REFUSED, DONE
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.recovery import WARNING, write_transactions
from cutline.cli.output.refused_statements import write_refused
from cutline.cli.output.restore_report import announce_plan, document_of, dry_run_lines, lines_of, preview_document
from cutline.cli.output.restore_scope import check_options, parse_groups, parse_role_map, parse_routes
from cutline.cli.output.results import answer, emit, progress
from cutline.fleet.config import Fleet
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


@or_in_background
def restore(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    at: At = None,
    exact: Exact = False,
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
    yes: Yes = False,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Restore the fleet's databases to the state of the newest increment, or of the increment that you choose.

    The databases are loaded under temporary names, and get their real names together at the end. If the command ends
    before that, `restore-resume` finishes the restore and `restore-abandon` undoes it.
    """
    confirmation = require_confirmation(context, "restore --replace", yes=yes or dry_run or not replace)
    source = command_context(context).load_fleet()
    check_protection(source.spark_master, source.spark_settings)
    target = load_target(to, source, node or ())
    (groups, moves), routes = parse_groups(group or ()), parse_routes(route or ())
    scope = RestoreScope(
        nodes=tuple(node or ()),
        schemas=tuple(schema or ()),
        schema_only=schema_only,
        data_only=data_only,
        no_owner=no_owner,
        role_map=parse_role_map(role_map or ()),
        moves=moves,
        analyze=analyze,
        no_database_settings=no_database_settings,
    )
    name, moment = newest_name(source, name), parse_at(at, increment, exact=exact)
    request = RestoreRequest(
        name,
        increment,
        moment,
        groups,
        routes,
        replace,
        create_roles,
        use_backup_copies,
        allow_refused_ddl,
        scope,
        exact=exact,
    )
    check_options(request)
    with naming_target(to, name):
        plan, announced = None, dict[str, Any]()
        if not confirmation.is_given:
            plan = plan_restore(source, target, request)
            _ask(context, plan, confirmation, announced)
            # The restore starts when the user answers. Other commands use this start time until the first heartbeat.
            plan = plan.begun_now()
        with (
            leaving_metrics(context, source, "restore", metrics, is_dry=dry_run),
            with_hooks(context, source, "restore", name, is_dry=dry_run),
        ):
            plan = plan or plan_restore(source, target, request)
            if dry_run:
                _show_plan(context, plan)
            else:
                _run_plan(context, plan, source, confirmation, announced)


@or_in_background
def restore_resume(
    context: typer.Context,
    name: SnapshotName,
    *,
    to: To = None,
    node: Nodes = None,
    allow_refused_ddl: AllowRefusedDdl = False,
    metrics: MetricsFile = None,
    dry_run: DryRun = False,
) -> None:
    """Finish an interrupted restore of this snapshot. Rows that are already loaded are kept.

    You can run it on any machine that can reach the targets and the store. Give the same --to and --node as for the
    restore; the other options of the restore are recorded.
    """
    source = command_context(context).load_fleet()
    check_protection(source.spark_master, source.spark_settings)
    target, name = load_target(to, source, node or ()), newest_name(source, name)
    scope = RestoreScope(nodes=tuple(node or ()))
    request = RestoreRequest(name, allow_refused_ddl=allow_refused_ddl, scope=scope)
    with (
        naming_target(to, name),
        leaving_metrics(context, source, "restore", metrics, is_dry=dry_run),
        with_hooks(context, source, "restore-resume", name, is_dry=dry_run),
    ):
        if dry_run:
            with progress(context) as shown:
                plan, preview = preview_resumed(source, target, request, shown)
            answer(context, preview_document(plan, preview), dry_run_lines(plan, preview))
            return
        announced: dict[str, Any] = {}

        def work(spark: SparkOnDemand, shown: Progress) -> RestoreReport:
            return resume_restore(source, target, request, spark, shown, partial(announce_plan, context, announced))

        _run_restore(context, source, name, work, announced)


def _show_plan(context: typer.Context, plan: RestorePlan) -> None:
    with progress(context) as shown:
        preview = preview_restore(plan, shown)
    answer(context, preview_document(plan, preview), dry_run_lines(plan, preview))


def _ask(context: typer.Context, plan: RestorePlan, confirmation: Confirmation, announced: dict[str, Any]) -> None:
    with progress(context) as shown:
        preview = preview_restore(plan, shown)
    announce_plan(context, announced, plan, preview)
    # Progress shows these warnings, too, but only after the answer.
    lines = [*(f"{WARNING}{text}" for text in preview.warnings), *preview.replaces]
    confirmation.ask(lines, "replace these databases?" if preview.replaces else "", losses=preview.replaces)


def _run_plan(
    context: typer.Context, plan: RestorePlan, source: Fleet, confirmation: Confirmation, announced: dict[str, Any]
) -> None:
    announce = None if announced else partial(announce_plan, context, announced, plan)

    def work(spark: SparkOnDemand, shown: Progress) -> RestoreReport:
        return restore_fleet(plan, spark, shown, confirmation.check, announce)

    _run_restore(context, source, plan.request.name, work, announced)


def _run_restore(
    context: typer.Context,
    source: Fleet,
    name: str,
    work: Callable[[SparkOnDemand, Progress], RestoreReport],
    announced: Mapping[str, Any],
) -> None:
    report: RestoreReport | None = None
    try:
        with SparkOnDemand(source, f"restore {name}") as spark, activity(context, source, "restore") as shown:
            noting = Noting(shown)
            report = work(spark, noting)
    except KeyboardInterrupt:
        # The restore is complete, and Spark ends with this process.
        if report is None:
            raise
    except DdlRefusedError as error:
        path, line = write_refused(str(error.details["unfinished"]), error.refused, _folder(), is_published=False)
        error.details["file"] = path
        error.hint = f"{line}\n{error.hint}"
        raise
    in_doubt = write_transactions((report.snapshot, report.increment), report.in_doubt, _folder(), report.exact)
    failed = [line.removeprefix(WARNING) for line in in_doubt if line.startswith(WARNING)]
    document = document_of(report) | dict(announced) | {"warnings": [*report.warnings, *noting.warnings, *failed]}
    document["notes"] = noting.news
    others = list(in_doubt)
    if report.refused:
        path, line = write_refused(report.operation, report.refused, _folder(), is_published=True)
        document["refused_file"] = path
        others.append(line)
    is_verbose = command_context(context).verbose
    lines = lines_of(report, others, announced.get("warnings", ()), is_announced=bool(announced), is_verbose=is_verbose)
    code = DDL_REFUSED if report.refused else DONE
    emit(context, document, lines, code=code)
    if code:
        raise typer.Exit(code)


def _folder() -> Path:
    """Return the working directory, for files about the restore.

    If it was deleted, return a relative path: writing there is then a warning, as it is if the disk is full.
    """
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()
