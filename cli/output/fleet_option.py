"""The fleet file for a command line: the file that --fleet names, else $SNAPSHOT_FLEET, else ./fleet.toml.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

FLEET_VARIABLE = "SNAPSHOT_FLEET"
FLEET_FILE_DEFAULT = "fleet.toml"
FLEET_OPTION = "--fleet"


def given_fleet(words: Sequence[str]) -> str | None:
    """Return the file given with the last --fleet."""
    given = None
    for number, word in enumerate(words):
        if word.startswith(f"{FLEET_OPTION}="):
            given = word.partition("=")[2]
        elif word == FLEET_OPTION and number + 1 < len(words):
            given = words[number + 1]
    return given


def default_fleet_path() -> Path:
    """Return $SNAPSHOT_FLEET, else ./fleet.toml."""
    return Path(os.environ.get(FLEET_VARIABLE) or FLEET_FILE_DEFAULT)


def check_found(path: Path) -> None:
    """Raise UsageError if the file belongs to another user: it can run programs and read environment variables."""
    from cutline.storage.errors import UsageError

    try:
        owner = path.stat().st_uid
    except OSError:
        # The code that reads the file will report this error.
        return
    if owner not in {0, os.geteuid(), Path("/").stat().st_uid}:
        raise UsageError(
            f"{path} in the working directory belongs to another user",
            hint=f"if you trust it, name it explicitly: --fleet {path}",
        )
