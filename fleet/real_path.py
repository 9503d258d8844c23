"""The place that a path leads to."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from cutline.storage.errors import UsageError


def real_path(path: Path) -> Path:
    """The absolute path without links; raise UsageError if there can be none: the links lead in a circle, or a NUL."""
    try:
        # Unlike Path.resolve, which raises RuntimeError for a circle before Python 3.13, it ends at the link.
        found = Path(os.path.realpath(path))
    except ValueError as error:
        raise UsageError(f"{str(path)!r}: {error}", hint="name another path") from error
    if _is_circular(found):
        raise UsageError(f"{path}: symbolic links lead in a circle at {found}", hint="name another path")
    return found


def _is_circular(path: Path) -> bool:
    """Whether a path without links has one all the same."""
    try:
        return stat.S_ISLNK(path.lstat().st_mode)
    except OSError as error:
        # In a folder that this user may not enter: whoever opens it says so.
        return error.errno == errno.ELOOP
