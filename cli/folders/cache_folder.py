"""The user's cache folder. It only saves time: anything in it may be deleted at any time.

The JVM runs what is in it, so it is used only if nobody else can have put anything there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cutline.cli.folders.private_folder import private_folder


def cache_folder() -> Path | None:
    """The folder of the user's caches, created if necessary; None if there can be none, or if others can change it."""
    return private_folder("XDG_CACHE_HOME", "~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
