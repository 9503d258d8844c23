"""Find the files that a confined server must see, and the private files among the system's files.

A build of PostgreSQL may have been moved since it was compiled, consist of links to several folders, and use libraries
from elsewhere. So the server sees its programs, its library and share folders, the libraries that the loader finds
elsewhere, and the targets of links. Other files in the same folders stay hidden, because the programs may be in ~/bin.

A home folder, a key or a data directory may be below /usr: PostgreSQL's manual itself names /usr/local/pgsql/data, and
/usr/local/pgsql is often the home of the postgres user.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from cutline.embedded.confine import SYSTEM
from cutline.nodes.programs import Programs, run_as

# The programs that start a server; pg_ctl runs the postgres in its own folder.
STARTERS = ("pg_ctl", "postgres")
# A build's library folders, and the module folders inside them. The names are exact, because a pattern could match
# ~/library.
LIBRARIES, MODULES = ("lib", "lib32", "lib64"), ("", "postgresql")
# A module that every build has.
A_MODULE = "plpgsql.so"
# Lines of initdb --show (share_path=/opt/15/share) and ldd (libssl.so.3 => /opt/ssl/lib/libssl.so.3 (0x00007fb358a)).
SHARED_FILES = re.compile(r"^share_path=(/.+)$", re.MULTILINE)
LIBRARY = re.compile(r"(/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
ASK_SECONDS_MAX = 120


def needed_files(programs: Programs, private: Iterable[Path] = ()) -> list[Path]:
    """Find the files, folders and links outside SYSTEM that a server needs, at their real paths and without overlap.

    Files below SYSTEM are included if they or a folder above them are `private`. Raises ProgramFailedError if a program
    that lists libraries or folders hangs.
    """
    names = [programs.bin_directory / name for name in STARTERS]
    real = sorted({name.resolve() for name in names})
    pending, modules = [*names], list[Path]()
    for install in dict.fromkeys(program.parent.parent for program in real):
        # Wheels keep libraries next to their packages.
        pending += [*(install / name for name in (*LIBRARIES, "share")), *install.parent.parent.glob("*.libs")]
        places = [install / name / below for name in LIBRARIES for below in MODULES]
        modules += [module for place in places if (place / A_MODULE).exists() for module in place.glob("*.so")]
    pending += [*_shared_files(programs), *_libraries(programs, [*real, *modules])]
    system, private, needed = [Path(path) for path in SYSTEM], list(private), list[Path]()
    while pending:
        for step in _way_to(pending.pop(0)):
            if not _is_in(step, needed) and (not _is_in(step, system) or _is_in(step, private)):
                needed.append(step)
                if not step.is_symlink():
                    pending += _links_below(step)
    # Drop files whose folder was added after them: nothing can be mounted in a folder once it is shown.
    return sorted(path for path in needed if not _is_in(path, (other for other in needed if other != path)))


def _shared_files(programs: Programs) -> list[Path]:
    said = run_as(
        programs.account,
        [str(programs.bin_directory / "initdb"), "--show", "--pgdata=/nonexistent"],
        seconds_max=ASK_SECONDS_MAX,
    )
    return [Path(path) for path in SHARED_FILES.findall(said.stderr + said.stdout)]


def _libraries(programs: Programs, files: list[Path]) -> list[Path]:
    ldd = shutil.which("ldd")
    if ldd is None:
        return []
    said = run_as(programs.account, [ldd, *map(str, files)], seconds_max=ASK_SECONDS_MAX)
    return [Path(path) for path in dict.fromkeys(LIBRARY.findall(said.stdout))]


def _way_to(path: Path) -> Iterator[Path]:
    """Yield the links along an absolute path, at their real paths, and finally their target."""
    place, rest = Path("/"), list(reversed(path.parts[1:]))
    try:
        path.resolve(strict=True)
    except (OSError, RuntimeError):
        # The path is missing, or its links are circular.
        return
    while rest:
        name = rest.pop()
        place = place.parent if name == ".." else place / name
        if place.is_symlink():
            yield place
            target = place.readlink()
            place = Path("/") if target.is_absolute() else place.parent
            rest += [part for part in reversed(target.parts) if part != "/"]
    yield place


def _links_below(folder: Path) -> list[Path]:
    return [
        path
        for place, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if (path := Path(place, name)).is_symlink()
    ]


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


# Nix makes all files in its store readable by everybody, and the store may be large.
FOR_EVERYBODY = "/nix/store"
READ, ENTER = 0o4, 0o5
# If a folder contains more private files, the whole folder is private: each hidden path is a mount, and is passed in a
# program's argument.
MANY = 100


def find_private(folders: Iterable[str] = SYSTEM) -> list[Path]:
    """Find the files and folders below `folders` that not everybody may read, and this user's home folders.

    A home folder is included only if it belongs to the user. No result is inside another result.
    """
    homes = set(_home_folders())
    places = [Path(folder) for folder in folders if folder != FOR_EVERYBODY]
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
        # The folder may have been deleted in the meantime.
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
