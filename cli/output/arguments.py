"""Arguments that several commands share."""

from __future__ import annotations

from datetime import UTC, datetime
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
At = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="The newest cut made not after this time, such as 2026-11-20T10:00Z."),
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="S.T", help="Only these tables (repeatable; * and ?).")
]
Routes = Annotated[
    list[str] | None,
    typer.Option(
        "--route", metavar="S.T=EXPR", help="By what rows go to other targets, such as hash(id) (repeatable)."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make all checks, show the plan, change nothing.")]


def parse_moment(option: str, text: str) -> datetime:
    """The moment that an option's value names; raise UsageError."""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError("it does not say how far it is from UTC")
        return moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise UsageError(
            f"{option} {text!r} is no time: {error}", hint="write it as 2026-11-20T10:00Z or 2026-11-20T11:00+01:00"
        ) from error


def check_text(option: str, *values: str) -> None:
    """Raise UsageError unless the values of an option are text; arguments of a process may be any bytes."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{option} is not valid UTF-8", hint="set the terminal to UTF-8, or use ASCII characters"
            ) from error
