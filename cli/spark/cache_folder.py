"""The user's cache folder. It only saves time: anything in it may be deleted at any time."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder of the user's caches, created if necessary; None if there can be none."""
    if configured := os.environ.get("XDG_CACHE_HOME"):
        root = Path(configured)
    else:
        root = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    try:
        folder = root.expanduser() / "cutline"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    return folder if os.access(folder, os.W_OK) else None
