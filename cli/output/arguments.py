"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

SnapshotName = Annotated[
    str, typer.Argument(metavar="NAME", help="The snapshot's name; of a template such as 'x-{date}' the newest.")
]
Increment = Annotated[
    int | None, typer.Option("--increment", min=0, metavar="N", help="An increment; 0 is the full snapshot [newest].")
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="S.T", help="Only these tables (repeatable; * and ?).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make all checks and estimates, and change nothing.")]
