"""Whether another user of the machine can have put something in the place of a file or folder.

Root can, and so can whoever owns `/`, which in a user namespace may be another number: both are trusted. So is a group
to which the owner of a folder gave it: on many systems every user has a group of their own, which may write.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_own(path: Path) -> bool:
    """Whether `path` is a file or folder of this user, and no link; raise FileNotFoundError."""
    status = path.lstat()
    return status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)


def is_own_alone(path: Path) -> bool:
    """Whether `path` is a file or folder of this user that nobody else can write to, and no link."""
    return is_own(path) and not path.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def is_replaceable(path: Path) -> bool:
    """Whether another user can rename `path`, or a folder above it, and put something else in its place.

    `path` need not exist; the folders above it must, and none of them may be a link.
    """
    trusted = {0, os.geteuid(), Path("/").stat().st_uid}
    return any(_is_open_to_others(folder, trusted) for folder in path.parents)


def _is_open_to_others(folder: Path, trusted: set[int]) -> bool:
    status = folder.lstat()
    is_shared = status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX
    return bool(is_shared) or stat.S_ISLNK(status.st_mode) or status.st_uid not in trusted
