"""The `--background` option of long-running commands: the prompt returns as soon as the operation has started."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer

from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import DONE
from cutline.cli.output.results import answer
from cutline.cli.output.tables import name_fleet
from cutline.cli.process.detaching import is_in_background
from cutline.storage.errors import UsageError

SCHEMA = "cutline/background/1"
Background = Annotated[
    bool, typer.Option("--background", help="Run in the background; print the operation's id as soon as it is known.")
]


def or_in_background(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the --background option."""

    @wraps(command)
    def run(context: typer.Context, *, background: bool = False, **options: Any) -> None:
        if background and not is_in_background():
            start(context, is_dry=bool(options.get("dry_run")))
        command(context, **options)

    signature = inspect.signature(command, eval_str=True)
    option = inspect.Parameter("background", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Background)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]  # read by typer
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in run.__signature__.parameters.values()}  # type: ignore[attr-defined]  # as above
    return run


def start(context: typer.Context, *, is_dry: bool) -> NoReturn:
    """Run this command line in the background; exit once its operation has started.

    If the command ends before that, exit with its exit code.
    """
    from cutline.cli.process.detaching import EndedEarly, detach_command

    if is_dry:
        raise UsageError("--background and --dry-run are mutually exclusive", hint="use only one of them")
    started = detach_command(sys.argv[1:], sys.stderr)
    if isinstance(started, EndedEarly):
        sys.stdout.write(started.result)
        raise typer.Exit(started.code)
    files = started.files
    document = {
        "schema": SCHEMA,
        "operation": started.operation,
        "process": started.process,
        "result": files.result,
        "log": files.log,
    }
    answer(context, document, [started.operation])
    options = command_context(context)
    if not (options.json or options.quiet):
        waiting = name_fleet(f"snapshot wait {started.operation}", options.given_fleet, is_hint=True)
        sys.stderr.write(
            f"the operation continues in the background: progress and errors go to {files.log}, its result to"
            f" {files.result}\nto wait for it: {waiting}\n"
        )
    raise typer.Exit(DONE)
