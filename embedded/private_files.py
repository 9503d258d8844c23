"""What of the system's folders is not for everybody: a confined server of an ordinary user has that user's rights.

A home folder, a key or a data directory may lie below /usr: PostgreSQL's manual itself names /usr/local/pgsql/data, and
/usr/local/pgsql is often the home of the user postgres.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cutline.embedded.confine import SYSTEM

# Of any size, and readable by everybody: Nix sees to that.
FOR_EVERYBODY = "/nix/store"
READ, ENTER = 0o4, 0o5
# A folder with more of them is private itself: each is a mount, and their names are an argument of a program.
MANY = 100


def find_private(folders: Iterable[str] = SYSTEM) -> list[Path]:
    """The files and folders below `folders` that not everybody may read, and this user's home folders.

    A home folder is one that belongs to the user. None of them is in another one.
    """
    homes = set(_home_folders())
    places = [Path(one) for one in folders if one != FOR_EVERYBODY]
    return [
        path
        for folder in places
        if folder.is_dir() and not folder.is_symlink()
        for path in _private_below(str(folder), homes)
    ]


def _home_folders() -> Iterator[str]:
    named = [os.environ.get("HOME")]
    with suppress(KeyError):
        named.append(pwd.getpwuid(os.geteuid()).pw_dir)
    for home in filter(None, named):
        with suppress(OSError, RuntimeError):
            real = Path(home).resolve()
            if real.stat().st_uid == os.geteuid():
                yield str(real)


def _private_below(folder: str, homes: set[str]) -> Iterator[Path]:
    pending = [folder]
    while pending:
        place, private, others = pending.pop(), list[Path](), list[str]()
        # It may be gone meanwhile.
        with suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                is_folder = entry.is_dir(follow_symlinks=False)
                mode = entry.stat(follow_symlinks=False).st_mode
                wanted = ENTER if is_folder else READ
                if mode & wanted != wanted or (is_folder and entry.path in homes):
                    private.append(Path(entry.path))
                elif is_folder:
                    others.append(entry.path)
        if len(private) > MANY:
            yield Path(place)
        else:
            yield from private
            pending += others
