"""The options that precede the command, and the arguments that several commands share.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct, field

from cutline.cli.output.completing import complete_snapshots
from cutline.cli.output.fleet_option import FLEET_VARIABLE, check_found, default_fleet_path
from cutline.cli.output.tables import sentence_lines
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from cutline.fleet.config import Fleet

DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
# Increments have 16 digits in keys.
INCREMENT_DIGITS_MAX = 16
PROGRESS_SCHEMA = "cutline/progress/1"


class CommandContext(Struct, frozen=True):
    """The global options of an invocation. If `json` is set, stdout is exactly one JSON document.

    `given_fleet` is the file given with `--fleet`. `warnings` are the warnings about fleet.toml, which are known once
    it is loaded; JSON results include them. `operations` are the ids of operations that the command has begun, and
    `results` the results that it has written.
    """

    fleet_path: Path = field(default_factory=default_fleet_path)
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    given_fleet: str | None = None
    warnings: list[str] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)
    results: list[Mapping[str, object]] = field(default_factory=list)

    def load_fleet(self) -> Fleet:
        """Read fleet.toml without contacting anything, and show its warnings once per command.

        Raises FleetFileError, which names the file and the wrong key, and UsageError if the file belongs to another
        user and was found in the working directory.
        """
        from cutline.fleet.config import load_fleet

        if self.given_fleet is None and not os.environ.get(FLEET_VARIABLE):
            check_found(self.fleet_path)
        fleet = load_fleet(self.fleet_path)
        for text in fleet.store.warnings:
            if text not in self.warnings:
                self.warnings.append(text)
                self.warn(text)
        return fleet

    def warn(self, text: str) -> None:
        """Show a warning on stderr."""
        if self.json:
            lines: Iterable[str] = [json.dumps({"schema": PROGRESS_SCHEMA, "note": text})]
        else:
            lines = sentence_lines(f"warning: {text}", sys.stderr)
        sys.stderr.writelines(f"{line}\n" for line in lines)


def command_context(context: typer.Context) -> CommandContext:
    """Return the global options of the invocation, or the defaults if there was no top-level command."""
    options = context.find_root().obj
    return options if isinstance(options, CommandContext) else CommandContext()


SECONDS_MAX = 365 * 86400
SnapshotName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=complete_snapshots,
        help="The snapshot. A template such as 'nightly-{date}' selects the newest snapshot with a matching name.",
    ),
]
Increment = Annotated[
    int | None,
    typer.Option(
        "--increment", min=0, metavar="N", help="Number of the increment; 0 is the full snapshot. Default: the newest."
    ),
]
Transactions = Annotated[
    bool,
    typer.Option(
        "--transactions",
        help="List distributed transactions that were undecided at the cut, and how a restore resolves them.",
    ),
]
RecoveryPlan = Annotated[
    bool, typer.Option("--recovery-plan", help="Print how to recover physical backups of all nodes to the cut.")
]
Statements = Annotated[
    bool,
    typer.Option(
        "--statements", help="Print roles, tablespaces, database settings and the rows of extension tables as SQL."
    ),
]
Verifiers = Annotated[
    bool, typer.Option("--verifiers", help="With --statements: include the password verifiers of roles.")
]
Timeline = Annotated[
    bool, typer.Option("--timeline", help="Draw cuts, sizes, phases, checks, gaps and node lag over time.")
]
At = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="The latest cut at or before this time, such as 2026-11-20T10:00Z."),
]
ExactAt = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="Show what restore --at TIME --exact restores."),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="With --at: the state at that time itself, from the WAL between two cuts."),
]
Groups = Annotated[
    list[str] | None,
    typer.Option(
        "--group", metavar="S.T", help="Only tables that match this pattern, such as public.log_* (repeatable)."
    ),
]
UseBackupCopies = Annotated[
    bool,
    typer.Option(
        "--use-backup-copies",
        help="If rows in a primary's copy are damaged, use those in its standby's copy.",
    ),
]
AllowRefusedDdl = Annotated[
    bool,
    typer.Option(
        "--allow-refused-ddl",
        help="Restore without the DDL statements that a target refuses, and write them to a file.",
    ),
]
Schemas = Annotated[
    list[str] | None, typer.Option("--schema", metavar="S", help="Only the tables in this schema (repeatable).")
]
Analyze = Annotated[bool, typer.Option("--analyze", help="Run ANALYZE on the restored tables at the end.")]
NoDatabaseSettings = Annotated[
    bool,
    typer.Option(
        "--no-database-settings",
        help="Do not restore the owner, privileges, settings, comment or tablespace of the databases themselves.",
    ),
]
SchemaOnly = Annotated[bool, typer.Option("--schema-only", help="Restore the DDL without rows.")]
DataOnly = Annotated[bool, typer.Option("--data-only", help="Load rows and sequences into existing, empty tables.")]
NoOwner = Annotated[bool, typer.Option("--no-owner", help="Make the restoring role the owner of everything.")]
RoleMap = Annotated[
    list[str] | None,
    typer.Option(
        "--role-map", metavar="A=B", help="Give role B everything that role A owns or was granted (repeatable)."
    ),
]
Nodes = Annotated[
    list[str] | None, typer.Option("--node", metavar="ID", help="Only the database of this primary (repeatable).")
]
GroupsOrMoves = Annotated[
    list[str] | None,
    typer.Option(
        "--group",
        metavar="S.T",
        help="Only tables that match this pattern (repeatable). S.T=S.T restores a table under another name.",
    ),
]
To = Annotated[
    Path | None,
    typer.Option(
        "--to",
        metavar="FILE",
        help="Restore into the fleet that FILE describes. Default: the fleet of the snapshot.",
    ),
]
RestoredTo = Annotated[
    Path | None,
    typer.Option(
        "--to",
        metavar="FILE",
        help="The fleet that was restored into. Default: the fleet of the snapshot.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option("--replace", help="Rename existing databases to set them aside. `restore-discard` drops them later."),
]
CreateRoles = Annotated[
    bool, typer.Option("--create-roles", help="Create roles that are missing on the target, but never as superusers.")
]
Routes = Annotated[
    list[str] | None,
    typer.Option(
        "--route",
        metavar="S.T=EXPR",
        help="Expression that selects the target for each row, such as hash(id) (repeatable).",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Run all checks, print the plan, even with --quiet, and change nothing.")
]


def parse_moment(option: str, text: str) -> datetime:
    """Parse an option's value as a time; raise UsageError if it is not a time or has no UTC offset."""
    why = ""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
        why = ": it has no UTC offset"
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"{option} {text!r} is not a valid time{why}", hint="write it as 2026-11-20T10:00Z or 2026-11-20T11:00+01:00"
    )


def parse_point(text: str, increment: int | None = None) -> tuple[str, int | None]:
    """Parse NAME or NAME@N into the name of a snapshot and an increment, which --increment may give as well.

    Raises UsageError if N is not a number, or if both give the increment.
    """
    name, separator, number = text.partition("@")
    if not separator:
        return name, increment
    if increment is not None:
        raise UsageError(
            f"{text!r} and --increment {increment} both give the increment", hint="write it as NAME@3 or --increment 3"
        )
    if not (number.isascii() and number.isdigit()) or len(number) > INCREMENT_DIGITS_MAX:
        raise UsageError(f"{text!r}: {number!r} is not the number of an increment", hint="write it as NAME@3 or NAME")
    return name, int(number)


def parse_end(option: str, text: str) -> datetime:
    """Parse an option's value as the end of a period: a time, or a date, which includes all of that day in UTC."""
    if not DATE.fullmatch(text):
        return parse_moment(option, text)
    try:
        return parse_moment(option, f"{text}T00:00Z") + timedelta(days=1)
    except OverflowError:
        raise UsageError(f"{option} {text!r} is too far in the future", hint="leave the option out") from None


def parse_at(at: str | None, increment: int | None, *, exact: bool = False) -> datetime | None:
    """Parse the value of --at; raise UsageError if --increment is given, too, or --exact without --at."""
    if at is not None and increment is not None:
        raise UsageError("--increment and --at are mutually exclusive", hint="use only one of them")
    if exact and at is None:
        raise UsageError("--exact needs --at", hint="for example: --at 2026-11-20T10:00Z --exact")
    return None if at is None else parse_moment("--at", at)


def check_text(option: str, *values: str) -> None:
    """Raise UsageError unless the values of an option are valid text: a process's arguments can be arbitrary bytes."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{option} is not valid UTF-8", hint="set the terminal to UTF-8, or use ASCII characters"
            ) from error
