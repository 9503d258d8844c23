"""The options that precede the command; every command reads them from here.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.cli.output.format import printable

if TYPE_CHECKING:
    import typer

    from cutline.fleet.config import Fleet

PROGRESS_SCHEMA = "cutline/progress/1"
FLEET_VARIABLE = "SNAPSHOT_FLEET"
FLEET_FILE_DEFAULT = "fleet.toml"


def default_fleet_path() -> Path:
    """$SNAPSHOT_FLEET, else ./fleet.toml."""
    return Path(os.environ.get(FLEET_VARIABLE) or FLEET_FILE_DEFAULT)


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The global options of one invocation. `json`: stdout is exactly one JSON document.

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
        # Whoever reads it says so.
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
