"""The options that precede the command, and the arguments that several commands share.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cutline.cli.output.tables import printable
from cutline.storage.errors import UsageError

if TYPE_CHECKING:
    from cutline.fleet.config import Fleet

PROGRESS_SCHEMA = "cutline/progress/1"
FLEET_VARIABLE = "SNAPSHOT_FLEET"
FLEET_FILE_DEFAULT = "fleet.toml"


def default_fleet_path() -> Path:
    """$SNAPSHOT_FLEET, else ./fleet.toml."""
    return Path(os.environ.get(FLEET_VARIABLE) or FLEET_FILE_DEFAULT)


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The global options of an invocation. `json`: stdout is exactly one JSON document.

    `given_fleet` is the file of `--fleet`. `warnings` are about fleet.toml, known once it is loaded; results with
    `--json` have them.
    """

    fleet_path: Path = field(default_factory=default_fleet_path)
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    given_fleet: str | None = None
    warnings: list[str] = field(default_factory=list)

    def load_fleet(self) -> Fleet:
        """Read fleet.toml, contacting nothing, and show its warnings, once per command.

        Raises FleetFileError naming the file and the wrong key, and UsageError for another user's that nobody named.
        """
        from cutline.fleet.config import load_fleet

        if self.given_fleet is None and not os.environ.get(FLEET_VARIABLE):
            _check_found(self.fleet_path)
        fleet = load_fleet(self.fleet_path)
        for text in fleet.store.warnings:
            if text not in self.warnings:
                self.warnings.append(text)
                self.warn(text)
        return fleet

    def warn(self, text: str) -> None:
        """Show a warning on stderr."""
        note = json.dumps({"schema": PROGRESS_SCHEMA, "note": text})
        sys.stderr.write(f"{note if self.json else f'warning: {printable(text)}'}\n")


def _check_found(path: Path) -> None:
    """Raise UsageError for another user's file in the working directory: it names programs, and gets variables."""
    from cutline.storage.errors import UsageError

    try:
        owner = path.stat().st_uid
    except OSError:
        # The reader of the file reports that.
        return
    if owner not in {0, os.geteuid(), Path("/").stat().st_uid}:
        raise UsageError(
            f"{path} in the working directory belongs to another user",
            hint=f"if you trust it, name it: --fleet {path}",
        )


def command_context(context: typer.Context) -> CommandContext:
    """The global options of the invocation; the defaults if the command runs without the top-level command."""
    options = context.find_root().obj
    return options if isinstance(options, CommandContext) else CommandContext()


SECONDS_MAX = 365 * 86400
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
Transactions = Annotated[
    bool, typer.Option("--transactions", help="List the transactions that were in doubt at the cut, and decisions.")
]
RecoveryPlan = Annotated[
    bool, typer.Option("--recovery-plan", help="How to recover physical backups of all nodes to the cut.")
]
Statements = Annotated[
    bool,
    typer.Option(
        "--statements", help="As SQL: roles, tablespaces, what databases themselves have, rows of extensions' tables."
    ),
]
Verifiers = Annotated[
    bool, typer.Option("--verifiers", help="With --statements: also the stored verifiers of roles' passwords.")
]
Timeline = Annotated[
    bool, typer.Option("--timeline", help="Draw cuts, sizes, phases, checks, gaps and lag of nodes over time.")
]
At = Annotated[
    str | None,
    typer.Option("--at", metavar="TIME", help="The newest cut made not after this time, such as 2026-11-20T10:00Z."),
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", metavar="S.T", help="Only these tables (repeatable; * and ?).")
]
UseBackupCopies = Annotated[
    bool, typer.Option("--use-backup-copies", help="Take rows that a primary's copy lacks from a standby's.")
]
AllowRefusedDdl = Annotated[
    bool,
    typer.Option(
        "--allow-refused-ddl", help="Restore without the statements that a target refuses: they are left in a file."
    ),
]
Schemas = Annotated[
    list[str] | None, typer.Option("--schema", metavar="S", help="Only the tables in this schema (repeatable).")
]
Analyze = Annotated[bool, typer.Option("--analyze", help="Collect the planner's statistics at the end.")]
NoDatabaseSettings = Annotated[
    bool,
    typer.Option(
        "--no-database-settings", help="Leave out owner, privileges, settings, comment, tablespace of the databases."
    ),
]
SchemaOnly = Annotated[bool, typer.Option("--schema-only", help="The whole DDL, and no rows.")]
DataOnly = Annotated[bool, typer.Option("--data-only", help="Only rows and sequences, into existing empty tables.")]
NoOwner = Annotated[bool, typer.Option("--no-owner", help="Everything belongs to the role that restores.")]
RoleMap = Annotated[
    list[str] | None,
    typer.Option("--role-map", metavar="A=B", help="What role A owns or may use is role B's (repeatable)."),
]
Nodes = Annotated[
    list[str] | None, typer.Option("--node", metavar="ID", help="Only this primary and its database (repeatable).")
]
GroupsOrMoves = Annotated[
    list[str] | None,
    typer.Option(
        "--group", metavar="S.T", help="Only these tables (repeatable; * and ?); S.T=S.T: one under another name."
    ),
]
To = Annotated[
    Path | None, typer.Option("--to", metavar="FILE", help="Restore into the fleet that this file describes.")
]
Replace = Annotated[bool, typer.Option("--replace", help="Rename existing databases and keep them.")]
CreateRoles = Annotated[
    bool, typer.Option("--create-roles", help="Create missing roles as they were, but not as superusers.")
]
Routes = Annotated[
    list[str] | None,
    typer.Option(
        "--route", metavar="S.T=EXPR", help="By what rows go to other targets, such as hash(id) (repeatable)."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Make all checks, show what would be done, change nothing.")]


def parse_moment(option: str, text: str) -> datetime:
    """The moment that an option's value names; raise UsageError."""
    why = ""
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
        why = ": it does not say how far it is from UTC"
    except (ValueError, OverflowError):
        pass
    raise UsageError(
        f"{option} {text!r} is no time{why}", hint="write it as 2026-11-20T10:00Z or 2026-11-20T11:00+01:00"
    )


def parse_at(at: str | None, increment: int | None) -> datetime | None:
    """The moment of --at; raise UsageError if --increment is given, too."""
    if at is not None and increment is not None:
        raise UsageError("--increment and --at exclude each other", hint="give one of the two")
    return None if at is None else parse_moment("--at", at)


def check_text(option: str, *values: str) -> None:
    """Raise UsageError unless the values of an option are text; arguments of a process may be any bytes."""
    for value in values:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{option} is not valid UTF-8", hint="set the terminal to UTF-8, or use ASCII characters"
            ) from error
