"""`snapshot drill`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cutline.cli.commands.background import or_in_background
from cutline.cli.commands.restore_ends import load_target, naming_target
from cutline.cli.output.activity import activity
from cutline.cli.output.arguments import (
    AllowRefusedDdl,
    At,
    CreateRoles,
    Exact,
    Increment,
    NoOwner,
    RoleMap,
    SnapshotName,
    UseBackupCopies,
    command_context,
    parse_at,
)
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.junit import DRILL, junit_of_drill, reporting_errors, write_report
from cutline.cli.output.metrics_file import MetricsFile, leaving_metrics
from cutline.cli.output.restore_report import announce_plan, drill_document, drill_lines
from cutline.cli.output.restore_scope import check_options, parse_role_map
from cutline.cli.output.results import emit
from cutline.fleet.progress import Noting
from cutline.restore.drill.drill import EXIT_CODES, run_drill
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.listing.name_templates import newest_name
from cutline.spark.on_demand import SparkOnDemand
from cutline.spark.settings import check_protection
from cutline.storage.errors import UsageError

OwnServers = Annotated[
    Path | None,
    typer.Option("--to", metavar="FILE", help="Drill on the servers of this fleet file. Default: temporary servers."),
]
Junit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Also write the results to FILE as a JUnit report.")
]


@or_in_background
def drill(
    context: typer.Context,
    name: SnapshotName,
    *,
    increment: Increment = None,
    at: At = None,
    exact: Exact = False,
    to: OwnServers = None,
    create_roles: CreateRoles = False,
    no_owner: NoOwner = False,
    role_map: RoleMap = None,
    use_backup_copies: UseBackupCopies = False,
    allow_refused_ddl: AllowRefusedDdl = False,
    junit: Junit = None,
    metrics: MetricsFile = None,
) -> None:
    """Prove that a snapshot can be restored: restore it to temporary servers, test the result, and remove the servers.

    The tests are the assertions in the fleet file: SQL queries that run on the restored databases. The fleet itself
    is not contacted.
    """
    source, roles = command_context(context).load_fleet(), parse_role_map(role_map or ())
    check_protection(source.spark_master, source.spark_settings)
    if not to and (create_roles or no_owner or roles):
        raise UsageError(
            "--create-roles, --no-owner and --role-map apply only to your own servers: they require --to FILE",
            hint="omit them: the temporary servers get the snapshot's roles",
        )
    own = load_target(to, source) if to else None
    name, moment = newest_name(source, name), parse_at(at, increment, exact=exact)
    request = RestoreRequest(
        name,
        increment,
        moment,
        create_roles=create_roles,
        use_backup_copies=use_backup_copies,
        allow_refused_ddl=allow_refused_ddl,
        scope=RestoreScope(no_owner=no_owner, role_map=roles),
        exact=exact,
    )
    check_options(request)
    with (
        naming_target(to, name),
        leaving_metrics(context, source, "drill", metrics),
        with_hooks(context, source, "drill", name),
    ):
        with (
            reporting_errors(junit, DRILL),
            SparkOnDemand(source, f"drill {name}") as spark,
            activity(context, source, "drill") as shown,
        ):
            noting, announced = Noting(shown), dict[str, Any]()
            report = run_drill(source, request, spark, noting, partial(announce_plan, context, announced), own)
        problems = write_report(junit, junit_of_drill(report))
        lines = drill_lines(report, announced.get("warnings", ()))
        lines += [f"warning: {problem}" for problem in problems]
        code = EXIT_CODES[report.result] or (UNWRITTEN if problems else DONE)
        warnings = [*report.restored.warnings, *noting.warnings, *problems]
        told = {"warnings": warnings, "notes": noting.news}
        emit(context, drill_document(report) | announced | told, lines, code=code)
        raise typer.Exit(code)
