"""`snapshot demo`: a complete demonstration. Its subcommands manage an embedded fleet to try the commands on."""

from __future__ import annotations

import shlex

import typer

from cutline.cli.demo.figures import document_of, lines_of
from cutline.cli.demo.fleet import PostgreSQL, down, load, up
from cutline.cli.demo.story import StoryLines, tell_story
from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import DONE
from cutline.cli.output.results import emit
from cutline.nodes.programs import check_programs_folder
from cutline.spark.session_folder import begin_session
from cutline.storage.errors import UsageError

demo_app = typer.Typer()
demo_app.command()(up)
demo_app.command()(load)
demo_app.command()(down)


@demo_app.callback(invoke_without_command=True)
def demo(context: typer.Context, postgresql: PostgreSQL = None) -> None:
    """Snapshot a busy embedded fleet, lose a shard, restore and verify. Takes a minute, and leaves nothing behind.

    The subcommands manage an embedded fleet on which you can try the commands yourself.

    Exit codes: 0 if the check finds the snapshot valid and the restored bank's books balance, 4 if they balance and
    the check is inconclusive (as on PostgreSQL 15, whose standbys can't decode WAL), otherwise 1.
    """
    if context.invoked_subcommand is not None:
        if postgresql:
            raise UsageError(
                "--postgresql before a subcommand applies only to the demonstration",
                hint=f"put it after up: snapshot demo up DIR --postgresql {shlex.quote(str(postgresql))}",
            )
        return
    begin_session()
    lines = StoryLines(quiet=command_context(context).quiet)
    report = tell_story(lines, check_programs_folder(postgresql) if postgresql else None)
    emit(context, document_of(report), lines_of(report), code=report.exit_code)
    if report.exit_code != DONE:
        raise typer.Exit(report.exit_code)
