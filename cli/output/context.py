"""The options that precede the command; every command reads them from here.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from fleet.config import Fleet

FLEET_VARIABLE = "SNAPSHOT_FLEET"
FLEET_FILE_DEFAULT = "fleet.toml"


def default_fleet_path() -> Path:
    """$SNAPSHOT_FLEET, else ./fleet.toml."""
    return Path(os.environ.get(FLEET_VARIABLE) or FLEET_FILE_DEFAULT)


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The global options of one invocation. `json`: stdout is exactly one JSON document."""

    fleet_path: Path = field(default_factory=default_fleet_path)
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def load_fleet(self) -> Fleet:
        """Read fleet.toml, contacting nothing; raise FleetFileError naming the file and the wrong key."""
        from fleet.config import load_fleet

        return load_fleet(self.fleet_path)


def command_context(context: typer.Context) -> CommandContext:
    """The global options of the invocation; the defaults if the command runs without the top-level command."""
    options = context.find_root().obj
    return options if isinstance(options, CommandContext) else CommandContext()
