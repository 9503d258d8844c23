"""Folders of the user that nobody else can have put anything into: caches, and the output of commands.

The JVM runs what is in it, so it is used only if nobody else can have put anything there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cutline.fleet.own_process import is_own_alone, is_replaceable

NAME = "cutline"


def private_folder(variable: str, default: str) -> Path | None:
    """Cutline's folder in the one that the environment variable names, else in `default`; created if necessary.

    None if there can be none, or if others can change it.
    """
    try:
        folder = Path(os.environ.get(variable) or default).expanduser().resolve() / NAME
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_safe = is_own_alone(folder) and not is_replaceable(folder)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if is_safe and os.access(folder, os.W_OK) else None


def cache_folder() -> Path | None:
    """The folder of the user's caches, created if necessary; None if there can be none, or if others can change it."""
    return private_folder("XDG_CACHE_HOME", "~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
