"""The files of a build of PostgreSQL, which a confined server of it has to see (embedded/confine.py).

A build may have been moved since it was made, be linked together from several folders, and use libraries that neither
it nor the system has. So these are its programs, its folders of libraries and shared files, the libraries that the
loader finds elsewhere, and what links lead to. Nothing else that lies beside them: programs may be in ~/bin.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from cutline.embedded.confine import SYSTEM
from cutline.fleet.programs.wheel import Programs, run_as

# What starts a server: pg_ctl runs the postgres beside it.
STARTERS = ("pg_ctl", "postgres")
# Where a build has its libraries, and its modules there or one below. No pattern: what is ~/library?
LIBRARIES, MODULES = ("lib", "lib32", "lib64"), ("", "postgresql")
# A module that every build has.
A_MODULE = "plpgsql.so"
# As initdb --show and ldd print them: share_path=/opt/15/share; libssl.so.3 => /opt/ssl/lib/libssl.so.3 (0x00007fb358a)
SHARED_FILES = re.compile(r"^share_path=(/.+)$", re.MULTILINE)
LIBRARY = re.compile(r"(/.+) \(0x[0-9a-f]+\)$", re.MULTILINE)
ASK_SECONDS_MAX = 120


def needed_files(programs: Programs, private: Iterable[Path] = ()) -> list[Path]:
    """Its files, folders and links that are not below SYSTEM, each at its real place, and none in a folder among them.

    Those below SYSTEM that are `private`, or in what is, are among them, too.
    Raises ProgramFailedError if a program that tells of them does not end.
    """
    names = [programs.bin_directory / name for name in STARTERS]
    real = sorted({name.resolve() for name in names})
    pending, modules = [*names], list[Path]()
    for install in dict.fromkeys(program.parent.parent for program in real):
        # Wheels keep libraries beside their packages.
        pending += [*(install / name for name in (*LIBRARIES, "share")), *install.parent.parent.glob("*.libs")]
        places = [install / name / below for name in LIBRARIES for below in MODULES]
        modules += [module for one in places if (one / A_MODULE).exists() for module in one.glob("*.so")]
    pending += [*_shared_files(programs), *_libraries(programs, [*real, *modules])]
    system, private, found = [Path(path) for path in SYSTEM], list(private), list[Path]()
    while pending:
        for step in _way_to(pending.pop(0)):
            if not _is_in(step, found) and (not _is_in(step, system) or _is_in(step, private)):
                found.append(step)
                if not step.is_symlink():
                    pending += _links_below(step)
    # A folder may have come after what is in it, and can't be changed once it is shown.
    return sorted(path for path in found if not _is_in(path, (one for one in found if one != path)))


def _shared_files(programs: Programs) -> list[Path]:
    said = run_as(
        programs.account,
        [str(programs.bin_directory / "initdb"), "--show", "--pgdata=/nonexistent"],
        seconds_max=ASK_SECONDS_MAX,
    )
    return [Path(path) for path in SHARED_FILES.findall(said.stderr + said.stdout)]


def _libraries(programs: Programs, files: list[Path]) -> list[Path]:
    """The libraries that the loader finds for them in the environment that a server has."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return []
    said = run_as(programs.account, [ldd, *map(str, files)], seconds_max=ASK_SECONDS_MAX)
    return [Path(path) for path in dict.fromkeys(LIBRARY.findall(said.stdout))]


def _way_to(path: Path) -> Iterator[Path]:
    """The links on the way to an absolute path, each at its real place, and in the end what they lead to."""
    place, rest = Path("/"), list(reversed(path.parts[1:]))
    try:
        path.resolve(strict=True)
    except (OSError, RuntimeError):
        # Missing, or links in a circle.
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
