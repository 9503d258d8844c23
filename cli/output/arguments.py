"""Arguments that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from storage.errors import UsageError

# rich reads help texts as markup and drops words in brackets: an opening bracket needs a backslash.
SnapshotName = Annotated[
    str, typer.Argument(metavar="NAME", help="The snapshot; a template such as 'x-{date}' selects its newest snapshot.")
]
Increment = Annotated[
    int | None,
    typer.Option(
        "--increment", min=0, metavar="N", help="The increment; 0 is the full snapshot. Default: the newest increment."
    ),
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="S.T", help="Only these tables (repeatable; * and ?).")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make all checks, show the plan, change nothing.")]


def check_text(option: str, *values: str) -> None:
    """Raise UsageError unless the values of an option are text; arguments of a process may be any bytes."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{option} is not valid UTF-8", hint="set the terminal to UTF-8, or use ASCII characters"
            ) from error
