"""`snapshot restore NAME --drill`, with or without `--to FILE`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import typer

from cutline.cli.output.activity import activity
from cutline.cli.output.drill import drill_document, drill_lines
from cutline.cli.output.failure import DONE, UNWRITTEN
from cutline.cli.output.junit import DRILL, junit_of_drill, reporting_errors, write_report
from cutline.cli.output.restore_report import announce_plan
from cutline.cli.output.results import emit
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Noting
from cutline.restore.drill.drill import EXIT_CODES, run_drill
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import RestoreScope
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.errors import UsageError

OPTIONS = "--increment, --at, --use-backup-copies, --allow-refused-ddl, --junit, --metrics, --background and --to"
OPTIONS_TO = "--create-roles, --no-owner and --role-map"


def run_drill_command(
    context: typer.Context,
    source: Fleet,
    request: RestoreRequest,
    junit: Path | None,
    own: Fleet | None,
    *,
    is_drill_alone: bool,
) -> NoReturn:
    """Run a drill, with `own` on the servers of that fleet, and exit as its assertions say.

    Raises UsageError unless `is_drill_alone`, --drill without options that end a restore, and the request is for all.
    """
    alone = RestoreRequest(
        request.name,
        request.increment,
        request.at,
        use_backup_copies=request.use_backup_copies,
        allow_refused_ddl=request.allow_refused_ddl,
    )
    if own:
        scope = RestoreScope(no_owner=request.scope.no_owner, role_map=request.scope.role_map)
        alone = replace(alone, create_roles=request.create_roles, scope=scope)
    if not is_drill_alone or request != alone:
        raise UsageError(
            f"--drill takes no other options than {OPTIONS}, with that also {OPTIONS_TO}; and --junit needs --drill",
            hint="snapshot restore NAME --drill --junit FILE",
        )
    with (
        reporting_errors(junit, DRILL),
        SparkOnDemand(source, f"drill {request.name}") as spark,
        activity(context, source, "drill") as shown,
    ):
        noting, announced = Noting(shown), dict[str, Any]()
        report = run_drill(source, request, spark, noting, partial(announce_plan, context, announced), own)
    problems = write_report(junit, junit_of_drill(report))
    lines = [*drill_lines(report), *(f"warning: {problem}" for problem in problems)]
    code = EXIT_CODES[report.result] or (UNWRITTEN if problems else DONE)
    emit(context, drill_document(report) | announced | {"warnings": [*noting.notes, *problems]}, lines, code=code)
    raise typer.Exit(code)
