"""`snapshot demo`: runs the whole story; its subcommands manage an embedded fleet to try the commands on."""

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
    """Snapshot a busy embedded fleet, lose a shard, restore and verify: in a minute, and nothing is left behind.

    The subcommands manage an embedded fleet on which you can try the commands yourself.

    Exits 1 unless the check finds the snapshot valid and the restored bank's books balance; 4 if they do and the check
    is inconclusive, as on PostgreSQL 15, whose standbys can't decode WAL.
    """
    if context.invoked_subcommand is not None:
        if postgresql:
            raise UsageError(
                "--postgresql before a subcommand is that of the story alone",
                hint=f"give it after up: snapshot demo up DIR --postgresql {shlex.quote(str(postgresql))}",
            )
        return
    begin_session()
    lines = StoryLines(quiet=command_context(context).quiet)
    report = tell_story(lines, check_programs_folder(postgresql) if postgresql else None)
    emit(context, document_of(report), lines_of(report), code=report.exit_code)
    if report.exit_code != DONE:
        raise typer.Exit(report.exit_code)
