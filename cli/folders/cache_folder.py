"""The user's cache folder. It only saves time: anything in it may be deleted at any time.

The JVM runs what is in it, so it is used only if nobody else can have put anything there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fleet.ownership import is_own_alone, is_replaceable


def cache_folder() -> Path | None:
    """The folder of the user's caches, created if necessary; None if there can be none, or if others can change it."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        root = Path(configured)
    else:
        root = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    try:
        folder = root.expanduser().resolve() / "cutline"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_safe = is_own_alone(folder) and not is_replaceable(folder)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if is_safe and os.access(folder, os.W_OK) else None
