"""`snapshot report`: its options, its file and its JSON."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cutline.cli.folders.whole_file import replaced_file
from cutline.cli.output.context import command_context
from cutline.cli.output.results import emit
from cutline.cli.report.document import figures_document
from cutline.cli.report.sections import counts_text
from cutline.snapshots.listing.figures import read_figures
from cutline.snapshots.listing.name_templates import newest_name
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError

SCHEMA = "cutline/report/1"


def report(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The snapshot, or a template. Default: all snapshots.")
    ] = None,
    *,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the page to FILE: one file, without scripts.")
    ] = None,
) -> None:
    """Make a page of figures: cuts, sizes, phases, checks, lag of nodes, restore points and gaps.

    Reads commits and outcomes only. With --json the same figures are on stdout, with or without a page.
    """
    options = command_context(context)
    if html is None and not options.json:
        raise UsageError(
            "a report needs a file or --json",
            hint="snapshot report --html report.html   or in a terminal: snapshot show NAME --timeline",
        )
    fleet = options.load_fleet()
    with replaced_file(html) if html else nullcontext() as write:
        figures = read_figures(fleet, newest_name(fleet, name) if name is not None else None, utc_now())
        if write is not None:
            from cutline.cli.report.page import page_of

            write(page_of(figures))
    document = {"schema": SCHEMA, **figures_document(figures), "file": html}
    emit(context, document, [f"{html}: {counts_text(figures)}"])
